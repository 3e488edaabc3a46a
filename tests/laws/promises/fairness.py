"""Nobody starves, and who need not wait does not."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from fedsync.core.actions import Commit, Dispatch
from fedsync.core.events import SiloJoined, SiloLost, UpdateArrived, WorkFailed
from tests.laws.law import law
from tests.laws.watched import Run

PATIENCE_ORDERS = 5.0
"""Seconds for which an idle silo may have to watch, in orders of the slowest silo."""
PATIENCE_COMMITS = 8
"""Commits that it may have to watch, for each silo there is."""


@dataclass(slots=True)
class Wait:
    """A silo without an order: since when, and how many commits there were before. ``end`` likewise; None to the end"""

    silo: str
    since_s: float
    commits: int
    until_s: float | None = None
    watched: int = 0


def waits(run: Run) -> Iterator[Wait]:
    """Every time that a silo was idle, up to the end of training.

    One that failed too often is set aside in so many words, and counts from the end of its rest. Nobody counts before
    ``min_silos`` have joined.
    """
    open_: dict[str, Wait] = {}
    rests_until_s: dict[str, float] = {}
    here: set[str] = set()
    commits, started = 0, False
    ended = Counter((job.silo, job.end_s) for job in run.outcome.jobs.values() if not job.void)
    for entry in run.entries:
        at_s = entry.at_s
        for name, rest_s in re.findall(r"(\S+) is set aside for (\S+) s after", entry.reason):
            rests_until_s[name] = at_s + float(rest_s)
        for event in entry.events:
            if isinstance(event, SiloJoined):
                here.add(event.silo)
                rests_until_s.pop(event.silo, None)
                open_[event.silo] = Wait(event.silo, at_s, commits)
            elif isinstance(event, SiloLost):
                here.discard(event.silo)
                open_.pop(event.silo, None)
            elif isinstance(event, UpdateArrived | WorkFailed):
                silo = event.meta.silo if isinstance(event, UpdateArrived) else event.silo
                if ended[silo, at_s] and silo in here:
                    open_.setdefault(silo, Wait(silo, at_s, commits))
        started = started or len(here) >= run.corner.min_silos
        for name, wait in open_.items():
            if not started or at_s < rests_until_s.get(name, 0.0):
                wait.since_s, wait.commits = at_s, commits
        if at_s >= run.outcome.closing_s:
            break
        for action in entry.actions:
            if isinstance(action, Commit):
                commits += 1
            elif isinstance(action, Dispatch):
                wait = open_.pop(action.silo)
                wait.until_s, wait.watched = at_s, commits - wait.commits
                yield wait
    for wait in open_.values():
        wait.watched = commits - wait.commits
        yield wait


def longest_order_s(run: Run) -> float:
    """Seconds of the longest order, as it would have been."""
    return max((job.due_s - job.begin_s for job in run.outcome.jobs.values()), default=0.0)


@law(least=20)
def nobody_starves_for_longer_than_orders_take(run: Run) -> int:
    """A silo without an order gets one before `PATIENCE_ORDERS` times the run's longest order have passed.

    Counted are waits that began so long before the end that one without end would be noticed.
    """
    patience_s, exposed = PATIENCE_ORDERS * longest_order_s(run), 0
    for wait in waits(run):
        until_s = run.outcome.closing_s if wait.until_s is None else wait.until_s
        assert until_s - wait.since_s <= patience_s, f"{wait}, patience {patience_s} s"
        exposed += run.outcome.closing_s - wait.since_s > patience_s
    return exposed


@law(least=20)
def nobody_starves_while_others_go_on(run: Run) -> int:
    """A silo without an order gets one before `PATIENCE_COMMITS` x silos commits were made.

    Counted are waits that began so many commits before the end that one without end would be noticed.
    """
    patience = PATIENCE_COMMITS * len(run.scenario.silos)
    found = list(waits(run))
    commits = max((wait.commits + wait.watched for wait in found), default=0)
    for wait in found:
        assert wait.watched <= patience, f"{wait}, patience {patience} commits"
    return sum(commits - wait.commits > patience for wait in found)
