"""Silos that are there in windows: who gets no order, whom nobody waits for, and what is no failure."""

import pickle
from math import nan
from typing import Any

import pytest

from fedsync.core.actions import Commit, Discard, Stop, WakeAt
from fedsync.core.availability import REST_S
from fedsync.core.coordinator import Coordinator
from fedsync.core.events import Event, OperatorAsked, SiloJoined, SiloLost, TimerFired, WorkFailed
from fedsync.core.operator.operator_commands import DropSilo
from fedsync.core.orders import MAX_AWAY_S, Presence, SiloFacts, WorkOrder
from fedsync.core.stopping import StopRules
from fedsync.core.views import Verdict
from tests.core.make import Scripted, answer, begin, joined, of_type, orders, policies

# An order is 4 steps of 8 samples: 0.32 s at the 100 samples a second that `answer` reports.


def there(left_s: float, back_s: float = 100.0) -> Presence:
    return Presence(left_s, back_s)


def join(name: str, left_s: float, back_s: float = 100.0, at_s: float = 0.0) -> Event:
    return SiloJoined(at_s, name, SiloFacts(1000, presence=there(left_s, back_s)))


def started(*events: Event, **changes: Any) -> tuple[Coordinator, dict[str, WorkOrder]]:
    """A coordinator that has just given the first orders to these silos."""
    coordinator = Coordinator(policies(**{"stop": StopRules(rounds=9), **changes}))
    return coordinator, orders(coordinator.handle(list(events), 0.0))


def three(left_s: float, rounds: int = 9) -> Coordinator:
    """a and b are there always, c in a window; each has sent its first update at 1 s, and has its second order."""
    coordinator, first = started(*joined("a", "b"), join("c", left_s), stop=StopRules(rounds=rounds))
    coordinator.handle([answer(name, first[name], 1.0) for name in first], 1.0)
    return coordinator


def test_nobody_waits_for_a_silo_whose_window_is_over() -> None:
    coordinator, first = started(*joined("a", "b"), join("c", 5.0))
    waits = coordinator.handle([answer(name, first[name], 4.0) for name in ("a", "b")], 4.0)
    assert not of_type(waits, Commit) and of_type(waits, WakeAt) == [], "the alarm of the first decision is set"
    goes_on = coordinator.handle([TimerFired(5.0)], 5.0)
    assert set(of_type(goes_on, Commit)[0].weights) == {"a/1", "b/1"}
    assert set(orders(goes_on)) == {"a", "b"}
    assert "c is away for 95 s" in goes_on.reason


def test_the_coordinator_is_woken_as_windows_end_and_begin() -> None:
    coordinator = Coordinator(policies())
    entry = coordinator.handle([*joined("a"), join("c", 5.0)], 0.0)
    assert of_type(entry, WakeAt) == [WakeAt(5.0)]
    assert of_type(coordinator.handle([TimerFired(5.0)], 5.0), WakeAt) == [WakeAt(100.0)]


def test_an_order_that_takes_longer_than_the_window_is_not_given() -> None:
    """After two updates of 1 s each, 0.32 s of training and 0.68 s besides, c has half a second left."""
    coordinator = three(left_s=2.5)
    second = {name: silo.order for name, silo in coordinator._state.silos.items() if silo.order is not None}
    assert set(second) == {"a", "b", "c"}
    entry = coordinator.handle([answer(name, order, 2.0) for name, order in second.items()], 2.0)
    assert set(of_type(entry, Commit)[0].weights) == {"a/2", "b/2", "c/2"}
    assert set(orders(entry)) == {"a", "b"}
    assert "c gets no order: one takes 1 s, and its window ends in 0 s" in entry.reason
    assert coordinator._state.silos["c"].failures == 0


def test_what_a_silo_says_last_counts() -> None:
    """Its owner has made the window longer: the update says so."""
    coordinator, first = started(*joined("a"), join("c", 1.5))
    longer = answer("c", first["c"], 1.0, presence=there(50.0))
    assert set(orders(coordinator.handle([answer("a", first["a"], 1.0), longer], 1.0))) == {"a", "c"}


def test_an_update_in_the_grace_counts_unless_a_commit_was_first() -> None:
    for commit_first in (False, True):
        coordinator, first = started(*joined("a", "b"), join("c", 5.0))
        rest = [answer(name, first[name], 4.0) for name in ("a", "b")]
        coordinator.handle(rest if commit_first else rest[:1], 4.0)
        coordinator.handle([TimerFired(5.0)], 5.0)
        late = coordinator.handle([answer("c", first["c"], 6.0, presence=there(0.0, 94.0))], 6.0)
        dropped = [action.update_id for action in of_type(late, Discard)]
        assert dropped == (["c/1"] if commit_first else [])
        if not commit_first:
            entry = coordinator.handle([answer("b", first["b"], 7.0)], 7.0)
            assert set(of_type(entry, Commit)[0].weights) == {"a/1", "b/1", "c/1"}


def test_an_update_that_missed_a_commit_does_not_count_when_its_silo_is_back() -> None:
    """Nobody waited for it, so it is of an older version; rounds as of `bsp` have updates of one version."""
    coordinator, first = started(*joined("a", "b"), join("c", 5.0, back_s=6.0))
    coordinator.handle([answer(name, first[name], 4.0) for name in ("a", "b")], 4.0)
    second = orders(coordinator.handle([TimerFired(5.0)], 5.0))
    coordinator.handle([TimerFired(6.0)], 6.0)
    late = coordinator.handle([answer("c", first["c"], 7.0, presence=there(50.0))], 7.0)
    assert [action.update_id for action in of_type(late, Discard)] == ["c/1"]
    entry = coordinator.handle([answer(name, second[name], 8.0) for name in ("a", "b")], 8.0)
    assert set(of_type(entry, Commit)[0].weights) == {"a/2", "b/2"}
    third = orders(entry)
    assert set(third) == {"a", "b", "c"}
    entry = coordinator.handle([answer(name, third[name], 9.0) for name in third], 9.0)
    assert set(of_type(entry, Commit)[0].weights) == {"a/3", "b/3", "c/2"}, "its next order counts again"


