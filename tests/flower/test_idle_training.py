"""How many epochs fit into a pause."""

from __future__ import annotations

import pytest

from fedsync.core.events import Spare, TimerFired
from fedsync.flower.idle_training import IdleTraining


def test_epochs_follow_what_the_last_pause_took() -> None:
    spare = IdleTraining(0.05)
    told = []
    for epoch_s in (0.001, 0.001, 0.001, 0.05, 0.05):
        (event,) = spare.events(1.0)
        assert isinstance(event, Spare)
        told.append(event.epochs)
        spare.measure([event], event.epochs * epoch_s)
    # Twice as many while there is room; 8 at 50 ms are eight times too many: 1; that just fits.
    assert told == [1, 2, 4, 8, 1]


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_the_number_stays_within_reason(seconds: float) -> None:
    spare = IdleTraining(0.05)
    for _ in range(50):
        events = spare.events(1.0)
        spare.measure(events, seconds)
    (event,) = spare.events(1.0)
    assert isinstance(event, Spare)
    assert event.epochs == (10_000 if seconds == 0.0 else 1)


def test_other_batches_do_not_count_and_a_cap_of_zero_is_never() -> None:
    spare = IdleTraining(0.05)
    spare.measure([TimerFired(0.0)], 1e-6)
    assert spare.events(2.0) == [Spare(2.0, 1)]
    assert IdleTraining(0.0).events(2.0) == []
