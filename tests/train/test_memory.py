import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsync.core.orders import Cursor
from fedsync.tasks.task_protocol import Batch
from fedsync.train.batches import largest_fit
from fedsync.train.options import LocalOptions
from tests.train.make import EXAMPLES, Cramped, TwoClasses, order, trainer

CPU_MESSAGE = "[enforce fail] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"


@pytest.mark.parametrize(
    ("fits", "batch_size", "cap", "message"),
    [
        (7, 20, 5, ""),  # 20, then 10, then 5: pieces of 5
        (7, 20, 5, CPU_MESSAGE),
        (4, 9, 4, ""),  # 9, then 4: pieces of 3
        (4, 10, 2, ""),  # 10, then 5, then 2: pieces of 2
        (5, 11, 5, ""),  # 11, then 5: pieces of 4, 4 and 3, which are weighted
    ],
    ids=["alike", "on a processor", "even", "small", "unequal"],
)
def test_the_ordered_batch_s_gradient_stays(fits: int, batch_size: int, cap: int, message: str) -> None:
    task = Cramped(fits, message)
    roomy, cramped = trainer(), trainer(task)
    base = roomy.initial_model()
    expected = roomy.run(order(batch_size=batch_size), base, Cursor())
    outcome = cramped.run(order(batch_size=batch_size), base, Cursor())
    np.testing.assert_allclose(outcome.update, expected.update, atol=1e-6)
    assert outcome.report.batch_cap == cap
    assert outcome.report.loss == pytest.approx(expected.report.loss, rel=1e-6)
    assert (outcome.report.samples, outcome.cursor) == (5 * batch_size, expected.cursor)
    task.asked.clear()
    later = cramped.run(order(batch_size=2 * cap, max_steps=2), base, Cursor())
    assert task.asked == [cap] * 4, "later orders remember the cap"
    assert later.report.batch_cap == cap


class Normed(Cramped):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_no_piece_of_a_batch_is_a_single_sample_which_batch_norm_refuses() -> None:
    cramped = trainer(Normed(16))
    assert cramped.run(order(batch_size=33), cramped.initial_model(), Cursor()).report.batch_cap == 16


def test_a_single_sample_that_does_not_fit_is_an_error() -> None:
    cramped = trainer(Cramped(0))
    for attempt in (lambda: cramped.run(order(), cramped.initial_model(), Cursor()), cramped.find_batch_cap):
        with pytest.raises(torch.OutOfMemoryError):
            attempt()


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


# Looking for the cap before it is run into.


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_what_is_found_fits_and_is_within_a_sixteenth(fits: int, most: int) -> None:
    found = largest_fit(lambda size: size <= fits, most, lambda: True)
    if fits >= most:
        assert found is None
    else:
        assert found is not None and found <= fits <= found + max(1, found // 16) - 1


@pytest.mark.parametrize(("attempts", "found"), [(1, None), (4, None), (5, 8), (6, 8), (7, 10)])
def test_when_time_is_up_the_largest_that_was_seen_to_fit_counts(attempts: int, found: int | None) -> None:
    asked: list[int] = []

    def attempt(size: int) -> bool:
        asked.append(size)
        return size <= 11  # 1, 2, 4, 8 fit, 16 and 12 do not, 10 does

    assert largest_fit(attempt, 40, lambda: len(asked) < attempts) == found
    assert len(asked) == attempts


@pytest.mark.parametrize("options", [LocalOptions(device="cpu", momentum=0.9), LocalOptions("adam", device="cpu")])
@pytest.mark.parametrize("message", ["", CPU_MESSAGE])
def test_the_cap_that_a_trainer_found_is_kept(message: str, options: LocalOptions) -> None:
    task = Cramped(7, message)
    subject = trainer(task, options=options)
    base = subject.initial_model()
    assert subject.find_batch_cap() == 7
    task.asked.clear()
    outcome = subject.run(order(batch_size=20, max_steps=1), base, Cursor())
    assert task.asked == [7, 7, 6]
    assert outcome.report.batch_cap == 7
    # Looking for it has left no trace in what is learned.
    expected = trainer(options=options).run(order(batch_size=20, max_steps=1), base, Cursor())
    np.testing.assert_allclose(outcome.update, expected.update, atol=1e-6)


def test_a_trainer_whose_data_all_fit_has_no_cap() -> None:
    task = Cramped(EXAMPLES)
    subject = trainer(task)
    assert subject.find_batch_cap() is None
    assert max(task.asked) == EXAMPLES
    assert subject.run(order(), subject.initial_model(), Cursor()).report.batch_cap is None


def test_the_search_ends_in_time_and_on_a_processor_nobody_looks_unasked() -> None:
    task = Cramped(7)
    assert trainer(task).find_batch_cap_on_gpu() is None and task.asked == []
    assert trainer(task).find_batch_cap(limit_s=0.0) is None and task.asked == [1]
