"""A silo's side where updates travel in the clear."""

from __future__ import annotations

from fedsync.core.errors import PolicyError, ProtocolError
from fedsync.core.layout import Vector
from fedsync.core.orders import WorkOrder, WorkReport
from fedsync.core.transfer import Payload


class PlainReplica:
    """In the clear: every order brings the whole model, and the update goes as it is."""

    @property
    def holds(self) -> int:
        return 0

    @property
    def model(self) -> Vector:
        raise PolicyError("a silo that keeps no model is asked for it")

    @property
    def unrevealed(self) -> bool:
        return False

    def greeting(self) -> None: ...

    def receive(self, payload: Payload, version: int) -> Vector:
        return payload

    def send(self, update: Vector, order: WorkOrder, report: WorkReport) -> Payload:
        return update

    @property
    def pooled(self) -> None: ...

    def disclosed(self, report: WorkReport) -> WorkReport:
        return report

    def answer(self, question: Payload) -> Payload:
        raise ProtocolError("server", "question", "asked about masks where nothing is encrypted")

    def snapshot(self) -> Payload:
        raise PolicyError("a silo that keeps no model is asked for it")
