"""pBSP and pSSP: samples, waiting by hand, and the identities at both ends, journal by journal."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from fedsync.barrier.sampled import Sampled, SampledState, Sampling, Watch, two_groups
from fedsync.barrier.ssp import Tick
from fedsync.core.rng import Stream, draw
from fedsync.core.views import ClusterView, SiloView
from tests.barrier.make import begins, deeds, meta, race, silo, view

NAMES = [f"silo-{index}" for index in range(10)]


# Drawing.


def test_a_draw_is_without_replacement_and_takes_all_if_there_are_too_few() -> None:
    for size, expected in [(0, 0), (1, 1), (4, 4), (10, 10), (11, 10)]:
        drawn = draw(NAMES, size, 7, Stream.SAMPLE)
        assert len(drawn) == len(set(drawn)) == expected
        assert set(drawn) <= set(NAMES)


def test_a_draw_is_uniform() -> None:
    """Each of the 45 pairs of 10 names should come up in 9000 / 45 = 200 of 9000 draws.

    Chi square with 44 degrees of freedom exceeds 84 with a probability of 0.03 %.
    """
    drawn = [frozenset(draw(NAMES, 2, 7, Stream.SAMPLE, "a", round)) for round in range(9000)]
    counts = Counter(drawn)
    expected = [frozenset(pair) for pair in itertools.combinations(NAMES, 2)]
    assert sum((counts[pair] - 200) ** 2 / 200 for pair in expected) < 84


def test_a_draw_depends_on_all_coordinates_and_nothing_else() -> None:
    draws = {
        draw(NAMES, 5, seed, stream, name, round)
        for seed in (1, 2)
        for stream in (Stream.SAMPLE, Stream.ORDER)
        for name in "ab"
        for round in (0, 1)
    }
    assert len(draws) == 16
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


def test_the_groups_are_the_best_of_all_cuts() -> None:
    """Against every way to cut: least sum of squared distances from the means."""
    times = {name: (index * 7 % 10 + 1) ** 1.7 for index, name in enumerate(NAMES)}

    def squares(names: list[str]) -> float:
        mean = sum(times[name] for name in names) / len(names)
        return sum((times[name] - mean) ** 2 for name in names)

    order = sorted(NAMES, key=times.__getitem__)
    best = min(range(1, 10), key=lambda cut: squares(order[:cut]) + squares(order[cut:]))
    assert two_groups(times) == (order[:best], order[best:])


def speeds(**of: float | None) -> ClusterView:
    return view({name: silo(speed=speed) for name, speed in of.items()})


@pytest.mark.parametrize(
    ("size", "fast", "slow"), [(0, 0, 0), (1, 0, 1), (2, 1, 1), (3, 1, 2), (4, 2, 2), (5, 3, 2), (9, 3, 2)]
)
def test_grouped_takes_half_from_each(size: int, fast: int, slow: int) -> None:
    """Three fast, two slow: the odd one comes from the slow, what the slow lack from the fast."""
    seen = speeds(a=100.0, b=110.0, c=120.0, d=10.0, e=11.0)
    for round in range(10):
        drawn = Sampling.GROUPED.choose(seen.silos, size, seen, "x", round)
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
        drawn = [sampling.choose(NAMES, 4, seen, "x", round) for round in range(20)]
        assert len(set(drawn)) == 1 if different == 1 else len(set(drawn)) > 10
        assert [sampling.choose(reversed(NAMES), 4, seen, "x", round) for round in range(20)] == drawn


# Waiting.


def ticked(**ticks: int) -> SampledState:
    return SampledState({name: Tick(count, count, 0) for name, count in ticks.items()})


def others(**clocks: int) -> dict[str, SiloView]:
    """Silos at work."""
    return {name: silo(clock=clock, busy=True) for name, clock in clocks.items()}


def test_a_silo_waits_for_the_slowest_of_its_sample_only() -> None:
    """All samples of two of the four others, with s = 1: a has done 5, so only c (3) and d (2) hold it."""
    state = ticked(a=5, b=5, c=3, d=2, e=4)
    silos = {"a": silo(clock=5), **others(b=5, c=3, d=2, e=4)}
    held = set()
    for seed in range(60):
        after, verdict = Sampled(2, 1).decide(state, view(silos, seed=seed))
        sample = draw("bcde", 2, seed, Stream.SAMPLE, "a", 5)
        assert (verdict.release == ()) == bool(set(sample) & set("cd"))
        assert ("a" in after.waiting) == (verdict.release == ())
        held.add(frozenset(sample))
    assert len(held) == 6, "every pair was seen"


def test_a_wake_up_draws_nothing_anew_and_whoever_was_close_enough_is_not_asked_again() -> None:
    silos = {"a": silo(clock=5), **others(b=5, c=3, d=2, e=3)}
    barrier = Sampled(4, 0)
    state, verdict = barrier.decide(ticked(a=5, b=5, c=3, d=2, e=3), view(silos))
    assert verdict.release == ()
    for _ in range(3):
        again, verdict = barrier.decide(state, view(silos))
        assert (again, verdict.release) == (state, ())
    first = state.waiting["a"].names[0]
    silos[first] = silo(clock=9, busy=True)
    clocks = {**state.clocks, first: Tick(8, 8, 0)}
    state, _ = barrier.decide(SampledState(clocks, state.waiting), view(silos))
    assert first not in state.waiting["a"].names


def test_a_silo_of_the_sample_that_is_gone_does_not_block() -> None:
    state = replace(ticked(a=2, b=1), waiting={"a": Watch(2, ("gone", "b"))})
    assert Sampled(2).decide(state, view({"a": silo(clock=2), **others(b=1)}))[1].release == ()
    assert Sampled(2).decide(state, view({"a": silo(clock=2), **others(b=2)}))[1].release == ("a",)
    assert Sampled(2).decide(state, view({"a": silo(clock=2)}))[1].release == ("a",)


def test_the_slowest_never_waits() -> None:
    state = ticked(a=2, b=2, c=3)
    for sampling in Sampling:
        silos = {"a": silo(clock=2), **others(b=2, c=3)}
        assert Sampled(2, 0, sampling).decide(state, view(silos))[1].release == ("a",)


def test_the_sample_is_drawn_again_for_the_next_order() -> None:
    """With ten others that are all behind, a new barrier means a new sample; the basic one stays."""
    silos = {"a": silo(clock=2), **others(**dict.fromkeys(NAMES, 1))}
    later = {**silos, "a": silo(clock=3)}
    for sampling, same in [(Sampling.BASIC, True), (Sampling.DYNAMIC, False), (Sampling.GROUPED, False)]:
        barrier = Sampled(4, 0, sampling)
        state, _ = barrier.decide(ticked(a=2, **dict.fromkeys(NAMES, 1)), view(silos))
        after, _ = barrier.decide(state, view(later))
        assert after.waiting["a"].ticks == 3
        assert (after.waiting["a"].names == state.waiting["a"].names) == same


def test_arrivals_are_committed_first() -> None:
    state = ticked(a=1)
    assert Sampled(1).decide(state, view({"a": silo(clock=2)}, meta("a")))[1].commit == ("a/1",)


# Whole runs.

HETERO = [300.0, 200.0, 70.0, 130.0]
KINDS = ["basic", "dynamic", "grouped"]
JITTER = {"jitter": 0.2}


@pytest.mark.parametrize("sampling", KINDS)
@pytest.mark.parametrize("staleness", [0, 2])
def test_looking_at_nobody_is_asp(tmp_path: Path, sampling: str, staleness: int) -> None:
    barrier = {"kind": "sampled", "sample_size": 0, "staleness": staleness, "sampling": sampling}
    sampled = race(tmp_path / "sampled", HETERO, barrier, JITTER, stop={"rounds": 80})
    asp = race(tmp_path / "asp", HETERO, {"kind": "asp"}, JITTER, stop={"rounds": 80})
    assert sampled.entries == asp.entries


@pytest.mark.parametrize("sampling", KINDS)
@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("more", [-1, 0, 5])
def test_looking_at_all_others_is_ssp(tmp_path: Path, sampling: str, staleness: int, more: int) -> None:
    size = len(HETERO) + more
    barrier = {"kind": "sampled", "sample_size": size, "staleness": staleness, "sampling": sampling}
    sampled = race(tmp_path / "sampled", HETERO, barrier, JITTER, stop={"rounds": 80})
    ssp = race(tmp_path / "ssp", HETERO, {"kind": "ssp", "staleness": staleness}, JITTER, stop={"rounds": 80})
    assert sampled.entries == ssp.entries


@pytest.mark.parametrize("sampling", KINDS)
def test_more_to_look_at_means_fewer_updates(tmp_path: Path, sampling: str) -> None:
    """PSP, figure 10-14b: between ASP and BSP."""
    counts = [
        len(
            race(
                tmp_path / str(size),
                HETERO,
                {"kind": "sampled", "sample_size": size, "sampling": sampling},
                JITTER,
                stop={"seconds": 60.0},
            ).ledger.rounds
        )
        for size in (0, 1, 3)
    ]
    assert counts[0] > counts[1] >= counts[2], "of two groups, a sample of one always looks at the slow"


def test_the_same_seed_draws_the_same_and_another_does_not(tmp_path: Path) -> None:
    barrier = {"kind": "sampled", "sample_size": 1}
    one, two, other = (
        race(tmp_path / name, HETERO, barrier, stop={"rounds": 60}, seed=seed)
        for name, seed in [("one", 7), ("two", 7), ("other", 8)]
    )
    assert one.text == two.text
    assert deeds(one) != deeds(other)
    assert begins(one) != begins(other), "without jitter only the samples can differ"
