"""Trainer of this process for a silo's session; an error in user code becomes one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedsync.core.orders import Cursor, Evaluation, Split, WorkOrder
from fedsync.evaluation.metrics.gain import LocalGains
from fedsync.model.layout import Vector
from fedsync.privacy.release import PrivateSettings
from fedsync.train.guests.guest_code import guarded, line_of
from fedsync.train.local_trainer import LocalTrainer
from fedsync.train.machine.throttle import Throttle
from fedsync.train.silo_trainer import Outcome, TrainerFacts, Watch


class GuardedTrainer:
    """`SiloTrainer` around a `LocalTrainer`.

    Raises `UserCodeError` for errors in user code, and `ConfigError` if data or device are not usable on this machine.
    """

    def __init__(self, make: Callable[[], LocalTrainer]) -> None:
        with guarded():
            self._trainer = made = make()
            self.facts = TrainerFacts(
                made.layout,
                made.frozen_digest.hex(),
                tuple(made.kept_names),
                made.table,
                made.device,
                made.examples,
                made.validates,
                tuple(made.tied_names),
            )
        self._gains = LocalGains()

    @guarded()
    def initial_model(self) -> Vector:
        return self._trainer.initial_model()

    @guarded()
    def save_model(self, path: Path, model: Vector) -> None:
        self._trainer.save_model(path, model)

    @guarded()
    def find_batch_cap_on_gpu(self) -> int | None:
        return self._trainer.find_batch_cap_on_gpu()

    @guarded()
    def make_private(self, settings: PrivateSettings) -> int:
        return self._trainer.make_private(settings)

    @guarded()
    def run(
        self,
        order: WorkOrder,
        base: Vector,
        cursor: Cursor,
        throttle: Throttle | None = None,
        watch: Watch | None = None,
        correction: Vector | None = None,
    ) -> Outcome:
        return self._trainer.run(order, base, cursor, throttle, watch, correction)

    def try_evaluate(self, model: Vector, cursor: Cursor, split: Split) -> Evaluation | None:
        return self._trainer.try_evaluate(model, cursor, split)

    @guarded()
    def judge(self, model: Vector, cursor: Cursor, split: Split, subject: str, *, gains: bool) -> Evaluation:
        found = self._trainer.evaluate(model, cursor, split)
        return self._gains.told(subject, found, self._trainer.judged if gains else None)

    def where(self, thread: int) -> str:
        return line_of(thread)
