"""FedCompass: who gets how many steps, who meets whom, and that nobody waits for ever."""

from pathlib import Path

import pytest

from fedsync.core.actions import Dispatch
from fedsync.core.orders import UpdateMeta
from fedsync.core.views import SiloView, Verdict
from fedsync.extras.compass import ArrivalGroup, Compass, CompassState
from tests.policies.barrier.make import commits, meta, race, silo, view

COMPASS = Compass(min_steps=10, max_steps=40, latest_factor=1.25)
STEP_S = {"a": 0.1, "b": 0.2, "c": 0.4, "d": 0.8, "e": 1.6}
"""Of batches of 8 samples, at 80, 40, 20, 10 and 5 samples a second."""


def known(name: str, **more: object) -> SiloView:
    return silo(speed=8 / STEP_S[name], **{"clock": 1, **more})  # type: ignore[arg-type]


def decide(
    state: CompassState, silos: dict[str, SiloView], *pending: UpdateMeta, now_s: float = 0.0, version: int = 1
) -> tuple[CompassState, Verdict]:
    return COMPASS.decide(state, view(silos, *pending, now_s=now_s, version=version))


def in_work(state: CompassState, *names: str, now_s: float = 0.0) -> dict[str, SiloView]:
    return {name: known(name, busy=True, since_s=now_s) for name in names}


def test_the_first_groups_by_hand() -> None:
    """a founds with 40 x 0.1 = 4 s. Until then b has time for 20 steps and c for 10; d would have for 5.

    d founds: a's group is over at 5 s at the latest, a can be back from there after another 4 s, at 9 s, and d does 11
    until then. e would do 5 until 9 s. d, with 40 x 0.8 s after its group, which is over at 11 s, is back at 43 s: e
    does 26 until then.
    """
    silos = {name: known(name) for name in "edcba"}
    state, verdict = decide(CompassState(), silos)
    assert dict(verdict.steps) == {"a": 40, "b": 20, "c": 10, "d": 11, "e": 26}
    assert verdict.release == ("a", "b", "c", "d", "e"), "the fastest are asked first"
    assert [(g.members, g.expected_s, g.latest_s) for g in state.groups] == [
        (("a", "b", "c"), pytest.approx(4.0), pytest.approx(5.0)),
        (("d",), pytest.approx(8.8), pytest.approx(11.0)),
        (("e",), pytest.approx(41.6), pytest.approx(52.0)),
    ]
    assert verdict.wake_at_s == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("latest_s", "expected"),
    [
        (2.0, 10),  # a is back at 6 s: 3 steps of 1.6 s, and 10 are the fewest
        (20.0, 15),  # at 24 s
        (60.0, 40),  # at 64 s, just so
        (61.6, 40),  # beyond reach: it does not wait for a, and does the most
    ],
)
def test_a_founder_lets_the_fastest_of_a_group_come_to_it(latest_s: float, expected: int) -> None:
    silos = {"e": known("e"), **in_work(CompassState(), "a")}
    _, verdict = decide(CompassState(groups=(ArrivalGroup(("a",), 1.0, latest_s),)), silos)
    assert dict(verdict.steps) == {"e": expected}


def test_of_several_groups_a_silo_joins_the_one_in_which_it_can_do_most() -> None:
    groups = tuple(ArrivalGroup((name,), at_s, 2 * at_s) for name, at_s in (("c", 1.5), ("d", 3.0), ("e", 4.5)))
    silos = {"a": known("a"), **in_work(CompassState(), "c", "d", "e")}
    state, verdict = decide(CompassState(groups=groups), silos)
    assert dict(verdict.steps) == {"a": 30}, "15 until 1.5 s, 30 until 3 s, 45 are too many"
    assert [group.members for group in state.groups] == [("c",), ("d", "a"), ("e",)]


def test_overhead_counts_in_the_time_to_meet() -> None:
    """4 s less 1 s of overhead are 15 steps of 0.2 s; a founder's group is expected a second later."""
    silos = {"b": known("b", overhead_s=1.0), **in_work(CompassState(), "a")}
    _, verdict = decide(CompassState(groups=(ArrivalGroup(("a",), 4.0, 5.0),)), silos)
    assert dict(verdict.steps) == {"b": 15}
    state, _ = decide(CompassState(), {"a": known("a", overhead_s=1.0)})
    assert state.groups[0].expected_s == pytest.approx(5.0)


def test_a_group_is_committed_when_all_of_it_is_in() -> None:
    state = CompassState(groups=(ArrivalGroup(("a", "b"), 4.0, 5.0), ArrivalGroup(("d",), 8.0, 10.0)))
    silos = {"a": known("a", clock=2), **in_work(state, "b", "d")}
    state, verdict = decide(state, silos, meta("a"), now_s=3.9)
    assert (verdict.commit, verdict.release) == ((), ())
    assert verdict.reason == "1 silos wait for their group"
    silos["b"] = known("b", clock=2)
    state, verdict = decide(state, silos, meta("a"), meta("b"), now_s=4.1)
    assert (set(verdict.commit), verdict.release) == ({"a/1", "b/1"}, ())
    state, verdict = decide(state, silos, now_s=4.1, version=2)
    assert dict(verdict.steps) == {"a": 39, "b": 19}, "both meet d at 8 s"
    assert [group.members for group in state.groups] == [("d", "a", "b")]


