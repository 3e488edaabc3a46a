"""A silo's side where updates travel in the clear.

What a format with few bits loses of an update is not gone: it is *owed*, and added to the silo's next update (error
feedback). So the sum of what a silo sent is the sum of its updates but for what it still owes, which is less than one
update's loss in the worst case of `Int8`, and grows with `TopK` to about what the values that wait have come to.

- What is owed belongs to the orders that are done. It is saved with the last one (`fedsync.silo.session.last_order`): a
  repeated order has the same bytes, and a trainer that was killed in an order does it again with what was owed before.
- It is kept as what the update stands for in a commit, n_i / a_i times itself (`Weighting`): the next order may have
  other steps and another batch, and the server weighs what it brings by those.
- An update that the server discards, or that is lost, leaves it as it is. What the discarded one carried is lost, as it
  is with 32 bits; what it did not carry was found in training too, and is no part of what was discarded. A silo
  is not told what became of its update, and need not be.
- A silo that was away for long adds what it owes, however old. It is a late update: `Int8` owes a few hundredths of
  one, `TopK` several, as old as the silo was away.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from fedsync.common.errors import SERVER, PolicyError, ProtocolError
from fedsync.common.rng import Stream, generator
from fedsync.core.orders import WorkOrder, WorkReport
from fedsync.core.weighting import Weighting
from fedsync.model.array_keeper import ArrayKeeper
from fedsync.model.broadcast_compression import HeldModel
from fedsync.model.chunked_arrays import give_back, spans
from fedsync.model.control_downlink import ControlledModel, key_of
from fedsync.model.layout import Vector
from fedsync.model.plain_wire import FP32, Wire
from fedsync.model.transfer import Payload

RECEIVED, LOST = "wire_received_bytes", "wire_loss"
"""Metrics: bytes of the model that came with an order; norm of what its update lost on the way over its own."""


class PlainReplica:
    """In the clear: orders bring the model, or what is new of it, and the update goes as its format has it.

    Args:
        values: of the model.
        wire: how both travel.
        weighting: how a commit weighs updates, as far as silos know; None where they do not.
        examples: training samples that the silo holds.
        keeper: keeps the model, where the silo has one, and updates as they travel; by default in memory.
        controlled: control variates come with the newest model; then both travel as float32.
    """

    def __init__(
        self,
        values: int,
        wire: Wire | None = None,
        weighting: Weighting | None = None,
        examples: int = 1,
        keeper: ArrayKeeper | None = None,
        *,
        controlled: bool = False,
    ) -> None:
        self._values = values
        self._controlled = controlled
        self._last: ControlledModel | None = None
        self._wire = wire = wire or Wire()
        self._weighting = weighting or Weighting()
        self._examples = examples
        self._keeper = keeper or ArrayKeeper()
        self._held = None if wire.down is FP32 else HeldModel(values, wire.down, self._keeper)
        self._received_bytes = 0
        self._lost = 0.0
        self._owed: Vector | None = None
        self._owed_next: Vector | None = None

    @property
    def holds(self) -> int:
        return 0 if self._held is None else self._held.version

    @property
    def model(self) -> Vector:
        if self._held is None:
            raise PolicyError("a silo that keeps no model is asked for it")
        return self._held.model

    @property
    def best_model(self) -> None: ...

    @property
    def best_version(self) -> int:
        return -1

    @property
    def unrevealed(self) -> bool:
        return False

    def greeting(self) -> None: ...

    def receive(self, payload: Payload, version: int) -> Vector:
        self._received_bytes = payload.nbytes
        if self._held is not None:
            return self._held.receive(payload, version)
        self._last = None
        if self._controlled and payload.nbytes != FP32.payload_bytes(self._values):  # else a model that is not trained
            self._last = ControlledModel.decode(payload, self._values)
            return self._last.model
        FP32.check(payload, self._values, SERVER)
        return FP32.decode(payload, 0, self._values)

    @property
    def control(self) -> Vector | None:
        return None if self._last is None else self._last.control

    def counted(self, silo: str) -> int:
        return 0 if self._last is None else self._last.counted.get(key_of(silo), 0)

    def arriving(self, update: Vector, order: WorkOrder, report: WorkReport) -> Vector:
        return update

    def send(self, update: Vector, order: WorkOrder, report: WorkReport) -> Payload:
        up = self._wire.up
        if up is FP32:
            return up.encode(update)
        factor, square, lost_square = np.float32(self._factor(report)), 0.0, 0.0
        # In the memory of the update comes what is wanted, then what is owed of it: each is as large as the model, and
        # whoever calls has given it away.
        for start, stop in spans(update.size, 4):
            part = update[start:stop]
            square += _square(part)
            if self._owed is not None:
                part += self._owed[start:stop] / factor
                give_back(self._owed)
        payload = up.encode(update, generator(order.seed, Stream.ROUNDING), self._keeper)
        for start, stop in spans(update.size, 4):
            part = update[start:stop]
            part -= up.decode(payload, start, stop)
            give_back(payload)
            lost_square += _square(part)
            if up.feedback:
                part *= factor
        self._lost = math.sqrt(lost_square / square) if square else 0.0
        if up.feedback:
            self._owed_next = update
        return payload

    def _factor(self, report: WorkReport) -> float:
        """What an update is multiplied by in a commit, but for what all silos have in common: n_i / a_i."""
        weighting = self._weighting
        return max(weighting.weight(self._examples, report.samples), 1) / weighting.progress(report.steps)

    @property
    def owed(self) -> Vector | None:
        return self._owed_next

    def owe(self, owed: Vector | None) -> None:
        self._owed = self._owed_next = owed

    @property
    def pooled(self) -> None: ...

    def disclosed(self, report: WorkReport) -> WorkReport:
        told: dict[str, float] = {}
        if self._held is not None:
            told[RECEIVED] = float(self._received_bytes)
        if self._wire.up is not FP32:
            told[LOST] = self._lost
        return replace(report, metrics={**report.metrics, **told}) if told else report

    def answer(self, question: Payload) -> Payload:
        raise ProtocolError("server", "question", "asked about masks where nothing is encrypted")

    def snapshot(self) -> Payload:
        raise PolicyError("a silo that keeps no model is asked for it")


def _square(part: Vector) -> float:
    """Square of the Euclidean norm, in float64."""
    exact = part.astype(np.float64)
    return float(exact @ exact)
