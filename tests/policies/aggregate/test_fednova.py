"""FedNova: an update is divided by how far its steps alone would have led."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsync.core.orders import UpdateMeta
from fedsync.core.silo_weight import Weighting, progress
from fedsync.policies.aggregate.aggregate_kinds import Normalised
from fedsync.policies.aggregate.weighers import Toward, WeightedMean


def metas(*steps: int) -> list[UpdateMeta]:
    return [UpdateMeta(f"{i}/1", str(i), 0, tau, 8 * tau, 100 * (i + 1), 40) for i, tau in enumerate(steps)]


def test_a_running_mean_by_hand() -> None:
    """Two silos whose statistics go half of the way to 8 a step, one of them once, the other three times."""
    start, target, rate = 0.0, 8.0, 0.5
    updates = []
    for steps in (1, 3):
        here = start
        for _ in range(steps):
            here += rate * (target - here)
        updates.append(here - start)
    assert updates == [4.0, 7.0]
    weights = Normalised(WeightedMean(), pull=rate).coefficients(metas(1, 3), 0)
    assert sum(w * u for w, u in zip(weights, updates, strict=True)) == pytest.approx(5.5), "as far as their mean"
    assert weights[0] * updates[0] == pytest.approx(weights[1] * updates[1]), "both count the same"


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(-1, 1)), min_size=1, max_size=6), st.floats(0, 0.95))
def test_a_silo_with_more_steps_steers_no_more(silos: list[tuple[int, float]], momentum: float) -> None:
    """Silo i always sees gradient g_i, so it sends -eta |a_i| g_i. The model walks along the mean of the g_i."""
    taus, gradients = [tau for tau, _ in silos], np.array([gradient for _, gradient in silos])
    norms = np.array([progress(tau, momentum, 0.0) for tau in taus])
    c = np.array(Normalised(WeightedMean("silo"), momentum).coefficients(metas(*taus), 1))
    moved = float(np.sum(c * -0.1 * norms * gradients))
    assert moved == pytest.approx(-0.1 * float(norms.mean()) * float(gradients.mean()), rel=1e-9, abs=1e-9)


def test_it_is_as_linear_as_what_is_inside() -> None:
    assert Normalised(WeightedMean(), 0.9, 0.1).weighting == Weighting(normalised=True, momentum=0.9, pull=0.1)
    assert Normalised(Toward(WeightedMean())).weighting is None
    assert Normalised(Toward(WeightedMean())).toward


@pytest.mark.parametrize("steps", [100_000, 10**12])  # the second is what a silo may claim
def test_long_orders_stay_finite(steps: int) -> None:
    for momentum, pull in ((0.999, 0.0), (0.0, 0.999), (0.9, 0.5)):
        assert math.isfinite(progress(steps, momentum, pull))
        assert progress(steps, momentum, pull) > 0
