"""What every balancer promises: exact totals, bounds, and shares that follow from the speeds."""

import random
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsync.core.orders import SiloFacts
from fedsync.core.protocols import Bounds, RoundSeen
from fedsync.core.speed.curve import Curve
from fedsync.core.views import SiloView
from fedsync.policies.balance.by_forecast import EqualisingBalancer, ProportionalBalancer
from fedsync.policies.balance.rounding import InMultiples
from fedsync.policies.balance.without_forecast import LeaderStraggler, MovePace
from tests.laws.kinds import BATCH_SIZE, STEPS, policies_of
from tests.laws.test_policies import STOP, Case, of_section

speeds = st.floats(0.5, 2000.0)


def views_of(draw: st.DataObject) -> dict[str, SiloView]:
    """Some silos: measured or not, with much data or little, with memory that they know of or not."""
    count = draw.draw(st.integers(1, 7))
    return {
        f"s{index}": SiloView(
            SiloFacts(
                draw.draw(st.sampled_from([10**6, 5000, 11, 3, 1])),
                draw.draw(st.sampled_from([None, None, 9, 2])),
                declared_speed=draw.draw(speeds),
            ),
            forecast=draw.draw(st.none() | st.builds(Curve, speeds)),
        )
        for index in range(count)
    }


@pytest.mark.slow
@of_section("balancer")
@settings(max_examples=60)
@given(data=st.data())
def test_work_is_shared_to_the_sample_and_within_all_limits(case: Case, data: st.DataObject) -> None:
    """A silo's data, its memory, what it ran out of memory at, the configured cap; and the floor, as they let."""
    sizing, silos = policies_of(case, STOP).sizing, views_of(data)
    found = {name: data.draw(st.integers(1, 12)) for name in silos if data.draw(st.integers(0, 3)) == 0}
    work = sizing.plan(silos, found)
    limits = {
        name: min(silo.facts.examples, silo.facts.memory_samples or 10**9, found.get(name, 10**9), sizing.cap or 10**9)
        for name, silo in silos.items()
    }
    assert list(work) == list(silos)
    steps = [share.steps for share in work.values()]
    batches = {name: share.batch_size for name, share in work.items()}
    assert all(1 <= batches[name] <= limit for name, limit in limits.items())
    assert min(steps) >= 1
    assert sum(steps) == STEPS * len(silos)
    if case[1] == "fixed" or sizing.scale == "steps":
        assert batches == {name: min(BATCH_SIZE, limit) for name, limit in limits.items()}
    else:
        assert sum(batches.values()) == min(BATCH_SIZE * len(silos), sum(limits.values()))
        assert all(batches[name] >= min(sizing.floor, limit) for name, limit in limits.items())
    for name, share in work.items():
        rate = batches[name] / BATCH_SIZE if sizing.scale == "learning_rate" else 1.0
        assert share.learning_rate == pytest.approx(sizing.work.learning_rate * rate, rel=1e-12)


@pytest.mark.parametrize("order", permutations("abcd"))
def test_one_that_nobody_has_measured_counts_as_the_median_of_the_others(order: tuple[str, ...]) -> None:
    """Wherever it stands among them; 40 samples go by 100, 300, 400 and the 300 in their middle.

    3.6, 10.9, 14.5, 10.9: of the last three b and d end their 11th in 0.0367 s, c its 15th in 0.0375, a its 4th
    in 0.04.
    """
    speed = {"a": 100.0, "b": 300.0, "c": 400.0}
    views = {name: SiloView(SiloFacts(5000), forecast=Curve(speed[name]) if name in speed else None) for name in order}
    work = policies_of(("balancer", "proportional", {}), STOP).sizing.plan(views, {})
    assert {name: work[name].batch_size for name in "abcd"} == {"a": 3, "b": 11, "c": 15, "d": 11}


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Curve], int, Bounds]:
    """Silos' curves, and a total that their bounds can hold."""
    count = draw(st.integers(1, 7))
    curves = [
        Curve(draw(speeds), draw(st.sampled_from([0.0, 0.0, 0.01, 2.0])), draw(st.sampled_from([0, 0, 5.0, 40.0])))
        for _ in range(count)
    ]
    floor = np.array([draw(st.integers(0, 6)) for _ in range(count)], dtype=np.int64)
    cap = floor + np.array([draw(st.sampled_from([0, 3, 20, 500])) for _ in range(count)], dtype=np.int64)
    total = draw(st.integers(int(floor.sum()), int(cap.sum())))
    return curves, total, Bounds(floor, cap)


@settings(max_examples=100)
@given(problem=problems())
def test_shares_are_proportional_to_speed_within_one_sample(problem: tuple[list[Curve], int, Bounds]) -> None:
    """As the paper rounds: ideal shares are ``clip(level x speed)`` for the level at which they sum to the total."""
    curves, total, bounds = problem
    rates = np.array([curve.speed for curve in curves])
    low, high = 0.0, 1e9
    for _ in range(200):
        level = (low + high) / 2
        low, high = (level, high) if np.clip(level * rates, bounds.floor, bounds.cap).sum() < total else (low, level)
    ideal = np.clip(high * rates, bounds.floor, bounds.cap)
    sizes = ProportionalBalancer(rounding="largest-remainder").plan(curves, total, bounds)
    assert sizes.sum() == total
    assert ((bounds.floor <= sizes) & (sizes <= bounds.cap)).all()
    assert (np.abs(sizes - ideal) < 1 + 1e-6).all()
    # By largest remainder: no silo is rounded up past one whose remainder is larger.
    rest = ideal - np.floor(ideal + 1e-7)
    up, down = rest[sizes > ideal + 1e-7], rest[(sizes < ideal - 1e-7) & (sizes < bounds.cap)]
    assert not (len(up) and len(down)) or up.min() >= down.max() - 1e-6


