from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsync.tasks.protocol import Batch
from fedsync.train.sampler import Cursor
from tests.train.make import Cramped, TwoClasses, order, trainer

CPU_MESSAGE = "[enforce fail] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"


@pytest.mark.parametrize("message", ["", CPU_MESSAGE])
def test_the_ordered_batch_s_gradient_stays(message: str) -> None:
    roomy, cramped = trainer(), trainer(Cramped(7, message))
    base = roomy.initial_model()

    expected = roomy.run(order(batch_size=20), base, Cursor())
    outcome = cramped.run(order(batch_size=20), base, Cursor())

    # 20, then 10, then 5: pieces of 5.
    assert outcome.report.batch_cap == 5
    np.testing.assert_allclose(outcome.update, expected.update, atol=1e-6)
    assert outcome.report.loss == pytest.approx(expected.report.loss, rel=1e-6)
    assert outcome.report.samples == 100
    assert outcome.cursor == expected.cursor


def test_pieces_of_unequal_size_are_weighted() -> None:
    roomy, cramped = trainer(), trainer(Cramped(4))
    base = roomy.initial_model()

    # 9, then 4: pieces of 4, 4 and 1.
    outcome = cramped.run(order(batch_size=9), base, Cursor())

    assert outcome.report.batch_cap == 4
    np.testing.assert_allclose(outcome.update, roomy.run(order(batch_size=9), base, Cursor()).update, atol=1e-6)


def test_later_orders_remember_the_cap() -> None:
    task = Cramped(8)
    cramped = trainer(task)
    cramped.run(order(batch_size=16), cramped.initial_model(), Cursor())
    task.asked.clear()

    report = cramped.run(order(batch_size=16, max_steps=2), cramped.initial_model(), Cursor()).report

    assert task.asked == [8, 8, 8, 8]
    assert report.batch_cap == 8


def test_no_cap_where_memory_never_ran_out() -> None:
    assert trainer().run(order(), trainer().initial_model(), Cursor()).report.batch_cap is None


def test_a_single_sample_that_does_not_fit_is_an_error() -> None:
    cramped = trainer(Cramped(0))

    with pytest.raises(torch.OutOfMemoryError):
        cramped.run(order(), cramped.initial_model(), Cursor())


def test_other_errors_pass() -> None:
    broken = trainer(Cramped(1, "shapes do not match"))

    with pytest.raises(RuntimeError, match="shapes do not match"):
        broken.run(order(), broken.initial_model(), Cursor())


def test_evaluation_in_pieces_counts_the_same() -> None:
    class CrampedScore(TwoClasses):
        def score(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
            if len(batch[0]) > 3:
                raise torch.OutOfMemoryError("out of memory")
            return super().score(model, batch)

    base = trainer().initial_model()

    whole, pieces = trainer().evaluate(base), trainer(CrampedScore()).evaluate(base)

    assert pieces.correct == whole.correct
    assert pieces.samples == whole.samples == 10
    assert pieces.loss == pytest.approx(whole.loss, rel=1e-6)
