"""What becomes of updates: each is committed once or discarded by name, and none waits for ever."""

from fedsync.core.actions import Commit, Discard
from fedsync.core.events import UpdateArrived
from tests.laws.law import law
from tests.laws.watched import Run

SOON = 2
"""Commits by which an update has its fate, for each silo there is."""


@law(least=200)
def every_update_is_committed_once_or_discarded_by_name(run: Run) -> int:
    """Every order ends in one commit or in a discard with a reason. In the end a driver keeps no update.

    A Discard may be repeated, for each copy that arrives; a Commit may not, and nothing has both before.
    """
    fate: dict[str, str] = {}
    for entry in run.entries:
        for action in entry.actions:
            if isinstance(action, Commit):
                for update_id in action.weights:
                    assert update_id not in fate, f"{update_id} was {fate[update_id]} before it was committed"
                    fate[update_id] = "committed"
            elif isinstance(action, Discard):
                assert action.reason, f"{action.update_id} is discarded without a reason"
                fate.setdefault(action.update_id, "discarded")
    assert fate.keys() == run.outcome.jobs.keys()
    assert run.outcome.payloads == {}, "a driver is left with payloads that nobody named"
    return len(fate)


@law(least=100)
def only_good_reports_are_committed(run: Run) -> int:
    """Every committed update answered the running order, with a possible report."""
    committed = {update_id for commit in run.outcome.actions(Commit) for update_id in commit.weights}
    assert committed <= run.outcome.accepted.keys()
    return len(committed)


@law(least=50)
def an_accepted_update_has_its_fate_soon(run: Run) -> int:
    """An accepted update is committed or discarded before `SOON` x silos further commits were made.

    Counted are updates after which the run made so many commits, so that one left out of all would be noticed.
    """
    soon, commits = SOON * len(run.scenario.silos), 0
    since: list[int] = []
    ends_at = {update_id: run.outcome.jobs[update_id].end_s for update_id in run.outcome.accepted}
    waiting: dict[str, int] = {}
    for entry in run.entries:
        if entry.at_s >= run.outcome.closing_s:
            break
        for event in entry.events:
            if isinstance(event, UpdateArrived) and ends_at.get(event.meta.update_id) == entry.at_s:
                waiting.setdefault(event.meta.update_id, commits)
                since.append(commits)
        for action in entry.actions:
            if isinstance(action, Commit):
                commits += 1
                for update_id in action.weights:
                    waiting.pop(update_id, None)
            elif isinstance(action, Discard):
                waiting.pop(action.update_id, None)
        longest = max((commits - begun for begun in waiting.values()), default=0)
        assert longest <= soon, f"{commits} commits, and since when these wait: {waiting}"
    return sum(commits - begun > soon for begun in since)
