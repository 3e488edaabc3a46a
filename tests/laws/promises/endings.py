"""A run ends in the very instant in which a rule of its strategy says so."""

from fedsync.core.actions import Commit, Dispatch, Evaluate, Stop, WakeAt
from fedsync.core.events import UpdateArrived, WorkFailed
from tests.laws.law import law
from tests.laws.watched import Run


def end_of(run: Run) -> int:
    return next(n for n, entry in enumerate(run.entries) if any(isinstance(a, Evaluate | Stop) for a in entry.actions))


@law(least=10)
def a_run_fails_only_if_all_silos_do(run: Run) -> int:
    """A run fails once every silo has failed three orders in a row, and not otherwise."""
    [stop] = run.outcome.actions(Stop)
    hopeless = all(number in silo.failing for silo in run.scenario.silos for number in range(1, 100))
    assert stop.failed == hopeless
    if hopeless:
        failed = {silo.name: 0 for silo in run.scenario.silos}
        for number, entry in enumerate(run.entries):
            for event in entry.events:
                if isinstance(event, WorkFailed):
                    failed[event.silo] += 1
            nobody_works = sum(failed.values()) == sum(job.begin_s <= entry.at_s for job in run.outcome.jobs.values())
            done = min(failed.values()) >= 3 and nobody_works
            assert done == (number == len(run.entries) - 1), f"{failed} at {entry.at_s} s"
    return 1


@law(least=3)
def a_run_ends_with_its_last_commit(run: Run) -> int:
    """A run with a limit of rounds begins to end with the commit of its last round."""
    wanted = run.corner.stop.get("rounds")
    commits = len(run.outcome.actions(Commit))
    if wanted is None or run.outcome.actions(Stop)[0].failed:
        return 0
    if run.outcome.closing_s >= run.clock_end_s:
        assert commits < wanted
        return 0
    assert commits == wanted
    assert any(isinstance(action, Commit) and action.version for action in run.entries[end_of(run)].actions)
    return 1


@law(least=5)
def a_run_ends_when_its_time_is_over(run: Run) -> int:
    """A run with a time limit sets a timer for it, and begins to end then, unless another rule was first."""
    seconds = run.corner.stop.get("seconds")
    if seconds is None:
        assert not run.policies.stop.seconds
        return 0
    end_s = run.clock_end_s
    begun = next(entry for entry in run.entries if any(isinstance(a, Dispatch) for a in entry.actions))
    assert any(isinstance(a, WakeAt) and a.at_s == end_s for a in begun.actions)
    assert run.outcome.closing_s <= end_s + run.scenario.poll_s
    others = run.corner.stop.keys() - {"seconds"}
    if not others:
        assert run.outcome.closing_s == end_s
    return not others


@law(least=1)
def a_run_ends_with_the_accuracy_that_was_wanted(run: Run) -> int:
    """A run with a target ends once the silos' newest evaluations reach it, and not before.

    It is reached where any silo finds it, at the earliest, and where all have, at the latest, twice over.
    """
    target = run.corner.stop.get("target_accuracy")
    if target is None:
        return 0
    end, found = end_of(run), list[set[str]]()
    reached: set[str] = set()
    late = 0
    for number, entry in enumerate(run.entries[: end + 1]):
        for event in entry.events:
            if isinstance(event, UpdateArrived) and run.scenario.accuracy(event.report.base_version) >= target - 1e-9:
                reached.add(event.meta.silo)
        if number < end and len(reached) == len(run.scenario.silos):
            late += sum(isinstance(event, UpdateArrived) for event in entry.events)
        found.append(set(reached))
    assert run.outcome.closing_s < run.clock_end_s, "the target was never reached"
    assert found[end], "no silo has found the target"
    assert late <= 2 * len(run.scenario.silos), f"{late} updates since all silos had found it"
    if run.config.barrier.most_ahead == 0:  # all evaluate each version, at the end of its round
        assert len(run.outcome.actions(Commit)) == round(100 * (target - 0.5))
    return 1


@law(least=1)
def a_run_ends_when_patience_is_over(run: Run) -> int:
    """A run ends once so many versions in a row were evaluated as no better, and not before."""
    patience, best = run.corner.stop.get("patience"), run.scenario.best_version
    if patience is None or run.scenario.sealed:
        return 0
    assert run.outcome.closing_s < run.clock_end_s, "patience was endless"
    evaluated = {report.base_version for report in run.outcome.accepted.values()}
    assert len(evaluated) >= patience + 1, "fewer versions were evaluated than patience has"
    since = len({version for version in evaluated if version > best})
    assert since <= (patience + 2) * len(run.scenario.silos) + best, f"{since} versions since the best"
    if run.config.barrier.most_ahead == 0:
        assert len(run.outcome.actions(Commit)) == best + patience
    return 1