def test_away_is_no_failure_and_the_silo_is_asked_again_in_its_window() -> None:
    coordinator = three(left_s=50.0, rounds=99)
    for number in range(2, 7):  # more often than a silo may fail
        order = coordinator._state.silos["c"].order
        assert order is not None
        at_s = 100.0 * number
        entry = coordinator.handle([WorkFailed(at_s, "c", order.update_id, "AWAY", back_s=60.0)], at_s)
        assert not orders(entry) and coordinator._state.silos["c"].failures == 0
        mates = {n: s.order for n, s in coordinator._state.silos.items() if n != "c" and s.order is not None}
        entry = coordinator.handle([answer(n, o, at_s + 1) for n, o in mates.items()], at_s + 1)
        assert set(orders(entry)) == {"a", "b"}, "it is away"
        mates = orders(entry)
        entry = coordinator.handle([answer(n, o, at_s + 61) for n, o in mates.items()], at_s + 61)
        assert set(orders(entry)) == {"a", "b", "c"}, "its window has begun"


@pytest.mark.parametrize("back_s", [nan, -1.0, MAX_AWAY_S + 1])
def test_what_no_window_can_be_is_a_failure(back_s: float) -> None:
    coordinator, first = begin("a", "b")
    coordinator.handle([WorkFailed(1.0, "a", first["a"].update_id, "AWAY", back_s)], 1.0)
    assert coordinator._state.silos["a"].failures == 1


def test_a_silo_that_says_that_it_is_back_at_once_rests_all_the_same() -> None:
    """Else one that answers AWAY to everything would be asked again and again without a pause."""
    coordinator, first = begin("a")
    entry = coordinator.handle([WorkFailed(1.0, "a", first["a"].update_id, "AWAY", 0.0)], 1.0)
    assert not orders(entry) and of_type(entry, WakeAt) == [WakeAt(1.0 + REST_S)]


@pytest.mark.parametrize("said", [Presence(-1, 5), Presence(nan, 5), Presence(9, 5), Presence(1, MAX_AWAY_S + 1)])
def test_what_a_silo_cannot_mean_is_refused(said: Presence) -> None:
    coordinator = Coordinator(policies())
    coordinator.handle(joined("a"), 0.0)
    coordinator.handle([SiloJoined(1.0, "c", SiloFacts(1000, presence=said))], 1.0)
    assert "c" not in coordinator._state.silos and "presence" in coordinator._state.failures.last_failure
    other, first = begin("a", "b")
    other.handle([answer("a", first["a"], presence=said)], 1.0)
    assert other._state.silos["a"].failures == 1


def test_a_run_waits_while_all_are_away_and_says_for_whom() -> None:
    coordinator = Coordinator(policies())
    coordinator.handle([join("c", 5.0), join("d", 5.0, 60.0)], 0.0)
    assert coordinator.able
    entry = coordinator.handle([TimerFired(5.0)], 5.0)
    assert "the run waits: d is the first to be back, in 55 s" in entry.reason
    gone = coordinator.handle([SiloLost(6.0, name, "its node is gone") for name in ("c", "d")], 6.0)
    assert not of_type(gone, Stop) and coordinator.able, "expected, though nobody is here"
    assert "the run waits: d is the first to be back, in 54 s" in gone.reason
    over = coordinator.handle([TimerFired(100.0)], 100.0)
    assert not coordinator.able and not of_type(over, Stop), "what is too long without anybody is the driver's to say"
    assert set(orders(coordinator.handle([join("d", 20.0, at_s=101.0)], 101.0))) == {"d"}


def test_one_that_crashes_within_its_window_is_not_expected() -> None:
    coordinator = Coordinator(policies())
    coordinator.handle([join("c", 50.0)], 0.0)
    coordinator.handle([SiloLost(6.0, "c", "its node is gone")], 6.0)
    coordinator.handle([TimerFired(50.0)], 50.0)
    assert not coordinator.able


def test_one_that_an_operator_drops_while_it_is_away_is_not_expected() -> None:
    coordinator = Coordinator(policies())
    coordinator.handle([*joined("a"), join("c", 5.0)], 0.0)
    coordinator.handle([TimerFired(6.0)], 6.0)
    coordinator.handle([OperatorAsked(7.0, "1", DropSilo("c"))], 7.0)
    coordinator.handle([SiloLost(8.0, "a", "its node is gone")], 8.0)
    assert not coordinator.able


def test_views_say_how_long_a_silo_is_there() -> None:
    barrier = Scripted([lambda view: Verdict(reason=f"{view.present_for_s('a')} {view.present_for_s('c')}")] * 2)
    coordinator = Coordinator(policies(barrier=barrier))
    assert coordinator.handle([*joined("a"), join("c", 5.0)], 0.0).reason == "None 5.0"
    assert coordinator.handle([TimerFired(1.0)], 1.0).reason == "None 4.0"


def test_a_run_that_is_resumed_knows_who_is_away() -> None:
    coordinator = three(left_s=50.0)
    other = Coordinator(policies(stop=StopRules(rounds=9)))
    other.restore(pickle.loads(pickle.dumps(coordinator.state())))
    assert "c is away for 40 s" in other.handle([TimerFired(60.0)], 60.0).reason
