"""pBSP and pSSP: samples, waiting by hand, and the identities at both ends, journal by journal."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsync.common.rng import Stream, draw
from fedsync.core.views import ClusterView, SiloView
from fedsync.policies.barrier.kinds.sampled import Sampled, SampledState, Sampling, two_groups
from fedsync.policies.barrier.kinds.ssp import Clocks, Tick
from tests.policies.barrier.make import meta, race, silo, view

NAMES = [f"silo-{index}" for index in range(10)]


# Drawing.


def test_a_draw_is_uniform() -> None:
    """Each of the 45 pairs of 10 names should come up in 9000 / 45 = 200 of 9000 draws.

    Chi square with 44 degrees of freedom exceeds 84 with a probability of 0.03 %.
    """
    drawn = [frozenset(draw(NAMES, 2, 7, Stream.SAMPLE, round)) for round in range(9000)]
    counts = Counter(drawn)
    expected = [frozenset(pair) for pair in itertools.combinations(NAMES, 2)]
    assert sum((counts[pair] - 200) ** 2 / 200 for pair in expected) < 84


def test_a_draw_depends_on_all_coordinates_and_nothing_else() -> None:
    draws = {
        draw(NAMES, 5, seed, stream, round)
        for seed in (1, 2)
        for stream in (Stream.SAMPLE, Stream.ORDER)
        for round in (0, 1)
    }
    assert len(draws) == 8
    assert draw(NAMES, 5, 1, Stream.SAMPLE) == draw(reversed(NAMES), 5, 1, Stream.SAMPLE)


def test_a_name_that_goes_is_the_only_change() -> None:
    drawn = draw(NAMES, 5, 7, Stream.SAMPLE)
    for gone in NAMES:
        after = draw([name for name in NAMES if name != gone], 5, 7, Stream.SAMPLE)
        assert after[:4] == tuple(name for name in drawn if name != gone)[:4]
        assert (after == drawn) == (gone not in drawn)


# Groups.


@pytest.mark.parametrize(
    ("step_s", "slow"),
    [
        ({"a": 1.0, "b": 2.0, "c": 10.0}, ["c"]),
        ({"a": 1.0, "b": 9.0, "c": 10.0}, ["b", "c"]),
        ({"c": 10.0, "b": 9.0, "a": 1.0}, ["b", "c"]),
        # By hand: cuts after 1, 2, 3 of (0.1, 0.4, 0.6, 1.2) leave squares of 0 + 0.3467, 0.045 + 0.18, 0.1267 + 0.
        ({"a": 0.1, "b": 0.4, "c": 0.6, "d": 1.2}, ["d"]),
        ({"a": 3.0, "b": 3.0}, ["a", "b"]),  # no groups
        ({"a": 3.0}, ["a"]),
        ({}, []),
        ({"a": 1.0, "b": float("inf")}, ["b"]),  # nobody knows b
        ({"a": 1.0, "b": 5.0, "c": float("inf")}, ["b", "c"]),
        ({"a": float("inf"), "b": float("inf")}, ["a", "b"]),
        ({"a": 1e-300, "b": 1e-300, "c": 3e-300}, ["c"]),
        ({"a": 1e300, "b": 1e300, "c": 3e300}, ["c"]),
    ],
)
def test_groups_by_hand(step_s: dict[str, float], slow: list[str]) -> None:
    fast_names, slow_names = two_groups(step_s)
    assert slow_names == slow
    assert sorted(fast_names + slow_names) == sorted(step_s)


def speeds(**of: float | None) -> ClusterView:
    return view({name: silo(speed=speed) for name, speed in of.items()})


@pytest.mark.parametrize(
    ("size", "fast", "slow"), [(0, 0, 0), (1, 0, 1), (2, 1, 1), (3, 1, 2), (4, 2, 2), (5, 3, 2), (9, 3, 2)]
)
def test_grouped_takes_half_from_each(size: int, fast: int, slow: int) -> None:
    """Three fast, two slow: the odd one comes from the slow, what the slow lack from the fast."""
    seen = speeds(a=100.0, b=110.0, c=120.0, d=10.0, e=11.0)
    for round in range(10):
        drawn = Sampling.GROUPED.choose(seen.silos, size, seen, round)
        assert len(set(drawn)) == len(drawn)
        assert (len(set(drawn) & set("abc")), len(set(drawn) & set("de"))) == (fast, slow)


def test_groups_follow_the_time_of_a_step_not_the_speed() -> None:
    """b is twice as fast but has four times the batch: 8 / 100 and 32 / 200 s."""
    seen = speeds(a=100.0, b=200.0)
    seen = replace(seen, work={"a": replace(seen.work["a"], batch_size=8), "b": replace(seen.work["b"], batch_size=32)})
    assert Sampling.GROUPED.choose("ab", 1, seen) == ("b",)


def test_basic_stays_and_the_others_change() -> None:
    seen = view({name: silo(speed=100.0 + index) for index, name in enumerate(NAMES)})
    for sampling, different in [(Sampling.BASIC, 1), (Sampling.DYNAMIC, 20), (Sampling.GROUPED, 20)]:
        drawn = [sampling.choose(NAMES, 4, seen, round) for round in range(20)]
        assert len(set(drawn)) == 1 if different == 1 else len(set(drawn)) > 10
        assert [sampling.choose(reversed(NAMES), 4, seen, round) for round in range(20)] == drawn
        assert [sampling.choose(NAMES, 4, replace(seen, seed=seen.seed + 1), round) for round in range(20)] != drawn


def sample(sampling: Sampling, size: int, seen: ClusterView, silo: str, ticks: int = 0, keeps: bool = False) -> Sample:
    return sampling.draw(sampling.pools(seen), size, seen, silo, ticks, keeps)


Sample = tuple[str, ...]
ALL = view({name: silo(speed=100.0 + index) for index, name in enumerate(NAMES)})


@pytest.mark.parametrize("sampling", list(Sampling))
@pytest.mark.parametrize("size", [0, 1, 2, 4, 5, 8, 9, 12])
def test_a_silo_draws_from_the_others_without_replacement(sampling: Sampling, size: int) -> None:
    for name in NAMES:
        drawn = sample(sampling, size, ALL, name)
        assert len(drawn) == len(set(drawn)) == min(size, 9)
        assert set(drawn) <= set(NAMES) - {name}


@pytest.mark.parametrize("size", [2, 5])
def test_each_sample_is_as_likely_as_any_other(size: int) -> None:
    """Of 9 others, 9000 draws of 2: each of 36 pairs 250 times; of 5, where it shuffles: each of 126 sets 71 times.

    Chi square with 35 and 125 degrees of freedom exceeds 73 and 186 with a probability of 0.02 %.
    """
    counts = Counter(frozenset(sample(Sampling.DYNAMIC, size, ALL, NAMES[3], ticks)) for ticks in range(9000))
    sets = [frozenset(each) for each in itertools.combinations([name for name in NAMES if name != NAMES[3]], size)]
    expected = 9000 / len(sets)
    assert sum((counts[each] - expected) ** 2 / expected for each in sets) < {2: 73, 5: 186}[size]


def test_a_sample_depends_on_seed_silo_orders_and_version_only() -> None:
    drawn = {
        sample(Sampling.DYNAMIC, 4, replace(ALL, seed=seed, version=version), name, ticks)
        for seed, version, name, ticks in itertools.product((1, 2), (0, 1), NAMES[:2], (0, 1))
    }
    assert len(drawn) == 16
    later = replace(ALL, now_s=9.0, pending={"x/1": meta("x")})
    assert sample(Sampling.DYNAMIC, 4, later, "silo-0", 3) == sample(Sampling.DYNAMIC, 4, ALL, "silo-0", 3)


def test_what_is_kept_does_not_depend_on_the_version_and_basic_not_on_the_order_either() -> None:
    for sampling, different in [(Sampling.DYNAMIC, 2), (Sampling.GROUPED, 2), (Sampling.BASIC, 1)]:
        views = [replace(ALL, version=version) for version in range(5)]
        drawn = {sample(sampling, 4, seen, "silo-0", ticks, keeps=True) for seen in views for ticks in (0, 1)}
        assert len(drawn) == different
    own = {frozenset(sample(Sampling.BASIC, 8, ALL, name, keeps=True)) for name in NAMES}
    assert len(own) > 5, "of eight of nine others, each silo leaves out one of its own"


def test_grouped_draws_half_from_each_group_of_the_others() -> None:
    """Three fast, two slow, of which e draws: a slow one less to choose from. By hand as above."""
    seen = speeds(a=100.0, b=110.0, c=120.0, d=10.0, e=11.0)
    for ticks in range(10):
        for size, fast, slow in [(1, 0, 1), (2, 1, 1), (3, 2, 1), (4, 3, 1)]:
            drawn = set(sample(Sampling.GROUPED, size, seen, "e", ticks))
            assert (len(drawn & set("abc")), len(drawn & set("d"))) == (fast, slow)


def test_the_halves_of_a_grouped_sample_are_drawn_independently() -> None:
    """Two of three fast and two of three slow silos: nine samples, each as often as the others."""
    seen = speeds(a=100.0, b=110.0, c=120.0, d=10.0, e=11.0, f=12.0, x=100.0)
    drawn = Counter(
        frozenset(sample(Sampling.GROUPED, 4, replace(seen, version=version), "x")) for version in range(900)
    )
    assert len(drawn) == 9
    assert all(60 < count < 140 for count in drawn.values())  # 100 each, with a standard deviation of 9.4


# Waiting.


def ticked(**ticks: int) -> SampledState:
    return SampledState(clocks(**ticks))


def clocks(**ticks: int) -> Clocks:
    return Clocks({name: Tick(count, count, 0) for name, count in ticks.items()})


def others(**clocks: int) -> dict[str, SiloView]:
    """Silos at work."""
    return {name: silo(clock=clock, busy=True) for name, clock in clocks.items()}


@pytest.mark.parametrize("redraw", [True, False])
def test_a_silo_waits_for_the_slowest_of_its_sample_only(redraw: bool) -> None:
    """All samples of two of the four others, with s = 1: a has done 5, so only c (3) and d (2) hold it."""
    state = ticked(a=5, b=5, c=3, d=2, e=4)
    silos = {"a": silo(clock=5), **others(b=5, c=3, d=2, e=4)}
    held = set()
    for seed in range(60):
        seen = view(silos, seed=seed)
        after, verdict = Sampled(2, 1, redraw=redraw).decide(state, seen)
        drawn = sample(Sampling.DYNAMIC, 2, seen, "a", 5, keeps=not redraw)
        assert (verdict.release == ()) == bool(set(drawn) & set("cd"))
        assert ("a" in after.waiting) == (verdict.release == () and not redraw)
        held.add(frozenset(drawn))
    assert len(held) == 6, "every pair was seen"


def test_a_silo_looks_at_others_whenever_an_update_arrives_and_only_then() -> None:
    """One of four others lags, so that a sample of two misses it with a probability of a half."""
    silos = {"a": silo(clock=5), **others(b=5, c=5, d=5, e=3)}
    barrier, state = Sampled(2), ticked(a=5, b=5, c=5, d=5, e=3)
    went_on = 0
    for version in range(200):
        seen = view(silos, version=version)
        state, verdict = barrier.decide(state, seen)
        assert barrier.decide(state, seen) == (state, verdict), "a duplicate wake-up"
        assert barrier.decide(state, replace(seen, now_s=7.0)) == (state, verdict), "a late one"
        went_on += verdict.release == ("a",)
    assert 70 <= went_on <= 130, "100 in the mean, and 7 is the standard deviation"


@pytest.mark.parametrize("sampling", [Sampling.BASIC, Sampling.DYNAMIC])
def test_what_is_kept_is_not_drawn_anew_and_whoever_was_close_enough_is_not_asked_again(sampling: Sampling) -> None:
    """Basic keeps its sample in any case."""
    silos = {"a": silo(clock=5), **others(b=5, c=3, d=2, e=3)}
    barrier = Sampled(4, 0, sampling, redraw=sampling is Sampling.BASIC)
    state, verdict = barrier.decide(ticked(a=5, b=5, c=3, d=2, e=3), view(silos))
    assert verdict.release == ()
    for version in range(3):
        again, verdict = barrier.decide(state, view(silos, version=version))
        assert (again, verdict.release) == (state, ())
    first = state.waiting["a"].names[0]
    silos[first] = silo(clock=9, busy=True)
    caught_up = Clocks({**state.clocks.present, first: Tick(8, 8, 0)})
    state, _ = barrier.decide(replace(state, clocks=caught_up), view(silos))
    assert first not in state.waiting["a"].names


def test_the_sample_is_drawn_again_for_the_next_order() -> None:
    """With ten others that are all behind, a new barrier means a new sample; the basic one stays."""
    silos = {"a": silo(clock=2), **others(**dict.fromkeys(NAMES, 1))}
    later = {**silos, "a": silo(clock=3)}
    for sampling, same in [(Sampling.BASIC, True), (Sampling.DYNAMIC, False), (Sampling.GROUPED, False)]:
        barrier = Sampled(4, 0, sampling, redraw=False)
        state, _ = barrier.decide(ticked(a=2, **dict.fromkeys(NAMES, 1)), view(silos))
        after, _ = barrier.decide(state, view(later))
        assert after.waiting["a"].ticks == 3
        assert (after.waiting["a"].names == state.waiting["a"].names) == same


# Whole runs.

HETERO = [300.0, 200.0, 70.0, 130.0]
KINDS = [
    {"kind": "sampled", "sampling": "basic"},
    {"kind": "sampled", "sampling": "dynamic"},
    {"kind": "sampled", "sampling": "dynamic", "redraw": False},
    {"kind": "sampled", "sampling": "grouped"},
    {"kind": "sampled", "sampling": "grouped", "redraw": False},
]
JITTER = {"jitter": 0.2}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("staleness", [0, 2])
def test_looking_at_nobody_is_asp(tmp_path: Path, kind: dict[str, Any], staleness: int) -> None:
    barrier = {**kind, "sample_size": 0, "staleness": staleness}
    sampled = race(tmp_path / "sampled", HETERO, barrier, JITTER, stop={"rounds": 80})
    asp = race(tmp_path / "asp", HETERO, {"kind": "asp"}, JITTER, stop={"rounds": 80})
    assert sampled.entries == asp.entries


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("staleness", "more"),
    [
        *((0, -1), (1, 0), pytest.param(3, 5, marks=pytest.mark.slow)),
        *(pytest.param(*each, marks=pytest.mark.full) for each in ((0, 0), (0, 5), (1, -1), (1, 5), (3, -1), (3, 0))),
    ],
)
def test_looking_at_all_others_is_ssp(tmp_path: Path, kind: dict[str, Any], staleness: int, more: int) -> None:
    size = len(HETERO) + more
    barrier = {**kind, "sample_size": size, "staleness": staleness}
    sampled = race(tmp_path / "sampled", HETERO, barrier, JITTER, stop={"rounds": 80})
    ssp = race(tmp_path / "ssp", HETERO, {"kind": "ssp", "staleness": staleness}, JITTER, stop={"rounds": 80})
    assert sampled.entries == ssp.entries
