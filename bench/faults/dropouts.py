"""Masked runs in which a silo is killed between its upload and the reveal, round after round, with real processes.

    python bench/faults/dropouts.py [--kills 10] [--silos 5] [--out bench/results/dropouts.json]

A federation as in `soak`: a server, an agent and a trainer for each silo, TLS, keys. In a round of all silos one
trainer is stopped (SIGSTOP) while it has its order, so the round cannot end. When the server has the updates of all
others, the silo whose update came first is killed (kill -9 of its trainer and its agent). Then the stopped trainer
continues. So the server has the victim's update and asks in vain for its masks, which the restarted victim no longer
knows. FedSync's own supervisors restart the victim; rounds until all silos are back have no kill.

A round is lost if its commit has no effect. The server's checkpoints show the effect and the members of each commit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.common import print_table, write_json
from bench.faults.soak_federation import Federation
from fedsync.cipher.encoding.fields import unpack_named
from fedsync.config.strategy import StrategyConfig
from fedsync.ops.runs import stop_run, submit_run
from fedsync.server import checkpoints
from fedsync.server.run_folder import DONE_FILE, ERROR_FILE

LOOK_S, DEATH_S = 0.05, 10.0
HELD_S = 40.0
"""A trainer that takes no processor time for a minute is taken for hung."""
A_KILL_S = 300.0


@dataclass(slots=True)
class Round:
    """What the server's files say of one round.

    Args:
        base: version that it started from.
        ordered: silos that were sent an order.
        arrived: those whose update came, in order.
        killed: who was.
        committed: updates in the commit, 0 before it.
        opened: silos whose updates are in the sum whose masks came off; None before that is known.
        to_next_s: time from the commit to the next round's first update [s].
    """

    base: int
    ordered: list[str] = field(default_factory=list)
    arrived: list[str] = field(default_factory=list)
    killed: str = ""
    committed: int = 0
    opened: list[str] | None = None
    to_next_s: float = 0.0

    @property
    def lost(self) -> bool:
        return self.opened == []


class Watch:
    """Follows a run by its journal and its checkpoints.

    Args:
        out: folder of the run's files.
        config: of the run.
    """

    def __init__(self, out: Path, config: StrategyConfig) -> None:
        self.out = out
        self._origin = checkpoints.digest(config, None)
        self._read = 0
        self._committed_s = 0.0
        self.rounds: dict[int, Round] = {}

    @property
    def problem(self) -> str:
        """Why the run is over, or nothing."""
        error = self.out / ERROR_FILE
        if error.exists():
            return error.read_text()
        return "the run ended" if (self.out / DONE_FILE).exists() else ""

    def look(self) -> Round | None:
        """The newest round, with all that was written since the last look."""
        journal = self.out / "journal.jsonl"
        if journal.exists():
            with journal.open("rb") as file:
                file.seek(self._read)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._read += len(line)
                    self._take(json.loads(line))
        if any(each.committed and each.opened is None for each in self.rounds.values()):
            self._open()
        return self.rounds[max(self.rounds)] if self.rounds else None

    def settled(self, base: int) -> bool:
        """Whether it is known what came of the round."""
        return base in self.rounds and self.rounds[base].opened is not None

    def whole(self, this: Round, silos: int) -> bool:
        """Whether a round has all silos, after one that had: who was killed is back. No masks have to come off yet."""
        before = self.rounds.get(this.base - 1)
        back = before is None or (not before.killed and len(before.opened or ()) == silos)
        return back and len(set(this.ordered)) == silos

    def _take(self, entry: dict[str, Any]) -> None:
        for event in entry.get("events", ()):
            if event["type"] == "UpdateArrived":
                of = self._round(event["meta"]["base_version"])
                if not of.arrived and of.base:
                    self._round(of.base - 1).to_next_s = entry["at_s"] - self._committed_s
                of.arrived.append(event["meta"]["silo"])
        for action in entry.get("actions", ()):
            if action["type"] == "Commit":
                self._round(action["version"] - 1).committed = len(action["weights"])
                self._committed_s = entry["at_s"]
            elif action["type"] == "Dispatch":
                self._round(action["order"]["base_version"]).ordered.append(action["silo"])

    def _round(self, base: int) -> Round:
        return self.rounds.setdefault(base, Round(base))

    def _open(self) -> None:
        """What the newest checkpoint says of rounds; an old one has left it by then."""
        state = checkpoints._newest_whole(self.out, self._origin).moment.aggregator
        for base, link in enumerate(state["links"], state["first"]):
            if (each := self.rounds.get(base)) is not None:
                each.opened = [name for entry in link.entries for name in unpack_named(entry.reveals, "server")]


Nodes = dict[str, list[psutil.Process]]


def scan(federation: Federation) -> Nodes:
    """Trainer and agent of each silo. It takes a while on a busy machine, so it is done the round before."""
    names = {str(federation.folder / f"s{index}"): name for index, name in enumerate(federation.names)}
    found: Nodes = {name: [] for name in federation.names}
    for word in ("fedsync.silo.session.resident_trainer", "fedsync.silo.agent.agent"):
        for process in federation.processes(word):
            with contextlib.suppress(psutil.NoSuchProcess):
                found[names[process.environ()["FLWR_HOME"]]].append(process)
    return found


def dead(process: psutil.Process) -> bool:
    """Whether it does nothing any more; its parent may not have heard of it yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextmanager
