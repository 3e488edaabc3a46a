"""Steps by hand, to the bit on every machine, and within bounds whatever the sums are."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedsync.model.cautious_adam import Cautious, Tensor
from fedsync.model.chunked_arrays import ArrayKeeper
from fedsync.model.control_variates import ControlVariates
from fedsync.model.layout import Vector
from fedsync.model.server_optimizer import LARGEST, TINY, Adaptive, Backing, HeavyBall, Moments, ServerOptimizer
from tests.model.stores import vector

MEMORY = ArrayKeeper()
ALL = Backing(steps=3.5, weight=7, updates=3, newcomers=1)


def walk(optimizer: ServerOptimizer, changes: Iterable[Vector], s: Sequence[int] = ()) -> tuple[Moments, list[Vector]]:
    """Moments after all changes, and the step of each. Updates are ``s`` versions old."""
    steps: list[Vector] = []
    moments = None
    for change in changes:
        moments = moments or optimizer.begin(change.size, MEMORY)
        advanced = optimizer.advance(moments, change, s, MEMORY, ALL)
        assert advanced is not None
        moments, step = advanced
        steps.append(step(0, change.size))
    assert moments is not None
    return moments, steps


KINDS: dict[str, ServerOptimizer] = {
    "fedavgm": HeavyBall(0.9, 1.0),
    "fedadam": Adaptive("adam", 0.1, 0.9, 0.99, 1e-3),
    "cautious-adam": Cautious("adam", 0.3, 0.8, 0.95, 1e-8, tensors=(Tensor(2, 0.5), Tensor(300, 0.25)), growth=16.0),
    "cautious-adam, one layer": Cautious("adam", 0.3, 0.8, 0.95, 1e-8, tensors=(Tensor(300, 0.25),), leads=True),
    "fedyogi": Adaptive("yogi", 0.01, 0.9, 0.99, 1e-3),
    "fedadagrad": Adaptive("adagrad", 0.1, 0.0, 0.0, 1e-3),
    "scaffold": ControlVariates(0.7),
}
CAUTIOUS = [KINDS["cautious-adam"], KINDS["cautious-adam, one layer"]]
every_kind = pytest.mark.parametrize("kind", KINDS)


BY_HAND: dict[str, tuple[ServerOptimizer, list[float], list[float]]] = {
    # m: 4, then 2 + 2 = 4, then 2 - 8 = -6.
    "momentum": (HeavyBall(0.5, 0.25), [4, 2, -8], [1.0, 1.0, -1.5]),
    # m = 0.5 x 4 = 2; v = 0.25 x 16 = 4; rate sqrt(1 - 0.75^2) / (1 - 0.5^2); 2 / (2 + 2).
    "adam": (Adaptive("adam", 1.0, 0.5, 0.75, 2.0), [4], [0.5 * math.sqrt(1 - 0.75**2) / (1 - 0.5**2)]),
    # v = 9, then 9 + 16 = 25: 3 / (3 + 1), then 4 / (5 + 1).
    "adagrad": (Adaptive("adagrad", 1.0, 0.0, 0.0, 1.0), [3, 4], [0.75, 2 / 3]),
    # v = 0 + 0.5 x 16 = 8, then 4 < 8: 8 - 0.5 x 4 = 6; m = 4, 2.
    "yogi": (Adaptive("yogi", 1.0, 0.0, 0.5, 1.0), [4, 2], [4 / (math.sqrt(8) + 1), 2 / (math.sqrt(6) + 1)]),
}
"""Changes of a single value, and the steps."""


@pytest.mark.parametrize("kind", BY_HAND)
def test_steps_by_hand(kind: str) -> None:
    optimizer, changes, expected = BY_HAND[kind]
    _, steps = walk(optimizer, [vector(change) for change in changes])
    assert [float(step[0]) for step in steps] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("grace", "staleness", "expected"),
    [
        (None, [5, 9], 1.0),
        (0, [0, 0], 1.0),
        (2, [0, 2], 1.0),
        (2, [3], 1 / 2),
        (1, [0, 4], (1 + 1 / 4) / 2),
        (0, [], 1.0),
    ],
)
def test_the_rate_falls_with_updates_beyond_the_grace(grace: int | None, staleness: list[int], expected: float) -> None:
    assert HeavyBall(0.9, 1.0, grace).pace(staleness) == expected


# A lead is of the next step, whose pace nobody knows yet.
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"cautious-adam, one layer"}))
def test_a_slower_pace_shortens_the_step_and_not_what_is_remembered(kind: str) -> None:
    changes = [vector(1, -2, 3), vector(0.5, 0.5, -4)]
    (fast, steps), (slow, shortened) = (walk(replace(KINDS[kind], grace=0), changes, [s]) for s in (0, 1))
    for ours, theirs in zip(fast.vectors, slow.vectors, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for whole, half in zip(steps, shortened, strict=True):
        np.testing.assert_array_equal(whole / 2, half)


@every_kind
def test_a_commit_that_changes_nothing_makes_no_step(kind: str) -> None:
    moments, _ = walk(KINDS[kind], [vector(1, 2)])
    assert KINDS[kind].advance(moments, vector(0, -0.0), (), MEMORY, ALL) is None


def trajectory(optimizer: ServerOptimizer) -> str:
    """Digest of a hundred steps and of what is remembered then.

    Changes are of many sizes, and some come once only, so that momentum fades below the smallest normal number.
    """
    rng, hashed = np.random.Generator(np.random.PCG64(3)), hashlib.sha256()
    moments = optimizer.begin(300, MEMORY)
    sizes = np.ldexp(np.float32(1), -np.arange(300, dtype=np.int32) // 4)
    for number in range(100):
        change = (rng.integers(-(2**20), 2**20, 300).astype(np.float32) / np.float32(2**20)) * sizes
        change[::3] *= np.float32(number == 0)
        advanced = optimizer.advance(moments, change, (), MEMORY, ALL)
        assert advanced is not None
        moments, step = advanced
        hashed.update(step(0, 300).tobytes())
    for each in moments.vectors:
        hashed.update(each.tobytes())
    hashed.update(repr(moments.powers).encode())
    return hashed.hexdigest()[:16]


GOLDEN = {
    "fedavgm": "9a1b2fd7f1512845",
    "fedadam": "5cc87cc66dc8ec3b",
    "cautious-adam": "b2e45a714039ded1",
    "cautious-adam, one layer": "b41cf2306a9c285a",
    "fedyogi": "7e494a4d7e8ec5bc",
    "fedadagrad": "dea7e6af51498ab2",
    "scaffold": "e3628204c3b4a924",
}
"""What every machine comes to; under encryption silos whose digests differ cannot be added up."""


@every_kind
def test_trajectories_have_the_same_bits_everywhere(kind: str) -> None:
    assert trajectory(KINDS[kind]) == GOLDEN[kind]


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"fedyogi", "fedadagrad", "scaffold"}))
def test_it_does_not_matter_whether_the_processor_has_subnormal_numbers(kind: str) -> None:
    """Some programs have it take them for zeros, and where one thread does, so do all that it starts."""
    fades = HeavyBall(0.2, 1.0) if kind == "fedavgm" else KINDS[kind]
    usual = trajectory(fades)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor always has them")
    try:
        assert np.float32(1e-30) * np.float32(1e-10) == 0
        assert trajectory(fades) == usual
    finally:
        torch.set_flush_denormal(False)


@every_kind
def test_whatever_the_sums_are_all_stays_finite(kind: str) -> None:
    """A silo may seal what it likes: the largest change again and again, then its opposite, then the smallest."""
    most = np.float32(3e38)
    changes = [vector(most, -most, 1, TINY)] * 40 + [vector(-most, -most, -1, 1e-45)] * 40
    moments, steps = walk(KINDS[kind], changes)
    KINDS[kind].check(moments)
    for step in steps:
        assert np.abs(step).max() <= LARGEST
        assert np.isfinite(step).all()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [HeavyBall(0.9, 1.0), Adaptive("adam", 0.1, 0.9, 0.9, 1e-3), *CAUTIOUS])
def test_one_change_that_is_far_too_large_is_forgotten(optimizer: ServerOptimizer) -> None:
    """An infinity would stay for ever. (Adagrad and Yogi never forget a change that large, finite as it is.)"""
    honest = [vector(0.01)] * 2001
    _, steps = walk(optimizer, [vector(3e38), vector(-3e38), vector(1), *honest])
    _, expected = walk(optimizer, honest)
    assert float(steps[-1][0]) == pytest.approx(float(expected[-1][0]), rel=0.01)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0, 2.0**127])
def test_moments_that_no_steps_come_to_are_refused(value: float) -> None:
    """A root of -1 would be NaN in every later model."""
    adam = KINDS["fedadam"]
    moments, _ = walk(adam, [vector(1, 2)])
    adam.check(moments)
    first, second = moments.vectors
    with pytest.raises(ValueError, match="moment 1 has values beyond 0 and"):
        adam.check(Moments(1, moments.powers, (first, vector(1, value))))
    if value != -1.0:
        with pytest.raises(ValueError, match="moment 0"):
            adam.check(Moments(1, moments.powers, (vector(value, 1), second)))
    with pytest.raises(ValueError, match="1 moments of 1 steps"):
        adam.check(Moments(1, moments.powers, (first,)))
    with pytest.raises(ValueError, match="powers"):
        adam.check(Moments(1, (2.0, 0.5), moments.vectors))
