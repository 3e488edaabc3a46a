"""Real processes are killed in the middle of a run; one federation for all of it, for each takes seconds to start.

The long campaign, with every fault at random moments, is ``make soak``.
"""

import os
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from fedsync import replay
from fedsync.common.errors import RunError
from fedsync.common.locks import held
from fedsync.common.processes import OWNER
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit, Discard
from fedsync.core.events import SiloLost, UpdateArrived
from fedsync.observe.ledger import Ledger
from fedsync.ops import local
from fedsync.ops.local import run_local
from fedsync.ops.runs import RUNS
from fedsync.server.run_folder import RUN_LOCK
from fedsync.silo.session.trainer_client import stop_trainers
from tests.e2e.deployed import SMALL, TRAINER

ROUNDS = 5
# 20 steps of 32 samples at 2000 samples/s: 0.3 s an order, long enough to be hit in the middle of one. The other silo
# takes longer, so that a round has a moment at which one of the two is in.
SILOS = [{"name": "a", "speed": 2000.0}, {"name": "b", "speed": 1200.0}]
QUICK = [
    *(SMALL, f"stop.rounds={ROUNDS}", "local.steps=20", "local.batch_size=32", "cipher={kind: bfv}"),
    # What a silo remembers of steps is in its file, and silos whose moments differ do not go on together.
    "server_optimizer={kind: fedadam, rate: 0.02}",
]


def running(word: str) -> list[psutil.Process]:
    """Processes of the run that have this in their command lines, also those whose parents are gone."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if word in " ".join(process.cmdline()) and process.environ().get(OWNER) == str(os.getpid()):
                found.append(process)
    return found


class _Killer:
    """Kills after the first round both fork servers and a trainer, and after the third the ServerApp.

    Each time once something more is in the journal. Before that the checkpoint may not be written.
    """

    def __init__(self) -> None:
        self._seen = 0
        self._due = {1: self._kill_what_forks, 3: self._kill_the_server}
        self.forked: list[psutil.Process] = []
        self.later: set[psutil.Process] = set()

    def follow(self, ledger: Ledger) -> None:
        before, self._seen = self._seen, len(ledger.rounds)
        due = min(self._due, default=ROUNDS)
        if due > 1:
            self.later.update(running(TRAINER))
        if before == self._seen and before >= due:
            self._due.pop(due)()

    def _kill_what_forks(self) -> None:
        self.forked = running(TRAINER)
        assert len(self.forked) == len(running("launch supernode")) == len(SILOS)
        servers = running("fedsync.common.fork_server")
        assert len(servers) == 2 and {each.ppid() for each in self.forked} <= {each.pid for each in servers}
        for each in (*servers, self.forked[0]):
            each.kill()

    def _kill_the_server(self) -> None:
        (server,) = running("flwr-serverapp")
        server.kill()


@pytest.mark.slow
def test_a_run_survives_the_death_of_what_forks_its_silos_of_a_trainer_and_of_its_server(tmp_path: Path) -> None:
    config = StrategyConfig.load("fedavg", QUICK)
    cluster = ClusterConfig.model_validate({"silos": SILOS})
    killer = _Killer()
    with pytest.raises(RunError, match="the ServerApp died"):
        run_local(config, cluster, tmp_path, listeners=[killer])
    assert killer.later - set(killer.forked), "no fork server, so a trainer by itself"
    assert not any(each.is_running() for each in killer.forked)
    assert not (tmp_path / "summary.json").exists()
    trainers = sorted(path.parent.name for path in (tmp_path / "state").glob("*/identity.json"))
    assert len(trainers) == 2
    seen: list[list[str]] = []

    class Watch:
        def follow(self, ledger: Ledger) -> None:
            seen.append(sorted(path.parent.name for path in (tmp_path / "state").glob("*/identity.json")))

    summary = run_local(config, cluster, tmp_path, listeners=[Watch()], resume=True)
    assert (summary["rounds"], summary["stopped_by"]) == (ROUNDS, f"{ROUNDS} rounds done")
    assert seen[-1] == trainers, "the silos went on with what they kept"
    assert not (tmp_path / "state").exists() and not (tmp_path / "checkpoints").exists(), "nothing is left behind"
    assert torch.load(tmp_path / "model.pt", weights_only=True)
    entries = replay(tmp_path / "journal.jsonl")
    events = [event for entry in entries for event in entry.events]
    actions = [action for entry in entries for action in entry.actions]
    commits = [action for action in actions if isinstance(action, Commit)]
    assert [commit.version for commit in commits] == list(range(1, ROUNDS + 2)), "and what scores the last"
    used = [update_id for commit in commits for update_id in commit.weights]
    dropped = {action.update_id for action in actions if isinstance(action, Discard)}
    arrived = {event.meta.update_id for event in events if isinstance(event, UpdateArrived)}
    assert len(used) == len(set(used)), "no update counts twice"
    assert arrived == set(used) | (arrived & dropped), "no update that arrived is lost"
    assert {event.silo for event in events if isinstance(event, SiloLost)} == {"a", "b"}


@pytest.mark.slow
def test_a_run_that_is_stopped_leaves_no_process_and_commits_nothing_of_the_silos_that_are_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silos that end before the server seem lost to it, and rounds are over once all others are in."""
    sets = [SMALL, "stop.rounds=50", "local.steps=20", "local.batch_size=32"]
    slow = [{"name": "a", "speed": 2000.0}, {"name": "b", "speed": 150.0}]
    at_work: list[bool] = []
    family: list[psutil.Process] = []

    class Stop:
        """Ctrl-C once the fast silo is in for the third time, and the slow one is at work."""

        def follow(self, ledger: Ledger) -> None:
            if len(ledger.rounds) == 2 and ledger.silos["a"].samples > 2 * 640:
                family.extend(psutil.Process().children(recursive=True))
                raise KeyboardInterrupt

    def stop(states: Path) -> None:
        at_work.append(held(states.parent / RUNS / "local" / RUN_LOCK))
        stop_trainers(states)

    monkeypatch.setattr(local, "stop_trainers", stop)
    cluster = ClusterConfig.model_validate({"silos": slow})
    with pytest.raises(KeyboardInterrupt):
        run_local(StrategyConfig.load("fedavg", sets), cluster, tmp_path, listeners=[Stop()])
    assert at_work == [False], "the server goes first"
    assert len(family) >= 7 and not psutil.wait_procs(family, timeout=10)[1]
    entries = replay(tmp_path / "journal.jsonl")
    commits = [action for entry in entries for action in entry.actions if isinstance(action, Commit)]
    assert [len(commit.weights) for commit in commits] == [2, 2]
    told = [record.message for record in caplog.records]
    assert told[-2:] == ["stopping", f"it can go on: fedsync run --resume {tmp_path}"]
