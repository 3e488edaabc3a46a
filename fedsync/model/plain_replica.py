"""Silo's copy of the model in an unencrypted run, with error feedback for compressed updates.

A compressed format loses a part of each update. The silo stores this residual (the *owed* vector) and adds it to its
next update (error feedback). So the sum of the sent updates equals the sum of the true updates minus the current
residual. With `Int8` the residual is smaller than the worst-case loss of one update. With `TopK` it grows to about the
sum of the unsent values.

- The residual belongs to finished orders and is saved with the last one (`fedsync.silo.session.current_order`). So a
  repeated order yields the same bytes, and a killed trainer repeats its order with the earlier residual.
- The residual is stored times n_i / a_i, its factor in a commit (`Weighting`). The next update is weighed by its own
  order, which may have other steps and another batch size.
- A discarded or lost update does not change the residual, and its values are lost, as with 32 bits. So a silo need not
  know the fate of its update.
- A silo that returns after a long absence adds its residual, however old. It acts as a late update: a few hundredths of
  an update with `Int8`, several updates with `TopK`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from fedsync.common.errors import SERVER, PolicyError, ProtocolError
from fedsync.common.rng import Stream, generator
from fedsync.core.orders import WorkOrder, WorkReport
from fedsync.core.silo_weight import Weighting
from fedsync.model.broadcast_compression import HeldModel
from fedsync.model.chunked_arrays import ArrayKeeper, give_back, spans
from fedsync.model.control_variates import ControlledModel, key_of
from fedsync.model.layout import Vector
from fedsync.model.plain_wire import FP32, Wire
from fedsync.model.transfer import Payload

RECEIVED, LOST = "wire_received_bytes", "wire_loss"
"""Metrics: bytes of the model received with an order; norm of the update's compression loss over the update's norm."""


class PlainReplica:
    """Replica without encryption: orders bring the model or its changes; the update travels in its wire format.

    Args:
        weighting: the commit's weights, as far as silos know them; None if they do not.
        keeper: storage of the model (if the silo keeps it) and of encoded updates; in memory by default.
        controlled: control variates come with the newest model; then model and control travel as float32.
    """

    best_version = -1
    unrevealed = False

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
        self._values, self._controlled, self._examples = values, controlled, examples
        self._wire, self._weighting, self._keeper = wire or Wire(), weighting or Weighting(), keeper or ArrayKeeper()
        self._held = None if self._wire.down is FP32 else HeldModel(values, self._wire.down, self._keeper)
        self._last: ControlledModel | None = None
        self._received_bytes, self._lost = 0, 0.0
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

    def greeting(self) -> None: ...

    def receive(self, payload: Payload, version: int) -> Vector:
        self._received_bytes = payload.nbytes
        if self._held is not None:
            return self._held.receive(payload, version)
        self._last = None
        if self._controlled and payload.nbytes != FP32.payload_bytes(self._values):  # else a model for evaluation only
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
        # The update's memory holds first the update plus residual, then the new residual: each is as large as the
        # model, and the caller gave up ownership of the update.
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
        """Factor of an update in a commit, n_i / a_i, without the part common to all silos."""
        weighting = self._weighting
        weight = weighting.weight(self._examples, report.samples, report.precision)
        return max(weight, 1) / weighting.progress(report.steps)

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
        raise ProtocolError("server", "question", "asked about masks in an unencrypted run")

    def snapshot(self) -> Payload:
        raise PolicyError("a silo that keeps no model is asked for it")


def _square(part: Vector) -> float:
    exact = part.astype(np.float64)
    return float(exact @ exact)
