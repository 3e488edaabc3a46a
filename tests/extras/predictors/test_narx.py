"""NARX: what it learns, when it is used, and what it never does."""

import pickle

import numpy as np
import pytest

from fedsync.core.orders import Window
from fedsync.core.protocols import MachineLoad, SpeedSample
from fedsync.extras.predictors.narx import Narx, NarxState
from fedsync.policies.predict.predictor_base import Ema

DRAW = np.random.default_rng(5)
CPU = DRAW.uniform(0.2, 1.0, 400)


def speed(cpu: float) -> float:
    return 100.0 * cpu + 20.0


def seen(narx: Narx, count: int) -> NarxState:
    state = narx.init()
    for cpu in CPU[:count]:
        state = narx.observe(state, SpeedSample(speed(cpu), cpu, 0.5))
    return state


def taught(narx: Narx, state: NarxState) -> NarxState:
    while narx.unlearned(state):
        state = narx.learn(state, 7)
    return state


def test_it_is_the_moving_average_before_it_has_enough_samples() -> None:
    narx, ema = Narx(samples=100), Ema(0.2)
    average = ema.init()
    for cpu in CPU[:99]:
        average = ema.observe(average, SpeedSample(speed(cpu)))
    state = seen(narx, 99)
    assert not narx.unlearned(state)
    assert narx.forecast(state, MachineLoad(1.0, 0.5)) == average
    assert narx.unlearned(seen(narx, 100))


def test_it_learns_what_the_processors_do_to_the_speed() -> None:
    """The speed follows from the share alone, which jumps at random: no past speed could tell."""
    narx = Narx(samples=300)
    state = taught(narx, seen(narx, 300))
    for cpu in (0.3, 0.6, 0.9):
        assert narx.forecast(state, MachineLoad(cpu, 0.5)) == pytest.approx(speed(cpu), rel=0.02)


def test_an_order_of_many_windows_is_forecast_as_their_mean() -> None:
    """With the processors as they are now, all windows to come are alike."""
    narx = Narx(samples=300)
    state = narx.init()
    for first in range(0, 320, 32):
        windows = tuple(Window(speed(cpu), cpu, 0.5) for cpu in CPU[first : first + 32])
        mean = sum(window.speed for window in windows) / 32
        state = narx.observe(state, SpeedSample(mean, windows=windows))
    assert state.seen == 320
    state = taught(narx, state)
    assert narx.forecast(state, MachineLoad(0.4, 0.5)) == pytest.approx(speed(0.4), rel=0.03)


def test_what_no_column_shows_is_corrected() -> None:
    """The machine loses a tenth of its speed for good; after some orders forecasts are right again."""
    narx = Narx(samples=300, renew=10_000)
    cpus, draw = CPU[:300], np.random.default_rng(1)
    state, factor = narx.init(), 1.0
    for cpu in cpus:
        factor = 0.97 * factor + 0.03 * draw.normal(1.0, 0.3)
        state = narx.observe(state, SpeedSample(factor * speed(cpu), cpu, 0.5))
    state = taught(narx, state)
    assert state.model is not None
    assert state.model.gain > 0
    for cpu in CPU[300:]:
        state = narx.observe(state, SpeedSample(0.9 * speed(cpu), cpu, 0.5, known=MachineLoad(cpu, 0.5)))
    assert state.correction != 0.0
    told = narx.forecast(state, MachineLoad(0.6, 0.5))
    assert told == pytest.approx(0.9 * speed(0.6), rel=0.06)


def test_a_forecast_stays_near_what_was_seen_however_odd_the_drivers() -> None:
    narx = Narx(samples=300)
    state = taught(narx, seen(narx, 300))
    least, most = speed(min(CPU[:300])), speed(max(CPU[:300]))
    for drivers in (MachineLoad(0.0, 0.0), MachineLoad(1.0, 1.0), MachineLoad(-1e9, 1e9), None):
        told = narx.forecast(state, drivers)
        assert told is not None
        assert least / 2 <= told <= 2 * most


@pytest.mark.parametrize("cpu", [None, 0.5])
def test_series_that_do_not_vary_are_no_trouble(cpu: float | None) -> None:
    narx = Narx(samples=30, renew=5)
    state = narx.init()
    for _ in range(60):
        state = taught(narx, narx.observe(state, SpeedSample(50.0, cpu, cpu)))
    assert narx.forecast(state, MachineLoad(0.9, 0.1)) == pytest.approx(50.0, rel=1e-3)


def test_memory_is_bounded_and_learning_changes_no_old_state() -> None:
    narx = Narx(samples=50, memory=60)
    state = seen(narx, 200)
    assert len(state.rows) == 60
    before = pickle.dumps(state)
    taught(narx, state)
    assert pickle.dumps(state) == before


def test_epochs_in_small_portions_are_as_good_as_in_large_ones() -> None:
    narx = Narx(samples=100)
    slow = fast = seen(narx, 100)
    while narx.unlearned(slow):
        slow = pickle.loads(pickle.dumps(narx.learn(slow, 1)))
    fast = narx.learn(fast, 1000)
    assert not narx.unlearned(fast)
    assert narx.forecast(slow, MachineLoad(0.5, 0.5)) == narx.forecast(fast, MachineLoad(0.5, 0.5))


def test_a_silo_begins_with_what_another_has_learned_and_sooner() -> None:
    narx = Narx(samples=300)
    donor = taught(narx, seen(narx, 300))
    assert donor.model is not None
    heir = narx.reuse(narx.init(), donor)
    assert heir.due == 60
    for cpu in CPU[:60]:
        heir = narx.observe(heir, SpeedSample(3 * speed(cpu), cpu, 0.5))
    heir = taught(narx, heir)
    assert narx.forecast(heir, MachineLoad(0.5, 0.5)) == pytest.approx(3 * speed(0.5), rel=0.05)