@pytest.mark.parametrize("kind", ["proportional", "equalise"])
@settings(max_examples=100)
@given(problem=problems())
def test_the_slowest_is_as_fast_as_whole_numbers_let_it(kind: str, problem: tuple[list[Curve], int, Bounds]) -> None:
    """LB-BSP's problem 3: nothing within the bounds that is all faster adds up to the total; `proportional` is for
    lines through the origin."""
    curves, total, bounds = problem
    if kind == "proportional":
        curves = [Curve(curve.speed) for curve in curves]
    balancer = ProportionalBalancer() if kind == "proportional" else EqualisingBalancer()
    sizes = balancer.plan(curves, total, bounds)
    assert sizes.sum() == total
    assert ((bounds.floor <= sizes) & (sizes <= bounds.cap)).all()
    times = [curve.step_s(int(size)) for curve, size in zip(curves, sizes, strict=True)]
    slowest = max(times)
    floors = [curve.step_s(int(floor)) for curve, floor in zip(curves, bounds.floor, strict=True)]
    if slowest <= max(floors):
        return  # one at its floor takes that long anyway
    most = 0
    for curve, floor, cap in zip(curves, bounds.floor.tolist(), bounds.cap.tolist(), strict=True):
        most += max(size for size in range(floor, cap + 1) if size == floor or curve.step_s(size) < slowest)
    assert most < total


@given(problem=problems(), order=st.randoms(use_true_random=False))
def test_a_permuted_silo_keeps_its_share_nearly(problem: tuple[list[Curve], int, Bounds], order: random.Random) -> None:
    """The place in the order of joining breaks ties, no more."""
    curves, total, bounds = problem
    places = list(range(len(curves)))
    order.shuffle(places)
    moved = Bounds(bounds.floor[places], bounds.cap[places])
    for balancer in (ProportionalBalancer(), EqualisingBalancer()):
        sizes = balancer.plan(curves, total, bounds)
        again = balancer.plan([curves[place] for place in places], total, moved)
        assert (np.abs(again - sizes[places]) <= 1).all()


@settings(max_examples=100)
@given(data=st.data(), multiple=st.sampled_from([2, 5, 8]))
def test_sizes_are_multiples_where_bounds_allow(data: st.DataObject, multiple: int) -> None:
    """A total in multiples, for silos with room for all of it: sizes are multiples near their proportional shares."""
    count = data.draw(st.integers(1, 6))
    rates = [data.draw(speeds) for _ in range(count)]
    total = multiple * data.draw(st.integers(1, 50))
    bounds = Bounds(np.zeros(count, dtype=np.int64), np.full(count, total, dtype=np.int64))
    sizes = InMultiples(ProportionalBalancer(rounding="largest-remainder"), multiple).plan(
        [Curve(rate) for rate in rates], total, bounds
    )
    assert (sizes % multiple == 0).all()
    assert (np.abs(sizes - total * np.array(rates) / sum(rates)) < multiple + 1e-6).all()


Rounds = list[dict[str, float]]


@settings(max_examples=60)
@given(data=st.data(), window=st.integers(1, 4), step=st.integers(1, 4))
def test_samples_go_from_the_slowest_to_the_fastest_after_a_window(data: st.DataObject, window: int, step: int) -> None:
    """Told by hand: so many samples, from the most seconds to the least, after so many rounds in a row."""
    balancer = LeaderStraggler(fast=MovePace(step, window), fine=MovePace(1, 2 * window))
    names = ["a", "b", "c"]
    total = 60
    bounds = Bounds(np.full(3, 2, dtype=np.int64), np.full(3, 40, dtype=np.int64))
    state, rounds, fine = balancer.init(), Rounds(), False
    sizes = dict.fromkeys(names, total // 3)
    moves = 0
    for _ in range(data.draw(st.integers(1, 14))):
        seconds = {name: float(data.draw(st.sampled_from([1, 1, 2, 3]))) for name in names}
        full = {name: data.draw(st.sampled_from([0.5, 0.5, 0.99])) for name in names}
        state, _ = balancer.advance(state, RoundSeen(names, seconds, full, total, bounds))
        rounds = [*rounds, seconds]
        pace, amount = (2 * window, 1) if fine else (window, step)
        able = [name for name in names if sizes[name] + amount <= 40 and full[name] <= 0.95]
        if able:
            leader, straggler = min(able, key=seconds.__getitem__), max(names, key=seconds.__getitem__)
            ahead = [one[leader] < one[straggler] for one in rounds[-pace:]]
            if leader != straggler and sizes[straggler] - amount >= 2:
                recent = rounds[-max(window, 2 * window) :]
                if len(ahead) == pace and all(ahead):
                    sizes = {**sizes, leader: sizes[leader] + amount, straggler: sizes[straggler] - amount}
                    moves += 1
                elif not fine and any(one[straggler] < one[leader] for one in recent):
                    fine = True
        told = balancer.plan(state, names, total, bounds)
        assert dict(zip(names, told.tolist(), strict=True)) == sizes
        assert state.fine == fine