def test_who_is_late_goes_on_at_once_and_its_update_is_part_of_the_next_commit() -> None:
    state = CompassState(groups=(ArrivalGroup(("a",), 9.0, 10.0),), late=frozenset({"b"}))
    silos = {"b": known("b", clock=2), **in_work(state, "a")}
    state, verdict = decide(state, silos, meta("b"), now_s=6.0)
    assert (verdict.commit, verdict.release, dict(verdict.steps)) == ((), ("b",), {"b": 15})
    assert state.late == frozenset()
    silos = {"a": known("a", clock=2), "b": known("b", clock=2, busy=True)}
    state, verdict = decide(state, silos, meta("b"), meta("a"), now_s=10.0)
    assert set(verdict.commit) == {"a/1", "b/1"}


def test_a_late_update_that_no_group_is_left_for_is_committed_at_once() -> None:
    state = CompassState(late=frozenset({"b"}))
    _, verdict = decide(state, {"b": known("b", clock=2)}, meta("b"), now_s=6.0)
    assert verdict.commit == ("b/1",)


def test_a_late_arrival_does_not_strand_who_is_in() -> None:
    """The published hang: b comes after the latest time, before the timer was heard of. a waits in the group."""
    state = CompassState(groups=(ArrivalGroup(("a", "b"), 4.0, 5.0),))
    silos = {"a": known("a", clock=2), "b": known("b", clock=2)}
    state, verdict = decide(state, silos, meta("a"), meta("b"), now_s=6.0)
    assert set(verdict.commit) == {"a/1", "b/1"}
    _, verdict = decide(state, silos, now_s=6.0, version=2)
    assert verdict.release == ("a", "b")


@pytest.mark.parametrize("gone", [True, False])
def test_a_silo_that_failed_or_was_lost_leaves_its_group(gone: bool) -> None:
    state = CompassState(groups=(ArrivalGroup(("a", "b"), 4.0, 5.0),))
    silos = {"a": known("a", clock=2), **in_work(state, "b")}
    state, verdict = decide(state, silos, meta("a"), now_s=3.0)
    assert verdict.commit == ()
    silos.pop("b")
    if not gone:
        silos["b"] = known("b", failures=1)
    state, verdict = decide(state, silos, meta("a"), now_s=3.5)
    assert (verdict.commit, state.groups) == (("a/1",), ())


def test_a_group_that_all_have_left_is_no_more() -> None:
    state = CompassState(groups=(ArrivalGroup(("a", "b"), 4.0, 5.0),))
    state, verdict = decide(state, {"c": known("c")}, now_s=1.0)
    assert [group.members for group in state.groups] == [("c",)]
    assert verdict.commit == ()


# Whole runs.

SPEEDS = [256.0, 128.0, 64.0]
"""Steps of 1/8, 1/4 and 1/2 s."""


def test_by_hand(tmp_path: Path) -> None:
    """8 steps to be measured: 1, 2, 4 s. At 1 s a founds with 32 steps, for 5 s, or 5.8 at the latest; at 2 s b joins
    with 12. At 4 s c has time for 2 only: it founds for a's return, 5.8 + 4 s, with 11 steps, for 9.5 s.

    At 5 s that is 36 steps of a, too many, so a goes on alone; b has time for 16 with a and for 18 with c. At 9 s a has
    4 steps until 9.5 s, too few. At 9.5 s b has 14 with a, until 13 s; c has 7, too few, and founds for 13.8 + 4 s.
    """
    barrier = {"kind": "fedcompass", "min_steps": 8, "max_steps": 32}
    result = race(tmp_path, SPEEDS, barrier, stop={"seconds": 14.0})
    given = [(at_s, order.silo, order.order.max_steps) for at_s, order in result.actions(Dispatch)]
    assert given == [
        *[(0, name, 8) for name in "abc"],
        (1, "a", 32),
        (2, "b", 12),
        (4, "c", 11),
        (5, "a", 32),
        (5, "b", 18),
        (9, "a", 32),
        (9.5, "b", 14),
        (9.5, "c", 16),
        (13, "a", 32),
        (13, "b", 18),
    ]
    assert commits(result) == [
        (1, ["a/1"]),
        (2, ["b/1"]),
        (4, ["c/1"]),
        (5, ["a/2", "b/2"]),
        (9, ["a/3"]),
        (9.5, ["b/3", "c/2"]),
        (13, ["a/4", "b/4"]),
    ]
    assert result.ledger.summary()["wait_fraction"] == pytest.approx(0)
