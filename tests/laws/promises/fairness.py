"""Nobody starves, and who need not wait does not."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit, Dispatch
from fedsync.core.events import SiloJoined, SiloLost, UpdateArrived, WorkFailed
from fedsync.core.state import MAX_FAILURES
from fedsync.policies.barrier.kinds.bulk import Bsp
from tests.laws.law import law
from tests.laws.watched import Run

PATIENCE_ORDERS = {True: 1.5, False: 3.0}
"""Seconds for which an idle silo may have to watch, in orders of the slowest silo: where the run is quiet, and else."""
PATIENCE_COMMITS = 4
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
    left: Counter[str] = Counter()
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
                left[event.silo] = 0
            elif isinstance(event, SiloLost):
                here.discard(event.silo)
                open_.pop(event.silo, None)
            elif isinstance(event, UpdateArrived | WorkFailed):
                silo = event.meta.silo if isinstance(event, UpdateArrived) else event.silo
                if ended[silo, at_s] and silo in here:
                    left[silo] -= ended[silo, at_s]
                    ended[silo, at_s] = 0
                if left[silo] <= 0 and silo in here:
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
                left[action.silo] += 1
                if (wait := open_.pop(action.silo, None)) is not None:
                    wait.until_s, wait.watched = at_s, commits - wait.commits
                    yield wait
    for wait in open_.values():
        wait.watched = commits - wait.commits
        yield wait


def longest_order_s(run: Run) -> float:
    """Seconds of the longest order, as it would have been."""
    return max((job.due_s - job.begin_s for job in run.outcome.jobs.values()), default=0.0)


def lots_decide(config: StrategyConfig) -> str:
    return "it `draws`: lots decide who takes part in a round, and may pass one by for long" * config.barrier.draws


@law(least=20, unless=lots_decide)
def nobody_starves_for_longer_than_orders_take(run: Run) -> int:
    """A silo without an order gets one before `PATIENCE_ORDERS` times the longest order have passed.

    Counted are waits that began so long before the end that one without end would be noticed.
    """
    orders = PATIENCE_ORDERS[run.scenario.quiet] + MAX_FAILURES * repeats(run.config)
    patience_s, exposed = orders * longest_order_s(run), 0
    for wait in waits(run):
        until_s = run.outcome.closing_s if wait.until_s is None else wait.until_s
        assert until_s - wait.since_s <= patience_s, f"{wait}, patience {patience_s} s"
        exposed += run.outcome.closing_s - wait.since_s > patience_s
    return exposed


@law(least=20, unless=lots_decide)
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


def repeats(config: StrategyConfig) -> bool:
    """Whether a round waits for a silo whose order failed, and gives it another: a failed one is none of the round."""
    barrier = config.barrier.innermost
    return isinstance(barrier, Bsp) and barrier.complete


def nothing_bounds_it(config: StrategyConfig) -> str:
    most = config.barrier.most_ahead
    return f"its `most_ahead` is {most}: nothing bounds how far a silo may be ahead" if most in (None, inf) else ""


def other_things_decide(config: StrategyConfig) -> str:
    most = config.barrier.most_ahead
    return "its `most_ahead` is None: other things than orders decide who goes on" if most is None else ""


def ahead(run: Run) -> Iterator[tuple[dict[str, int], set[str], set[str], set[str]]]:
    """After each entry: orders that each silo has ended, who began one, who is idle, and of these whose order failed.

    Empty where silos come, go or rest: what they are ahead of is not so easily said then.
    """
    if any(silo.here != (0.0,) or silo.restarts for silo in run.scenario.silos):
        return
    ended = dict.fromkeys((silo.name for silo in run.scenario.silos), 0)
    idle, failures = set(ended), set[str]()
    for entry in run.entries:
        if entry.at_s >= run.outcome.closing_s or "set aside" in entry.reason:
            return
        for event in entry.events:
            if isinstance(event, UpdateArrived | WorkFailed):
                update_id = event.meta.update_id if isinstance(event, UpdateArrived) else event.update_id
                job = run.outcome.jobs.get(update_id)
                if job is not None and job.end_s == entry.at_s and job.silo not in idle:
                    ended[job.silo] += update_id in run.outcome.accepted or not repeats(run.config)
                    idle.add(job.silo)
                    (failures.discard if update_id in run.outcome.accepted else failures.add)(job.silo)
        begun = {action.silo for action in entry.actions if isinstance(action, Dispatch)}
        idle -= begun
        yield ended, begun, idle, failures & idle


@law(least=20, unless=nothing_bounds_it)
def nobody_runs_further_ahead_than_the_barrier_allows(run: Run) -> int:
    """A silo that begins an order has ended at most `most_ahead` more orders than the slowest silo.

    Counted are beginnings of silos that are ahead by just so many.
    """
    most, exposed = run.config.barrier.most_ahead, 0
    for ended, begun, _, _ in ahead(run):
        for name in begun:
            lead = ended[name] - min(ended.values())
            assert lead <= most, f"{name} begins, {lead} orders ahead"
            exposed += lead == most
    return exposed


@law(least=100, unless=other_things_decide)
def who_may_go_on_goes_on_at_once(run: Run) -> int:
    """A silo at most `most_ahead` orders ahead of the slowest silo has an order, unless its last order failed."""
    most, exposed = run.config.barrier.most_ahead, 0
    for ended, begun, idle, failures in ahead(run):
        slowest = min(ended.values())
        for name in idle - failures:
            assert ended[name] - slowest > most, f"{name} waits, {ended[name] - slowest} orders ahead"
        exposed += len(begun)
    return exposed


@law(least=10)
def nobody_works_before_enough_are_here(run: Run) -> int:
    """No order is given before ``min_silos`` silos have joined. Then orders are given at once."""
    here: set[str] = set()
    for entry in run.entries:
        for event in entry.events:
            if isinstance(event, SiloJoined):
                here.add(event.silo)
            elif isinstance(event, SiloLost):
                here.discard(event.silo)
        begun = any(isinstance(action, Dispatch) for action in entry.actions)
        assert begun == (len(here) >= run.corner.min_silos), f"{len(here)} are here at {entry.at_s} s"
        if begun:
            return 1
    return 0


@law(least=3)
def who_keeps_failing_rests(run: Run) -> int:
    """A silo that failed three orders in a row gets no order for 10 s, after the fourth for 20 s, and so on.

    Joining again ends the rest. Counted are rests.
    """
    failed: Counter[str] = Counter()
    until_s: dict[str, float] = {}
    rests = 0
    for entry in run.entries:
        for event in entry.events:
            if isinstance(event, SiloJoined | SiloLost):
                failed.pop(event.silo, None)
                until_s.pop(event.silo, None)
            elif isinstance(event, UpdateArrived | WorkFailed):
                update_id = event.meta.update_id if isinstance(event, UpdateArrived) else event.update_id
                job = run.outcome.jobs.get(update_id)
                if job is None or job.void or job.end_s != entry.at_s:
                    continue
                if update_id in run.outcome.accepted:
                    failed.pop(job.silo, None)
                elif job.serial in run.scenario.silo(job.silo).failing and isinstance(event, WorkFailed):
                    failed[job.silo] += 1
                    if failed[job.silo] >= 3:
                        rests += 1
                        until_s[job.silo] = entry.at_s + 10.0 * 2 ** (failed[job.silo] - 3)
        for action in entry.actions:
            if isinstance(action, Dispatch):
                assert entry.at_s >= until_s.get(action.silo, 0.0) - 1e-9, f"{action.silo} was to rest"
    return rests
