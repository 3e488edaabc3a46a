"""The coordinator does what policies say, no more and no less, without alarms at no end and without growing."""

from collections import Counter

from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit, Discard, Dispatch, HaltEarly, Probe, Rollback, Savepoint, WakeAt
from fedsync.core.events import TimerFired, UpdateArrived
from tests.laws.law import law
from tests.laws.watched import Run

IDLE_ALARMS = 3
"""Entries that only an alarm makes, for each other entry."""
EARLY, LATE = 128, 512
"""Entries of a run after which its state is compared."""
GROWTH = 3000
"""Bytes by which a part of the state may grow between the two: counters get more digits."""


@law(least=100)
def what_the_barrier_says_is_done(run: Run) -> int:
    """Every journal entry has the commits, discards, orders, early stops and probes of the barrier's verdicts."""
    exposed = 0
    halted: dict[str, str] = {}
    for entry, decisions in zip(run.entries, run.decisions, strict=True):
        if not decisions or entry.at_s >= run.outcome.closing_s:
            continue
        verdicts = [decision.verdict for decision in decisions]
        actions = entry.actions
        assert [sorted(v.commit) for v in verdicts if v.commit] == [
            list(action.weights) for action in actions if isinstance(action, Commit)
        ]
        named = {action.update_id for action in actions if isinstance(action, Discard)}
        assert {update_id for v in verdicts for update_id in v.discard} <= named
        assert sum(v.rollback for v in verdicts) == sum(isinstance(action, Rollback) for action in actions)
        assert sum(v.savepoint for v in verdicts) == sum(isinstance(action, Savepoint) for action in actions)
        orders = [(action.silo, action.order) for action in actions if isinstance(action, Dispatch)]
        chosen = [name for v in verdicts for name in v.release]
        assert [name for name, _ in orders] == chosen, "who is released gets work"
        given = iter(orders)
        for verdict, decision in zip(verdicts, decisions, strict=True):
            for name in verdict.release:
                order = next(given)[1]
                assert (order.budget_s, order.overrun) == (verdict.budget_s.get(name), verdict.overrun)
                assert decision.work is not None
                work = decision.work[name]
                assert order.max_steps == verdict.steps.get(name, work.steps)
                if run.policies.sizing.adaptive is None:
                    assert (order.batch_size, order.learning_rate) == (work.batch_size, work.learning_rate)
        halts = {action.silo: action.update_id for action in actions if isinstance(action, HaltEarly)}
        assert halts.keys() <= {name for v in verdicts for name in v.stop_now}
        for name, update_id in halts.items():
            assert halted.get(name) != update_id, f"{update_id} is told to stop twice"
            halted[name] = update_id
        missed = {name for v in verdicts for name in v.stop_now} - halts.keys()
        assert all(name in halted for name in missed)
        probes = [action.silo for action in actions if isinstance(action, Probe)]
        assert probes == [name for v in verdicts for name in v.probe]
        exposed += bool(orders or named)
    return exposed


@law(least=1000)
def alarms_go_off_now_and_then(run: Run) -> int:
    """A timer is set for a later time, once for each time. A barrier is asked once more than it commits.

    Entries that nothing but an alarm makes are few: `IDLE_ALARMS` for each other one, and those in which a barrier asks
    how far silos are.
    """
    wakes: Counter[float] = Counter()
    idle = 0
    for entry, decisions in zip(run.entries, run.decisions, strict=True):
        commits = sum(isinstance(action, Commit) for action in entry.actions)
        assert len(decisions) <= commits + 1, f"asked {len(decisions)} times at {entry.at_s} s"
        for action in entry.actions:
            if isinstance(action, WakeAt):
                assert action.at_s > entry.at_s, f"at {entry.at_s} s an alarm is set for {action.at_s} s"
                wakes[action.at_s] += 1
        only_alarms = all(isinstance(event, TimerFired) for event in entry.events)
        idle += only_alarms and not any(isinstance(action, Probe) for action in entry.actions)
    again = [at_s for at_s, count in wakes.items() if count > 1 and at_s != run.clock_end_s]
    assert not again, f"alarms are set again for {again[:3]}"
    assert idle <= IDLE_ALARMS * (len(run.entries) - idle), f"{idle} of {len(run.entries)} entries are alarms only"
    return len(run.entries)


@law(least=1)
def state_does_not_grow(run: Run) -> int:
    """No part of a checkpoint grows with the length of a run.

    Compared are the state after `EARLY` entries and after `LATE` and more, but for what predictors that learn remember:
    their memory is a setting, and larger than these runs.
    """
    early = next((size for size in run.sizes if size.entries >= EARLY), None)
    if early is None or run.sizes[-1].entries < LATE or run.sizes[-1].silos != early.silos:
        return 0
    grown = {
        name: (early.bytes[name], size)
        for name, size in run.sizes[-1].bytes.items()
        if size > early.bytes[name] + GROWTH and not (name == "forecasts.predictors" and run.policies.predictor.learns)
    }
    assert not grown, f"bytes after {early.entries} and {run.sizes[-1].entries} entries: {grown}"
    return 1


def mixes(config: StrategyConfig) -> str:
    return (
        "its `mixes_rounds` says that commits may hold updates of several versions"
        if config.barrier.mixes_rounds
        else ""
    )


@law(least=100, unless=mixes)
def a_commit_holds_one_round(run: Run) -> int:
    """All updates of a commit started from the version before it, as masks and secure sums need."""
    bases: dict[str, int] = {}
    commits = 0
    version = 0
    for entry in run.entries:
        for event in entry.events:
            if isinstance(event, UpdateArrived):
                bases.setdefault(event.meta.update_id, event.meta.base_version)
        for action in entry.actions:
            if isinstance(action, Rollback):
                version = action.version
            elif isinstance(action, Commit):
                assert {bases[update_id] for update_id in action.weights} == {version}
                version = action.version
                commits += 1
    return commits


def holds_what_is_there(config: StrategyConfig) -> str:
    return "" if config.barrier.innermost.most_updates else "its `most_updates` is None: it commits what is there"


@law(least=50, unless=holds_what_is_there)
def a_commit_holds_as_many_as_it_says(run: Run) -> int:
    """A commit holds exactly `most_updates` updates where the barrier says so."""
    commits = run.outcome.actions(Commit)
    for commit in commits:
        assert len(commit.weights) == run.config.barrier.innermost.most_updates
    return len(commits)


@law(least=2)
def what_does_not_fit_is_not_asked_for_again(run: Run) -> int:
    """A silo that has reported the largest batch that fits gets no larger batch."""
    caps: dict[str, int] = {}
    exposed = 0
    for entry in run.entries:
        for event in entry.events:
            if (
                isinstance(event, UpdateArrived)
                and event.meta.update_id in run.outcome.accepted
                and event.report.batch_cap
            ):
                caps[event.meta.silo] = event.report.batch_cap
        for action in entry.actions:
            if isinstance(action, Dispatch) and action.silo in caps:
                assert action.order.batch_size <= caps[action.silo]
                exposed += 1
    return exposed