def stopped(trainer: psutil.Process) -> Iterator[None]:
    """It does nothing meanwhile."""
    trainer.suspend()
    try:
        yield
    finally:
        trainer.resume()


def strike(nodes: Nodes, watch: Watch, this: Round, held: str) -> None:
    """Kill the first silo whose update is there, while ``held`` keeps the round from its end; see the module."""
    if not all(len(of) == 2 and all(each.is_running() for each in of) for of in nodes.values()):
        return
    with stopped(nodes[held][0]):
        end_s = time.monotonic() + HELD_S
        while len(this.arrived) < len(this.ordered) - 1 and time.monotonic() < end_s:
            time.sleep(LOOK_S)
            watch.look()
        if set(this.arrived) != set(this.ordered) - {held}:
            return
        victim = this.arrived[0]
        for each in nodes[victim]:
            each.kill()
        end_s = time.monotonic() + DEATH_S
        while not all(map(dead, nodes[victim])) and time.monotonic() < end_s:
            time.sleep(LOOK_S)
        watch.look()
        if all(map(dead, nodes[victim])) and not this.committed:
            this.killed = victim


def run(options: argparse.Namespace, federation: Federation) -> tuple[list[Round], str]:
    """All rounds up to the one after the last kill, and what went wrong, or nothing."""
    settings = ["task={kind: digits}", "cipher={kind: masked}", "barrier={kind: bsp}", "local.batch_size=32"]
    settings += [f"local.steps={options.steps}", "local.threads=1", f"min_silos={options.silos}"]
    config = StrategyConfig.load("bsp", [*settings, "stop.rounds=100000"])
    watch = Watch(submit_run(federation.config, config, federation.folder / "server" / "runs" / "dropouts"), config)
    problem, nodes, struck = "", Nodes(), list[Round]()
    end_s = time.monotonic() + A_KILL_S * (1 + options.kills)
    while not problem and (len(struck) < options.kills or not watch.settled(struck[-1].base + 1)):
        this = watch.look()
        whole = this is not None and len(struck) < options.kills and watch.whole(this, options.silos)
        if this is not None and whole and not nodes:
            nodes = scan(federation)
        elif this is not None and whole and not this.arrived:
            strike(nodes, watch, this, federation.names[len(struck) % options.silos])
            struck += [this] if this.killed else []
            nodes = {}
        problem = watch.problem or ("" if time.monotonic() < end_s else f"{len(struck)} kills, and no time left")
        time.sleep(LOOK_S)
    stop_run(watch.out)
    return [each for _, each in sorted(watch.rounds.items()) if each.opened is not None], problem


def main() -> None:
    """Run it, print the table, write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--silos", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100, help="local steps an order")
    parser.add_argument("--out", type=Path, default=Path("bench/results/dropouts.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="drop-") as folder:
        federation = Federation(Path(folder), options.silos)
        federation.start()
        try:
            rounds, problem = run(options, federation)
        finally:
            federation.stop()
    cells = [
        (each.base, each.killed or "-", each.committed, len(each.opened or ()), each.lost, f"{each.to_next_s:.1f}")
        for each in rounds
    ]
    columns = ("round", "killed", "updates committed", "updates opened", "lost", "commit to next update [s]")
    print_table(f"{options.silos} silos under masks, {problem or 'no problem'}", columns, cells)
    killed = [each for each in rounds if each.killed]
    lost = [each.base for each in rounds if each.lost]
    kept = sum(each.killed in (each.opened or ()) for each in killed)
    print(f"{len(killed)} kills in {len(rounds)} rounds: {len(lost)} rounds lost, {kept} updates of the killed opened")
    write_json(options.out, {"rounds": [asdict(each) for each in rounds], "lost": lost, "problem": problem})
    if problem or lost or kept < options.kills:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
