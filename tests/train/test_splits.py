"""Rounds are evaluated on the validation split; the test split is not looked at before it is asked for."""

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from fedsync.core.orders import Cursor, Split
from fedsync.tasks.task_protocol import SiloData, SiloSlot
from tests.train.make import TwoClasses, order, trainer


class Watched(Dataset[Any]):
    """Counts who looks at its samples."""

    def __init__(self, samples: Dataset[Any], keep: int) -> None:
        self.samples, self.keep, self.looks = samples, keep, 0

    def __len__(self) -> int:
        return self.keep

    def __getitem__(self, row: int) -> Any:
        self.looks += 1
        return self.samples[row]


class Held(TwoClasses):
    """A test split of seven samples, and so many to validate on."""

    def __init__(self, validation: int | None) -> None:
        super().__init__()
        self.validation = validation

    def data(self, slot: SiloSlot) -> SiloData:
        given = super().data(slot)
        self.test = Watched(given.test, 7)
        held = None if self.validation is None else Watched(given.train, self.validation)
        return SiloData(given.train, self.test, held)

    def score(self, model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """One of its own, which is tried before a run begins: not on the test split."""
        return super().score(model, batch)


def test_the_test_split_is_not_looked_at_before_it_is_asked_for() -> None:
    task = Held(5)
    subject = trainer(task)
    base = subject.initial_model()
    report = subject.run(order(evaluate=True), base, Cursor()).report
    assert report.evaluation == subject.evaluate(base) and report.evaluation is not None
    assert (subject.validates, report.evaluation.samples, task.test.looks) == (True, 5, 0)
    assert (subject.evaluate(base, split=Split.TEST).samples, task.test.looks) == (7, 7)


@pytest.mark.parametrize("validation", [None, 0])
def test_without_a_validation_split_rounds_have_the_test_split(validation: int | None) -> None:
    task = Held(validation)
    subject = trainer(task)
    base = subject.initial_model()
    report = subject.run(order(evaluate=True), base, Cursor()).report
    assert report.evaluation == subject.evaluate(base, split=Split.TEST) and report.evaluation is not None
    assert (subject.validates, report.evaluation.samples) == (False, 7)
