"""Every kind of event in every situation leaves each silo either idle or busy with one known order."""

import math

import pytest

from fedsync.core.actions import Commit, Discard, Stop
from fedsync.core.events import Progressed, SiloLost, WorkFailed
from fedsync.core.orders import Evaluation
from fedsync.core.state import MOST_FAILURES
from fedsync.core.stopping import StopRules
from fedsync.core.views import Verdict
from fedsync.policies.barrier.kinds.bulk import Bsp
from fedsync.policies.barrier.kinds.ssp import Asp
from fedsync.policies.barrier.wrappers.default_wrappers import OpenableSums
from tests.core.make import Scripted, answer, begin, joined, of_type, orders, scored


def test_joining_twice_gives_up_the_order() -> None:
    coordinator, first = begin("a", "b")
    entry = coordinator.handle(joined("a", at_s=1.0), 1.0)
    assert [d.update_id for d in of_type(entry, Discard)] == ["a/1"]
    late = coordinator.handle([answer("a", first["a"])], 2.0)
    assert [d.update_id for d in of_type(late, Discard)] == ["a/1"]
    entry = coordinator.handle([answer("b", first["b"])], 3.0)
    assert of_type(entry, Commit) == [Commit(1, {"b/1": 1.0})]
    assert orders(entry)["a"].update_id == "a/2", "an id is never used twice"


@pytest.mark.parametrize(("silo", "update_id"), [("a", "a/9"), ("b", "a/1"), ("ghost", "ghost/1")])
def test_a_failure_of_no_current_order_is_ignored(silo: str, update_id: str) -> None:
    coordinator, first = begin("a", "b")
    assert coordinator.handle([WorkFailed(1.0, silo, update_id, "late news")], 1.0).actions == ()
    coordinator.handle([answer("a", first["a"])], 2.0)
    entry = coordinator.handle([answer("b", first["b"])], 2.0)
    assert of_type(entry, Commit) == [Commit(1, {"a/1": 0.5, "b/1": 0.5})], "both orders were still good"


def test_the_barrier_sees_progress_of_the_current_order_only() -> None:
    barrier = Scripted([lambda view: Verdict(release=view.idle)])
    coordinator, first = begin("a", barrier=barrier)
    coordinator.handle([Progressed(1.0, "a", "a/1", 3, 24)], 1.0)
    coordinator.handle([Progressed(2.0, "a", "a/0", 1, 8), Progressed(2.0, "ghost", "a/1", 1, 8)], 2.0)
    coordinator.handle([answer("a", first["a"], 3.0)], 3.0)
    views = [view.silos["a"] for view in barrier.seen]
    assert [(v.busy, v.progress_steps, v.clock, v.since_s) for v in views] == [
        (False, 0, 0, 0.0),
        (True, 3, 0, 0.0),
        (True, 3, 0, 0.0),
        (False, 0, 1, 3.0),
    ]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("sender", ["a", "b"])
def test_a_duplicate_does_not_discard_the_update_that_waits_for_its_commit(sender: str, together: bool) -> None:
    """A driver that obeys the Discard has no payload left when the Commit comes."""
    coordinator, first = begin("a", "b", "c")
    good, again = answer("a", first["a"]), answer(sender, first["a"])
    batches = [[good, again]] if together else [[good], [again]]
    entries = [coordinator.handle(batch, 1.0) for batch in batches]
    entries.append(coordinator.handle([answer("b", first["b"]), answer("c", first["c"])], 2.0))
    assert [d.update_id for entry in entries for d in of_type(entry, Discard)] == []
    assert list(of_type(entries[-1], Commit)[0].weights) == ["a/1", "b/1", "c/1"]


@pytest.mark.parametrize("said", [scored(math.nan), scored(math.inf), scored(0.5, samples=-1)])
def test_an_update_is_good_although_the_evaluation_with_it_is_not(said: Evaluation) -> None:
    coordinator, first = begin("a", "b", stop=StopRules(rounds=9, target_accuracy=0.8))
    coordinator.handle([answer("a", first["a"], evaluation=said)], 1.0)
    entry = coordinator.handle([answer("b", first["b"], evaluation=scored(0.7))], 2.0)
    assert of_type(entry, Commit) == [Commit(1, {"a/1": 0.5, "b/1": 0.5})]


def test_a_silo_that_keeps_failing_does_not_end_the_run_while_others_may_come_back() -> None:
    """b has worked, so it may again; without it nothing can be done, and the last failure is a's."""
    coordinator, work = begin("a", "b", barrier=Asp(), stop=StopRules(rounds=9))
    for number in (1, 2):
        failed = WorkFailed(number, "a", f"a/{number}", "no disk")
        work = orders(coordinator.handle([failed, answer("b", work["b"], number)], number))
    entry = coordinator.handle([SiloLost(3.0, "b", "rebooted"), WorkFailed(3.0, "a", "a/3", "no disk")], 3.0)
    assert of_type(entry, Stop) == []
    assert not coordinator.able
    entry = coordinator.handle(joined("b", at_s=4.0), 4.0)
    assert coordinator.able and "b" in orders(entry)


def test_without_hope_that_anybody_comes_back_the_run_is_given_up_at_last() -> None:
    coordinator, work = begin("a", "b", barrier=Asp(), stop=StopRules(rounds=9))
    coordinator.handle([answer("b", work["b"])], 1.0)
    coordinator.handle([SiloLost(1.0, "b", "burnt down")], 1.0)
    for number in range(1, MOST_FAILURES):
        entry = coordinator.handle([WorkFailed(1.0, "a", f"a/{number}", "no disk")], 1.0)
        assert of_type(entry, Stop) == []
    entry = coordinator.handle([WorkFailed(1.0, "a", f"a/{MOST_FAILURES}", "no disk")], 1.0)
    (stop,) = of_type(entry, Stop)
    assert stop.failed and stop.reason.endswith("the last: a: no disk")


def test_an_encrypted_run_is_given_up_when_fewer_silos_work_than_a_sum_needs() -> None:
    """The update of b waits for a sum of two, and a fails every order."""
    coordinator, work = begin("a", "b", barrier=OpenableSums(Bsp(), 2), least=2)
    coordinator.handle([answer("b", work["b"])], 1.0)
    for number in (1, 2, 3):
        assert not coordinator.stopped
        entry = coordinator.handle([WorkFailed(number, "a", f"a/{number}", "no disk")], number)
    (stop,) = of_type(entry, Stop)
    assert stop.failed
    assert stop.reason.startswith("1 of 2 silos failed 3 orders in a row, and an encrypted sum needs 2 silos")
