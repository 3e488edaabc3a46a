"""What becomes of the mean of silos' control variates, against the mean itself in float64."""

import math

import numpy as np
import pytest

from fedsync.common.errors import ProtocolError
from fedsync.model.chunked_arrays import ArrayKeeper
from fedsync.model.control_variates import ControlledModel, ControlVariates, key_of
from fedsync.model.server_optimizer import Backing, Moments

MEMORY = ArrayKeeper()
WEIGHTS = {"a": 1, "b": 5, "c": 2, "d": 9}


@pytest.mark.parametrize(
    "rounds", [["abcd", "abcd", "ab", "d", "abc"], ["a", "d", "bd", "abcd", "c"], ["ab", "ab", "ab", "c", "abcd"]]
)
@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_it_is_the_mean_of_what_silos_have_whoever_takes_part(rounds: list[str], rate: float) -> None:
    """Silos weigh differently, do unequal steps, stay away, and come late; the weights in m sum to 1 in the first case.

    A commit's change is ``rate tau_eff`` times the mean of updates per step, as FedNova has it.
    """
    rng, optimizer = np.random.default_rng(5), ControlVariates(0.3)
    moments, own, total = optimizer.begin(4, MEMORY), dict[str, np.ndarray](), 0.0
    for names in rounds:
        steps = {name: int(rng.integers(1, 9)) for name in names}
        updates = {name: rng.normal(size=4) for name in names}
        weight = sum(WEIGHTS[name] for name in names)
        shares = {name: WEIGHTS[name] / weight for name in names}
        effective = sum(shares[name] * steps[name] for name in names)
        coefficients = {name: rate * shares[name] * effective / steps[name] for name in names}
        change = sum(coefficients[name] * updates[name] for name in names)
        worth = sum(coefficients[name] * steps[name] for name in names)
        assert worth == pytest.approx(rate * effective)
        old = moments.vectors[0].astype(np.float64)
        newcomers = len([name for name in names if name not in own])
        for name in names:
            own[name] = own.get(name, np.zeros(4)) - old + updates[name] / steps[name]
        total = max(total + weight / len(names) * newcomers, weight)
        backing = Backing(worth, weight, len(names), newcomers)
        advanced = optimizer.advance(moments, change.astype(np.float32), (), MEMORY, backing)
        assert advanced is not None
        moments, step = advanced
        assert moments.powers == (pytest.approx(total),)
        np.testing.assert_allclose(step(0, 4), 0.3 * change, rtol=1e-6)
        mean = sum(WEIGHTS[name] * each for name, each in own.items()) / total
        np.testing.assert_allclose(moments.vectors[0], mean, rtol=1e-5, atol=1e-6)
    if rounds[0] == "abcd":
        assert total == sum(WEIGHTS.values())


@pytest.mark.parametrize(("steps", "weight"), [(1e-12, 2**40), (1e30, 1), (2.0**-48, 255 * 2**20)])
def test_whatever_silos_claim_it_stays_finite(steps: float, weight: int) -> None:
    optimizer, changes = ControlVariates(1.0), np.array([3e38, -3e38, 1, 1e-45], np.float32)
    moments = optimizer.begin(4, MEMORY)
    for newcomers in (3, 0, 0):
        advanced = optimizer.advance(moments, changes, (), MEMORY, Backing(steps, weight, 3, newcomers))
        assert advanced is not None
        moments = advanced[0]
        optimizer.check(moments)


def test_without_updates_that_count_there_is_no_step() -> None:
    optimizer = ControlVariates(1.0)
    assert optimizer.advance(optimizer.begin(1, MEMORY), np.ones(1, np.float32), (), MEMORY, None) is None


@pytest.mark.parametrize("powers", [(), (-1.0,), (math.nan,), (math.inf,), (1.0, 1.0)])
def test_weights_that_no_silos_have_are_refused(powers: tuple[float, ...]) -> None:
    optimizer = ControlVariates(1.0)
    begun = optimizer.begin(2, MEMORY)
    optimizer.check(begun)
    with pytest.raises(ValueError, match="powers"):
        optimizer.check(Moments(1, powers, begun.vectors))


COUNTED = {key_of(name): number for name, number in (("a", 3), ("silo-12", 2**40), ("other", 1))}
SENT = ControlledModel(np.arange(3, dtype=np.float32), np.array([0.5, -2, 1e-9], np.float32), COUNTED)


@pytest.mark.parametrize("counted", [{}, COUNTED, {b"\0\1\0\2\0\0\0\0": 4}])
def test_what_is_sent_reads_back(counted: dict[bytes, int]) -> None:
    found = ControlledModel.decode(ControlledModel(SENT.model, SENT.control, counted).encode(MEMORY), 3)
    np.testing.assert_array_equal(found.model, SENT.model)
    np.testing.assert_array_equal(found.control, SENT.control)
    assert found.counted == counted


@pytest.mark.parametrize("cut", [1, 15, 49, 60])
def test_what_is_cut_short_is_refused(cut: int) -> None:
    whole = SENT.encode(MEMORY)
    with pytest.raises(ProtocolError, match="length"):
        ControlledModel.decode(whole[:-cut], 3)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e31])
def test_variates_that_would_spoil_a_step_are_refused(value: float) -> None:
    control = SENT.control.copy()
    control[1] = value
    with pytest.raises(ProtocolError, match="finite"):
        ControlledModel.decode(ControlledModel(SENT.model, control, COUNTED).encode(MEMORY), 3)
