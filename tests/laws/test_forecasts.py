"""What holds for the forecast of every silo, whatever predictor makes it."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsync.core.orders import SiloFacts, Window, WorkReport
from fedsync.core.protocols import SpeedSample
from fedsync.core.speed.forecasts import Forecasts
from fedsync.policies.predict.mixture import Mixture
from tests.laws.kinds import EXAMPLES, policies_of
from tests.laws.test_policies import STOP, Case, of_section

speeds = st.lists(st.floats(1.0, 1e6), min_size=1, max_size=25)


def report(speed: float, batch: int = 10, steps: int = 4) -> WorkReport:
    samples = batch * steps
    return WorkReport(0, steps, samples, samples / speed, 1.0, windows=(Window(speed, 0.5, 0.5),))


@of_section("predictor")
@given(seen=speeds)
def test_an_untrained_forecast_lies_among_the_speeds_that_were_seen(case: Case, seen: list[float]) -> None:
    predictor = policies_of(case, STOP).predictor
    state = predictor.init()
    for number, speed in enumerate(seen, start=1):
        state = predictor.observe(state, SpeedSample(speed, 0.5, 0.5))
        told = predictor.forecast(state)
        assert told is not None
        assert min(seen[:number]) * (1 - 1e-9) <= told <= max(seen[:number]) * (1 + 1e-9)


@of_section("predictor")
@pytest.mark.parametrize("factor", [3.0, 1 / 3, 1.3, 1 / 1.3])
def test_a_forecast_follows_a_silo_that_has_become_faster_or_slower(case: Case, factor: float) -> None:
    """Within thirty orders to within 5 %."""
    predictor = policies_of(case, STOP).predictor
    state = predictor.init()
    for speed in [100.0] * 30 + [100.0 * factor] * 30:
        state = predictor.observe(state, SpeedSample(speed, 0.5, 0.5))
    assert predictor.forecast(state) == pytest.approx(100.0 * factor, rel=0.05)


@given(seen=speeds, alpha=st.sampled_from([0.2, 0.3, 1.0]), load=st.none() | st.floats(0.0, 1.0))
def test_a_moving_average_is_what_its_formula_says(seen: list[float], alpha: float, load: float | None) -> None:
    """The load of processors and memory, which the silo reports, changes nothing."""
    kind = ("predictor", "ema", {"alpha": alpha})
    predictor, expected = policies_of(kind, STOP).predictor, seen[0]
    newest = policies_of(("predictor", "memoryless", {}), STOP).predictor
    state, last = predictor.init(), newest.init()
    for number, speed in enumerate(seen):
        state = predictor.observe(state, SpeedSample(speed, load, load))
        last = newest.observe(last, SpeedSample(speed, load, load))
        expected = alpha * speed + (1 - alpha) * expected if number else speed
        assert predictor.forecast(state) == pytest.approx(expected, rel=1e-12)
        assert newest.forecast(last) == speed


@given(errors=st.lists(st.floats(0.9, 1.1), min_size=5, max_size=20))
def test_a_mixture_is_a_mean_and_believes_who_was_right(errors: list[float]) -> None:
    predictor = policies_of(
        ("predictor", "mixture", {"experts": [{"kind": "memoryless"}, {"kind": "ema"}]}), STOP
    ).predictor
    assert isinstance(predictor, Mixture)
    state = predictor.init()
    for number, error in enumerate(errors):
        # A speed that goes up steadily: the newest alone is nearer than any mean of the past.
        state = predictor.observe(state, SpeedSample(100.0 * 1.5**number * (1 + 0.01 * (error - 1))))
    weights = predictor.weights(state)
    assert sum(weights) == pytest.approx(1.0, abs=1e-12)
    assert weights[0] > 0.99
    told = [expert.forecast(inner) for expert, inner in zip(predictor.experts, state.states, strict=True)]
    mean = sum(weight * (speed or 0.0) for weight, speed in zip(weights, told, strict=True))
    assert predictor.forecast(state) == pytest.approx(mean, rel=1e-12)


def forecasts_of(case: Case) -> Forecasts:
    policies = policies_of(case, STOP)
    return Forecasts(policies.predictor, policies.declared_speeds, policies.sizing.fitter)


@of_section("predictor")
@settings(max_examples=10)
@given(seen=st.lists(st.tuples(st.sampled_from("abc"), st.floats(1.0, 1e4)), min_size=3, max_size=40))
def test_a_silo_is_forecast_from_its_own_orders_alone(case: Case, seen: list[tuple[str, float]]) -> None:
    """Also once it has been away."""
    together = forecasts_of(case)
    alone = {name: forecasts_of(case) for name in "abc"}
    for name, speed in seen:
        told = together.observe(name, report(speed), 5.0)
        assert told == alone[name].observe(name, report(speed), 5.0)
        for other in "abc":
            assert together.first(other, SiloFacts(5)) == alone[other].first(other, SiloFacts(5))
    assert {name for name in "abc" if together.first(name, SiloFacts(5)) is not None} == {name for name, _ in seen}


def test_declared_speeds_are_believed_whatever_is_measured() -> None:
    forecasts = forecasts_of(("balancer", "proportional", {"speeds": "declared"}))
    for name, speed in (("a", 50.0), ("b", 7.0)):
        first = forecasts.first(name, SiloFacts(5, declared_speed=speed))
        told = forecasts.observe(name, report(1234.0), 5.0)
        assert first is not None
        assert told is not None
        assert (first.speed, told.speed) == (speed, speed)


@given(overheads=st.lists(st.floats(0.0, 10.0), min_size=1, max_size=8))
def test_an_orders_overhead_is_the_median_of_the_last_three(overheads: list[float]) -> None:
    forecasts = forecasts_of(("predictor", "ema", {}))
    for seen in (overheads[: number + 1] for number in range(len(overheads))):
        told = forecasts.observe("a", report(10.0), 4.0 + seen[-1])  # 40 samples take 4 s
        usual = sorted(seen[-3:])[1] if len(seen) > 2 else seen[-1]
        assert told is not None
        assert told.overhead_s == pytest.approx(usual, abs=1e-9)


@pytest.mark.parametrize("kind", ["arima", "rnn", "lstm", "narx"])
def test_training_is_for_one_silo_and_stays_in_range(kind: str) -> None:
    """What is learned of ``a`` changes no forecast of ``b``; a forecast stays within twice of what was seen."""
    luck = random.Random(3)
    series = [100.0 * luck.uniform(0.7, 1.3) for _ in range(26)]
    forecasts = forecasts_of(("predictor", kind, EXAMPLES["predictor"][kind]))
    for speed in series[:5]:
        forecasts.observe("b", report(speed), 5.0)
    before = forecasts.first("b", SiloFacts(5))
    average, trained = series[0], False
    for speed in series:
        curve = forecasts.observe("a", report(speed), 5.0)
        average = 0.2 * speed + 0.8 * average
        assert curve is not None
        assert 35.0 <= curve.speed <= 260.0
        trained |= curve.speed != pytest.approx(average, rel=1e-6)
        for _ in range(100):
            if not forecasts.unlearned:
                break
            forecasts.learn(7)
    assert forecasts.first("b", SiloFacts(5)) == before
    assert trained or kind == "narx", "a model that beats the average is in use"
