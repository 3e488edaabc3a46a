"""What holds for every predictor, balancer and weigher by itself."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsync.core.orders import UpdateMeta
from fedsync.core.protocols import SpeedSample
from fedsync.core.silo_weight import Weighting, progress
from tests.laws.kinds import cases, name_of, policies_of

Case = tuple[str, str, dict[str, Any]]
STOP = {"rounds": 1}


def of_section(section: str) -> pytest.MarkDecorator:
    chosen = [case for case in cases() if case[0] == section]
    return pytest.mark.parametrize("case", chosen, ids=map(name_of, chosen))


shares = st.none() | st.floats(0.0, 1.0)
samples = st.builds(SpeedSample, st.floats(1e-3, 1e9), shares, shares)


@of_section("predictor")
@settings(max_examples=50)
@given(seen=st.lists(samples, min_size=1, max_size=30))
def test_a_predictor_forecasts_a_speed_from_the_first_sample_on(case: Case, seen: list[SpeedSample]) -> None:
    predictor = policies_of(case, STOP).predictor
    state = predictor.init()
    assert predictor.forecast(state) is None
    for sample in seen:
        before = copy.deepcopy(state)
        after = predictor.observe(state, sample)
        assert predictor.forecast(state) == predictor.forecast(before), "observing must not change the old state"
        speed = predictor.forecast(after)
        assert speed is not None
        assert math.isfinite(speed)
        assert speed > 0
        assert predictor.forecast(pickle.loads(pickle.dumps(after))) == speed
        state = after


positive = st.integers(1, 10**9)
metas = st.builds(UpdateMeta, st.just("a/1"), st.just("a"), st.integers(0, 50), positive, positive, positive, positive)


@pytest.mark.slow
@of_section("aggregation")
@given(metas=st.lists(metas, min_size=1, max_size=6), later=st.integers(1, 50))
def test_coefficients_are_those_of_the_papers(case: Case, metas: list[UpdateMeta], later: int) -> None:
    """Shares p_i; FedNova's p_i tau_eff / a_i; FedBuff's eta_g s(t) / K; FedAsync's alpha s(t) of one update."""
    _, kind, more = case
    version = max(meta.base_version for meta in metas) + later
    weight = more.get("weight", "examples" if kind in ("fedavg", "fednova") else "silo")
    amounts = [_AMOUNTS[weight](meta) for meta in metas]
    expected = [amount / sum(amounts) for amount in amounts]
    if kind == "fednova":
        effective = sum(p * meta.steps for p, meta in zip(expected, metas, strict=True))
        expected = [p * effective / meta.steps for p, meta in zip(expected, metas, strict=True)]
    discount = _discount(
        more.get("staleness", {"kind": "polynomial" if kind in ("fedbuff", "fedasync") else "constant"})
    )
    rate = more.get("mixing", 0.6) if kind == "fedasync" else more.get("server_rate", 1.0)
    # An update that starts from the version before the one that is made is fresh: staleness 0.
    ages = [version - 1 - meta.base_version for meta in metas]
    expected = [rate * discount(age) * c for age, c in zip(ages, expected, strict=True)]
    weigher = policies_of(case, STOP).weigher
    coefficients = list(weigher.coefficients(metas, version))
    assert coefficients == pytest.approx(expected, rel=1e-12)
    assert all(math.isfinite(coefficient) and coefficient > 0 for coefficient in coefficients), "however stale"
    assert list(weigher.coefficients(metas, version)) == coefficients
    assert weigher.toward == (kind == "fedasync")
    if weigher.weighting is not None:
        assert coefficients == pytest.approx(_by_three_sums(weigher.weighting, metas), rel=1e-9)


_AMOUNTS: dict[str, Callable[[UpdateMeta], float]] = {
    "silo": lambda meta: 1.0,
    "examples": lambda meta: meta.examples,
    "samples": lambda meta: meta.samples,
}


def _discount(settings: dict[str, Any]) -> Callable[[int], float]:
    """FedAsync, section 5.2, with t - tau the versions between an update's base and the model that it is added to."""
    if settings["kind"] == "constant":
        return lambda age: 1.0
    if settings["kind"] == "polynomial":
        return lambda age: (age + 1) ** -settings.get("exponent", 0.5)
    slope, grace = settings.get("slope", 10.0), settings.get("grace", 4)
    return lambda age: 1.0 if age <= grace else 1 / (slope * (age - grace) + 1)


@given(steps=st.integers(1, 40), momentum=st.sampled_from([0.0, 0.5, 0.9]), pull=st.sampled_from([0.0, 0.01, 0.3, 1.0]))
def test_progress_is_how_far_a_constant_gradient_leads(steps: int, momentum: float, pull: float) -> None:
    """FedNova's a_i, step by step: the velocity takes up the gradient less the pull back to where the silo began."""
    way = speed = 0.0
    for _ in range(steps):
        speed = momentum * speed + 1 - pull * way
        way += speed
    assert progress(steps, momentum, pull) == pytest.approx(way, rel=1e-9)


def _by_three_sums(weighting: Weighting, metas: list[UpdateMeta]) -> list[float]:
    """What each update is multiplied by if silos weigh them and a server can only add."""
    weights = [weighting.weight(meta.examples, meta.samples) for meta in metas]
    norms = [weighting.progress(meta.steps) for meta in metas]
    total = sum(weights)
    mean_norm = sum(weight * norm for weight, norm in zip(weights, norms, strict=True)) / total
    return [weighting.rate * mean_norm * (w / a) / total for w, a in zip(weights, norms, strict=True)]
