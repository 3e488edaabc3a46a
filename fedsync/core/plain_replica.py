"""A silo's side where updates travel in the clear."""

from __future__ import annotations

from fedsync.core.errors import SERVER, PolicyError, ProtocolError
from fedsync.core.layout import Vector
from fedsync.core.orders import WorkOrder, WorkReport
from fedsync.core.transfer import Payload
from fedsync.core.wire import FP32, WireFormat


class PlainReplica:
    """In the clear: every order brings the whole model, and the update goes as it is.

    Args:
        values: of the model.
        wire: how both travel.
    """

    def __init__(self, values: int, wire: WireFormat = FP32) -> None:
        self._values = values
        self._wire = wire

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
        self._wire.check(payload, self._values, SERVER)
        return self._wire.decode(payload, 0, self._values)

    def send(self, update: Vector, order: WorkOrder, report: WorkReport) -> Payload:
        return self._wire.encode(update)

    @property
    def pooled(self) -> None: ...

    def disclosed(self, report: WorkReport) -> WorkReport:
        return report

    def answer(self, question: Payload) -> Payload:
        raise ProtocolError("server", "question", "asked about masks where nothing is encrypted")

    def snapshot(self) -> Payload:
        raise PolicyError("a silo that keeps no model is asked for it")
