"""Real silos, of which what talks to the network is killed in the middle of an order: none is interrupted or lost.

One federation and one run for all of it. Who may come to a hub at all is in `tests.attacks.test_hub`.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedsync import replay
from fedsync.config.server_start import ServerStartConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit, Discard, Dispatch
from fedsync.core.events import SiloLost, UpdateArrived, WorkFailed
from fedsync.ops.runs import stop_run, submit_run
from fedsync.server.run_folder import Phase, phase
from fedsync.silo.protocol import IDENTITY, STATE_FOLDER
from fedsync.silo.session.liveness import probe
from tests.e2e.deployed import SMALL, deployed, wait_for, write_files

SILOS = ("berlin", "paris")
LONG = [SMALL, "local={steps: 2000, batch_size: 32, threads: 1}", "stop.rounds=100000", "min_silos=2"]
"""Orders of a second or more, each long enough to be hit in the middle."""

JOINED = "Receiving: query message"
"""What a SuperNode logs of a join."""


@dataclass
class Deployment:
    folder: Path
    out: Path

    def events(self, *kinds: type) -> list[Any]:
        entries = replay(self.out / "journal.jsonl") if (self.out / "journal.jsonl").exists() else ()
        return [each for entry in entries for each in (*entry.events, *entry.actions) if isinstance(each, kinds)]

    def rounds(self) -> int:
        """Commits of both silos' work."""
        return sum(len(each.weights) == len(SILOS) for each in self.events(Commit))

    def in_work(self, silo: str) -> set[str]:
        arrived = {each.meta.update_id for each in self.events(UpdateArrived)}
        return {each.order.update_id for each in self.events(Dispatch) if each.silo == silo} - arrived

    def process(self, who: str, role: str) -> int | None:
        """Process that a supervisor keeps running; None while it waits for its restart."""
        told = json.loads((self.folder / who / "health.json").read_text())["processes"][role]["pid"]
        return None if told is None else int(told)

    def trainers(self) -> dict[str, int]:
        found = {}
        for silo in SILOS:
            (told,) = json.loads((self.folder / silo / "health.json").read_text())["trainers"].values()
            found[silo] = int(told["pid"])
        return found

    def kill_at_work(self, who: str, role: str) -> str:
        """Kill a process while berlin is in an order; returns the order."""
        before = self.in_work("berlin")
        wait_for(lambda: len(self.in_work("berlin") - before) == 1, "no order came")
        (order,) = self.in_work("berlin") - before
        (identity,) = (self.folder / "berlin" / STATE_FOLDER).glob(f"*/{IDENTITY}")
        wait_for(lambda: (seen := probe(identity.parent)) is not None and seen.state == "working", "it does not work")
        process = self.process(who, role)
        assert process is not None
        psutil.Process(process).kill()
        assert order in self.in_work("berlin"), "too late: it had ended"
        return order

    def joins(self) -> dict[str, int]:
        """How often silos were let in."""
        return {silo: (self.folder / silo / "logs" / "supernode.log").read_text().count(JOINED) for silo in SILOS}

    def none_was_lost(self) -> None:
        """Every order so far has been carried out, once, but for those that are in work."""
        assert self.events(SiloLost, WorkFailed, Discard) == []
        arrived = Counter(each.meta.update_id for each in self.events(UpdateArrived))
        committed = Counter(update for each in self.events(Commit) for update in each.weights)
        assert set(arrived.values()) == set(committed.values()) == {1}, "once"
        numbers = sorted(int(each.partition("/")[2]) for each in arrived if each.startswith("berlin/"))
        assert numbers == list(range(1, len(numbers) + 1)), "none in between was given up"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("h")
    write_files(folder, SILOS)
    with deployed(folder, SILOS):
        config = ServerStartConfig.load(folder / "server.yaml")
        out = submit_run(config, StrategyConfig.load("fedavg", LONG), folder / "out")
        made = Deployment(folder, out)
        wait_for(lambda: made.rounds() >= 1, "the run did not begin", 300.0)
        yield made
        stop_run(out)
        wait_for(lambda: phase(out) is Phase.OVER, "the run did not end")


@pytest.mark.full
@pytest.mark.parametrize(
    ("who", "role"), [("berlin", "agent"), ("berlin", "supernode"), ("berlin", "room"), ("server", "superlink")]
)
def test_what_brings_a_silo_its_orders_is_killed_in_the_middle_of_one(who: str, role: str, run: Deployment) -> None:
    """The trainer works on, and what it has done is told, by the process that was there or by the one that comes."""
    rounds, trainers, joins = run.rounds(), run.trainers(), run.joins()
    killed = run.process(who, role)
    order = run.kill_at_work(who, role)
    wait_for(lambda: order not in run.in_work("berlin"), "the order has no answer")
    wait_for(lambda: run.rounds() >= rounds + 3, "the run does not go on")
    wait_for(lambda: run.process(who, role) not in {None, killed}, "its supervisor did not start it again")
    run.none_was_lost()
    assert run.trainers() == trainers, "of which nobody hears"
    assert run.joins() == joins, "nobody had to be let in again"
    assert phase(run.out) is Phase.AT_WORK
