"""The mixture: weights by hand, and that it follows the best."""

import math
from dataclasses import dataclass, replace

import pytest

from fedsync.core.protocols import MachineLoad, SpeedSample
from fedsync.extras.predictors.narx import Narx
from fedsync.extras.predictors.recurrent import LstmPredictor, RnnPredictor
from fedsync.policies.predict.mixture import Mixture
from fedsync.policies.predict.predictor_base import Ema, PredictorPolicy


@dataclass(frozen=True)
class Off(PredictorPolicy[float | None]):
    """Forecasts the last speed plus so much."""

    by: float

    def init(self) -> None:
        return None

    def observe(self, state: float | None, sample: SpeedSample) -> float:
        return sample.speed

    def forecast(self, state: float | None, drivers: MachineLoad | None = None) -> float | None:
        return None if state is None else state + self.by


def test_weights_by_hand() -> None:
    """Errors 1 and 2 at a constant speed: squares 1 and 4, weights 1 and 4^-1 at power 1, thus 4/5 and 1/5."""
    mixture = Mixture((Off(1.0), Off(-2.0)), power=1.0)
    state = mixture.observe(mixture.init(), SpeedSample(100.0))
    assert mixture.weights(state) == (0.5, 0.5)
    for _ in range(3):
        state = mixture.observe(state, SpeedSample(100.0))
    assert mixture.weights(state) == pytest.approx((0.8, 0.2))
    assert mixture.forecast(state) == pytest.approx(0.8 * 101 + 0.2 * 98)


@pytest.mark.parametrize(
    ("promise", "counts"), [(0.25, 0.25), (0.0, 1e-6), (24.0, 24.0), (1e296, 25.0), (math.inf, 25.0)]
)
def test_a_promise_counts_once_and_within_bounds(promise: float, counts: float) -> None:
    """Training has found so much of the average's squared error: the record of the average is scaled by it.

    Unbounded, one of 1e296 would be an error that no later orders could make up for.
    """

    @dataclass(frozen=True)
    class Promising(Off):
        def unlearned(self, state: float | None) -> bool:
            return True

        def promise(self, state: float | None) -> float:
            return promise

    mixture = Mixture((Off(1.0), Promising(2.0)))
    state = mixture.init()
    for _ in range(2):
        state = mixture.observe(state, SpeedSample(100.0))
    state = mixture.learn(state, 1)
    assert state.errors == pytest.approx((1.0, 4.0 * counts))
    assert mixture.learn(state, 1).errors == state.errors


@pytest.mark.parametrize("speed", [1e8, 37.2])
def test_networks_trained_on_a_constant_speed_still_count_when_it_varies(speed: float) -> None:
    """The average is exact there, so that a promise is no ratio; 1e8 gave infinite errors, and NaN one order later."""
    mixture = Mixture(
        (Ema(0.2), RnnPredictor(samples=50, hidden=4), LstmPredictor(samples=50, hidden=4), Narx(samples=50))
    )
    state = mixture.init()
    for _ in range(60):
        state = mixture.observe(state, SpeedSample(speed, 0.5, 0.5))
        while mixture.unlearned(state):
            state = mixture.learn(state, 100)
    assert state.promised == (False, True, True, True)
    for order in range(20):
        state = mixture.observe(state, SpeedSample(speed * (1.0 + 0.5 * (order % 2)), 0.5, 0.5))
    assert 0.5 * speed < (mixture.forecast(state) or 0.0) < 2 * speed
    assert min(mixture.weights(state)) > 1e-4, "nobody is banned"


def test_experts_take_turns_and_reuse_what_their_like_has_learned() -> None:
    mixture = Mixture((Narx(samples=30), Ema(0.2), Narx(samples=30)))
    state = mixture.init()
    for order in range(40):
        state = mixture.observe(state, SpeedSample(100.0 + order % 7, 0.1 * (order % 7), 0.5))
    assert not mixture.unlearned(mixture.init())
    while mixture.unlearned(state):
        state = mixture.learn(state, 5)
    assert all(state.states[index].model is not None for index in (0, 2))
    heir = mixture.reuse(mixture.init(), state)
    assert heir.states[0].start is state.states[0].model.parameters
    assert replace(heir, states=()) == replace(mixture.init(), states=()), "its weights are its own affair"
