"""Masked runs in which a silo is killed between its upload and the reveal, round after round, with real processes.

    python bench/faults/dropouts.py [--kills 10] [--silos 5] [--out bench/results/dropouts.json]

A federation as in `soak`: a SuperLink, a SuperNode and a trainer for each silo, TLS, keys. Once all updates of a round
but one have come, the first silo is killed (kill -9 of its trainer and its SuperNode): the server has its update,
and it knows nothing of its masks when it comes back. FedSync's own supervisors start it again; rounds until it is back
are without a kill. A round is lost if its commit brings nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.common import print_table, write_json
from bench.faults.soak_federation import Federation
from fedsync.cipher.encoding.catch_up import LinkKind
from fedsync.config.strategy import StrategyConfig
from fedsync.flower import checkpoints
from fedsync.flower.run_folder import DONE_FILE, ERROR_FILE
from fedsync.ops.runs import stop_run, submit_run

BOUND_S = 1200.0


@dataclass(slots=True)
class Round:
    """What the journal says of one round.

    Args:
        base: version that it started from.
        arrived: silos whose update came, in order.
        killed: who was.
        committed: updates in the commit, 0 before it.
        to_next_s: time from the commit to the next round's first update [s].
    """

    base: int
    arrived: list[str] = field(default_factory=list)
    killed: str = ""
    committed: int = 0
    to_next_s: float = 0.0

    def one_is_out(self, silos: int, before: str) -> bool:
        """Whether all updates but one have come, that of the silo killed ``before`` too, and nothing is committed."""
        return len(set(self.arrived)) == silos - 1 and not self.committed and (not before or before in self.arrived)


class Watch:
    """Follows a run's journal.

    Args:
        journal: the file.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._read = 0
        self.rounds: dict[int, Round] = {}
        self._committed_s = 0.0

    def look(self) -> Round | None:
        """The newest round, with all that was written since the last look."""
        if self._journal.exists():
            with self._journal.open("rb") as file:
                file.seek(self._read)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._read += len(line)
                    self._take(json.loads(line))
        return self.rounds[max(self.rounds)] if self.rounds else None

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

    def _round(self, base: int) -> Round:
        return self.rounds.setdefault(base, Round(base))


def kill(federation: Federation, silo: str) -> None:
    """Kill -9 a silo's SuperNode and its trainer; its supervisor starts them again."""
    home = str(federation.folder / f"s{federation.names.index(silo)}")
    for word in ("fedsync.flower.internals.launch supernode", "fedsync.trainer.server"):
        for process in federation.processes(word):
            with contextlib.suppress(psutil.Error):
                if process.environ().get("FLWR_HOME", "").startswith(home):
                    process.kill()


def closed(out: Path, config: StrategyConfig) -> list[int]:
    """Rounds whose commit brought nothing: what the server keeps of each version is in its newest checkpoint."""
    state = checkpoints._newest_whole(out, checkpoints.digest(config, None)).moment.aggregator
    kinds = [link.kind for link in state["links"]]
    return [state["first"] + place for place, kind in enumerate(kinds) if kind is LinkKind.EMPTY]


def run(options: argparse.Namespace, federation: Federation) -> tuple[list[Round], list[int], str]:
    """All rounds up to the last kill; those that were lost; and what went wrong, or nothing."""
    settings = ["task={kind: digits}", "cipher={kind: masked}", "barrier={kind: bsp}", "local.batch_size=32"]
    settings += [f"local.steps={options.steps}", "local.threads=1", f"min_silos={options.silos}"]
    config = StrategyConfig.load("bsp", [*settings, f"stop.rounds={8 * options.kills}"])
    out = submit_run(federation.config, config, federation.folder / "server" / "runs" / "dropouts")
    watch, kills, end_s, problem = Watch(out / "journal.jsonl"), 0, time.monotonic() + BOUND_S, ""
    after, victim = -1, ""
    while not problem and (after < 0 or after + 1 not in watch.rounds or not watch.rounds[after + 1].committed):
        newest = watch.look()
        if (
            newest is not None
            and kills < options.kills
            and not newest.killed
            and newest.one_is_out(options.silos, victim)
        ):
            victim = newest.arrived[0]
            kill(federation, victim)
            watch.look()
            if not newest.committed:  # else the kill came too late to be between
                newest.killed = victim
                kills += 1
                after = newest.base if kills == options.kills else -1
        if (out / ERROR_FILE).exists() or (out / DONE_FILE).exists():
            problem = (out / ERROR_FILE).read_text() if (out / ERROR_FILE).exists() else "the run ended"
        elif time.monotonic() > end_s:
            problem = f"{kills} kills in {BOUND_S:g} s"
        time.sleep(0.02)
    stop_run(out)
    rounds = [each for each in sorted(watch.rounds.values(), key=lambda each: each.base) if each.base <= after]
    return rounds, [base for base in closed(out, config) if base <= after], problem


def main() -> None:
    """Run it, print the table, write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--silos", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600, help="local steps an order")
    parser.add_argument("--out", type=Path, default=Path("bench/results/dropouts.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="drop-") as folder:
        federation = Federation(Path(folder), options.silos)
        federation.start()
        try:
            rounds, lost, problem = run(options, federation)
        finally:
            federation.stop()
    cells = [
        (each.base, each.killed or "-", each.committed, each.base in lost, f"{each.to_next_s:.1f}") for each in rounds
    ]
    columns = ("round", "killed", "updates committed", "lost", "commit to next update [s]")
    print_table(f"{options.silos} silos under masks, {problem or 'no problem'}", columns, cells)
    print(f"{sum(bool(each.killed) for each in rounds)} kills in {len(rounds)} rounds, {len(lost)} rounds lost")
    write_json(options.out, {"rounds": [asdict(each) for each in rounds], "lost": lost, "problem": problem})
    if problem or lost:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
