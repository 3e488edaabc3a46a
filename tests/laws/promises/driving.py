"""What a driver relies on: orders that it can carry out, one end, and the same decisions again from what it keeps."""

import pickle
from collections import Counter

from fedsync.common import codec
from fedsync.core.actions import Commit, Dispatch, Evaluate, Rollback, Stop
from fedsync.core.journal import JournalEntry, replay
from tests.laws.law import law
from tests.laws.watched import Run

FEW = 800
"""Entries of a run that is replayed; longer ones show nothing new."""
FROM_JSON = ("chaos", "lying", "sealed", "spare", "at once")
FROM_A_STATE = ("chaos", "spare", "comings", "windows", "target", "patience", "alone", "failing", "sealed")
"""Corners whose runs are replayed in that way; all others as they are. To replay each in each way takes twice as long:
whoever goes on from a state, or from a file, decides everything again too."""


@law(least=10)
def a_driver_can_do_what_it_is_told(run: Run) -> int:
    """Every run ends with one Stop, and a driver can carry out all actions."""
    assert run.outcome.faults == []
    assert isinstance(run.entries[-1].actions[-1], Stop)
    assert len(run.outcome.actions(Stop)) == 1
    assert len(run.outcome.actions(Evaluate)) <= 1
    return 1


@law(least=100)
def a_replay_decides_the_same(run: Run) -> int:
    """From a journal's events, a new coordinator makes the same journal: decisions depend on nothing else."""
    if len(run.entries) > FEW or run.scenario.name in FROM_JSON + FROM_A_STATE:
        return 0
    for old, new in zip(run.entries, replay(run.entries, run.coordinator()), strict=True):
        assert new == old
    return len(run.entries)


@law(least=150)
def a_replay_from_json_decides_the_same(run: Run) -> int:
    """From the events in a journal's file, a new coordinator makes the same journal."""
    if len(run.entries) > FEW or run.scenario.name not in FROM_JSON:
        return 0
    texts = [codec.dumps(entry) for entry in run.entries]
    read = [codec.loads(JournalEntry, text, own=True) for text in texts]
    assert [codec.dumps(entry) for entry in replay(read, run.coordinator())] == texts
    return len(texts)


@law(least=30)
def another_coordinator_goes_on_from_the_state_at_any_time(run: Run) -> int:
    """A coordinator restored from a checkpoint decides the same as the coordinator that wrote it."""
    if len(run.entries) > FEW or run.scenario.name not in FROM_A_STATE:
        return 0
    coordinator, restored = run.coordinator(), 0
    every = max(1, len(run.entries) // 5)
    for number, entry in enumerate(run.entries):
        if number % every == 0:
            saved = pickle.dumps(coordinator.state())
            coordinator = run.coordinator()
            coordinator.restore(pickle.loads(saved))
            restored += 1
        assert coordinator.handle(entry.events, entry.at_s) == entry
    return restored


@law(least=200)
def orders_start_from_the_newest_model_and_count_up(run: Run) -> int:
    """An order starts from the newest model, has a number of its own, and a seed of its own."""
    version, rounds, seeds = 0, Counter[str](), set[int]()
    for entry in run.entries:
        for action in entry.actions:
            if isinstance(action, Commit | Rollback):
                version = action.version
            elif isinstance(action, Dispatch):
                rounds[action.silo] += 1
                assert (action.order.base_version, action.order.round) == (version, rounds[action.silo])
                assert action.order.batch_size >= 1
                assert action.order.max_steps >= 1
                seeds.add(action.order.seed)
    assert len(seeds) == rounds.total(), "each order has its own seed"
    return rounds.total()


@law(least=100)
def versions_go_up_by_one(run: Run) -> int:
    """Every commit and every rollback makes the next version."""
    models = [a for entry in run.entries for a in entry.actions if isinstance(a, Commit | Rollback)]
    assert [model.version for model in models] == list(range(1, len(models) + 1))
    return len(models)
