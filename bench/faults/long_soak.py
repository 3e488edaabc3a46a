"""One long encrypted run of a real federation under repeated faults: memory, disk and accounts.

A fault of the campaign's list (`bench/faults/soak.py`, without the lies) strikes at a random moment of a random round,
about every ``--every`` rounds; all faults are equally frequent. FedSync restarts what ends. Only a full disk at the
server ends the run with a reason, and then the run is resumed by hand. Rounds do as little work as possible, because
the number of rounds counts. At the end:

- *Accounts*: as in the campaign (versions without a gap, no update in two, none lost without a record, a journal that
  replays to the same decisions, the last version at the silos). The run's figures must be exact: ``summary.json``
  equals unbounded accounts of the journal, ``rounds.jsonl`` has each round once, and rounds, orders, samples and
  bytes equal plain sums over the journal.
- *Memory* of each process by its age, and *bytes on the disk*; see `bench/faults/soak_samples.py`.

Results are written continuously. ``--minutes`` ends the run by then, like an operator: ``fedsync steer stop-rule``.
``--read FILE`` prints the tables of such a file.

    python bench/faults/long_soak.py [--rounds 2000] [--every 40] [--minutes 80] [--out bench/results/long-soak.json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.common import markdown_table, print_table, write_json
from bench.faults.soak import FAULTS, Run, account, code
from bench.faults.soak_federation import Federation
from bench.faults.soak_samples import Sample, Sampler, disk_rows, memory_rows
from fedsync import replay
from fedsync.common.errors import FedSyncError
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Dispatch
from fedsync.core.events import UpdateArrived
from fedsync.core.operator.operator_commands import ChangeStop
from fedsync.observe.replay import read_ledger
from fedsync.ops.runs import resume_run, submit_run
from fedsync.server.operator_requests import ask
from fedsync.server.run_folder import DONE_FILE, ERROR_FILE

TASK = "{kind: mlp, data: {kind: blobs, samples: 240}, hidden: [8]}"
LIGHT = ["local.steps=1", "local.batch_size=8", "local.threads=1"]
FULL = "disk full at the server"
LOOK_S, PATIENCE_S = 0.2, 120.0
"""How often the run is looked at [s], and how long what a fault strikes may be on its way back from the one before."""

WARM = 20

EDGE = 20
"""Rounds at both ends in which nothing breaks, at most."""


@dataclass(slots=True)
class Strike:
    """One fault.

    Args:
        fault: its name.
        commit: after which it is to strike.
        struck: commits when it did; None where it has not.
        at_s: seconds since the run was submitted.
        longest_s: longest time between two commits from then to the next fault.
    """

    fault: str
    commit: int
    struck: int | None = None
    at_s: float = 0.0
    longest_s: float = 0.0


def strikes(rounds: int, every: int, seed: int, names: list[str]) -> list[Strike]:
    """When what breaks: gaps of half to three halves of ``every``; all faults in a random order, again and again.

    With ``every`` 0 nothing does.
    """
    if not every:
        return []
    rng, made, bag = random.Random(seed), [], []
    commit = edge = min(EDGE, rounds // 6)
    while commit < rounds - edge:
        bag = bag or rng.sample(names, len(names))
        made.append(Strike(bag.pop(), commit))
        commit += rng.randint(max(every // 2, 1), every + every // 2)
    return made


@dataclass(slots=True)
class Long:
    """The run, followed to its end.

    Args:
        run: as the campaign has it.
        options: of the command line.
        strikes: what is to break.
        samples: looks so far.
        begun_s: time of day when it was submitted.
        owed: how often it may end for a full disk, and be resumed by hand.
        problem: what went wrong, or nothing.
        console: where it says how far it is.
    """

    run: Run
    options: argparse.Namespace
    strikes: list[Strike]
    samples: Sampler
    begun_s: float = field(default_factory=time.time)
    owed: int = 0
    problem: str = ""
    console: Console = field(default_factory=lambda: Console(stderr=True, highlight=False))
    _sampled: int = -1
    _stopped: bool = False
    _loads: list[float] = field(default_factory=list)

    def see_through(self) -> None:
        """Follow it to its end, and break what is to break."""
        rng = random.Random(self.options.seed)
        for strike in self.strikes:
            if not self._until(strike.commit):
                return
            time.sleep(rng.uniform(0.0, 1.0))
            self._strike(strike, rng)
        self._until(None)

    def _strike(self, strike: Strike, rng: random.Random) -> None:
        """Break something; what it strikes may be on its way back still."""
        self.run.longest_s = 0.0
        end_s = time.monotonic() + PATIENCE_S
        while strike.struck is None:
            try:
                FAULTS[strike.fault](self.run, rng)
            except (IndexError, ValueError, OSError) as error:  # there is none of its processes
                if time.monotonic() > end_s:
                    self.console.print(f"{strike.fault}: nothing to strike: {error!r}", soft_wrap=True)
                    return
                time.sleep(LOOK_S)
            else:
                strike.struck, strike.at_s = self.run.look(), time.time() - self.begun_s
                self.console.print(f"{strike.at_s:.0f} s, after commit {strike.struck}: {strike.fault}", soft_wrap=True)
        self.owed += strike.fault == FULL

    def _until(self, commits: int | None) -> bool:
        """Follow it until it has come so far; False where it is over, or something went wrong."""
        done = self.run.out / DONE_FILE
        while not (self.problem or done.exists()):
            if commits is not None and self.run.look() >= commits:
                return True
            self.step()
            time.sleep(LOOK_S)
        return False

    def step(self) -> None:
        """One look."""
        commits = self.run.look()
        struck = [strike for strike in self.strikes if strike.struck is not None]
        if struck:
            struck[-1].longest_s = self.run.longest_s
        if commits >= self._sampled + self.options.sample:
            self._sampled = commits - commits % self.options.sample
            self.sample(commits)
        if (self.run.out / ERROR_FILE).exists():
            self._by_hand()
        self.problem = self.problem or self.run.stuck()
        minutes = self.options.minutes
        if minutes and not self._stopped and time.time() - self.begun_s > 60 * minutes:
            with contextlib.suppress(FedSyncError):  # its server may be on its way back
                ask(self.run.out, ChangeStop(rounds=commits + 5))
                self._stopped = True

    def _by_hand(self) -> None:
        """Resume a run that ended with a reason, if its disk was full."""
        if not self.owed:
            self.problem = (self.run.out / ERROR_FILE).read_text()
            return
        with contextlib.suppress(FedSyncError):  # the SuperLink may be on its way back
            resume_run(self.run.federation.config, self.run.out)
            self.owed -= 1
            self.run.by_hand += 1

    def sample(self, commits: int) -> None:
        """Look at memory and disk, and write what there is."""
        self.samples.look(commits, time.time())
        self._loads.append(os.getloadavg()[0])
        if self._sampled % (10 * self.options.sample) == 0:
            self.console.print(f"{commits} rounds after {time.time() - self.begun_s:.0f} s")
        write_json(self.options.out, self.document())

    def reckon(self, sealed: bool) -> str:
        """What does not add up when it is over, or nothing; ``sealed`` figures are scored by one version more."""
        out, commits = self.run.out, self.run.look()
        wanted = self.options.rounds + sealed
        if commits != wanted and not self._stopped:
            return f"{commits} versions in the place of {wanted}"
        return account(self.run, commits, lied=False) or books(out, commits - sealed)

    def document(self) -> dict[str, Any]:
        """All that is known so far."""
        loads = sorted(self._loads)
        return {
            "code": code(),
            "rounds": self.run.look(),
            "hours": (time.time() - self.begun_s) / 3600,
            "load": [loads[0], loads[len(loads) // 2], loads[-1]] if loads else [],
            "resumed": self.run.federation.resumed,
            "by_hand": self.run.by_hand,
            "over": False,
            "problem": self.problem,
            "warm": WARM if self.options.warm is None else self.options.warm,
            "strikes": [asdict(strike) for strike in self.strikes],
            "disk": self.samples.disk,
            "memory": [asdict(sample) for sample in self.samples.memory],
        }


def books(out: Path, rounds: int) -> str:
    """What is not exact in the figures of a run of so many rounds that is over, or nothing."""
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    ledger = read_ledger(out / "journal.jsonl")
    for name, value in ledger.summary().items():
        if name in ("best", "last", "notes"):  # the first two have digests of files besides, notes are the newest
            continue
        if json.loads(json.dumps(value)) != summary[name]:
            return f"{name}: the summary has {summary[name]}, the journal {value}"
    entries = replay(out / "journal.jsonl")
    lines = (out / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
    if [json.loads(line)["round"] for line in lines] != list(range(1, rounds + 1)):
        return "rounds.jsonl does not have each round once"
    dispatched = [action for entry in entries for action in entry.actions if isinstance(action, Dispatch)]
    ordered = {each.order.update_id for each in dispatched if not each.order.scores_only}
    arrived = [event for entry in entries for event in entry.events if isinstance(event, UpdateArrived)]
    trained = [event for event in arrived if event.meta.update_id in ordered]
    plain = {
        "rounds": rounds,
        "bytes_up": sum(event.meta.nbytes for event in arrived),
        "samples": sum(event.report.samples for event in trained),
    }
    for name, value in plain.items():
        if summary[name] != value:
            return f"{name}: the summary has {summary[name]}, a plain sum over the journal {value}"
    orders = Counter(event.meta.silo for event in trained)
    told = {silo["name"]: silo["orders"] for silo in summary["silos"]}
    return "" if told == orders else f"orders: the summary has {told}, the journal {dict(orders)}"


def follow(options: argparse.Namespace) -> dict[str, Any]:
    """The whole of it; returns what is written."""
    out = Path("server/runs/long")
    settings = [f"task={TASK}", *LIGHT, f"stop.rounds={options.rounds}", f"min_silos={options.silos}"]
    config = StrategyConfig.load("fedavg", [*settings, "cipher={kind: bfv}", *options.set])
    names = [name for name in FAULTS if any(part in name for part in options.faults)]
    plan = strikes(options.rounds, options.every, options.seed, names)
    with _folder(options.keep) as folder:
        federation = Federation(folder, options.silos)
        federation.start()
        try:
            out = submit_run(federation.config, config, folder / out)
            run = Run(federation, out, time.time())
            long = Long(run, options, plan, Sampler(federation, out))
            with _told(long):
                long.see_through()
            if not long.problem:
                long.problem = long.reckon(config.policies().tally > 0)
            document = long.document() | {"over": not long.problem}
        finally:
            federation.stop()
    write_json(options.out, document)
    return document


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """Where the federation's files are: in a temporary folder, or where they stay."""
    if keep is not None:
        keep.mkdir(parents=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        yield Path(name)


@contextlib.contextmanager
def _told(long: Long) -> Iterator[None]:
    """Ctrl-C ends it with what there is."""
    try:
        yield
    except KeyboardInterrupt:
        long.problem = "stopped early"


def show(document: dict[str, Any]) -> None:
    """Print the tables."""
    struck = [Strike(**each) for each in document["strikes"]]
    struck = [each for each in struck if each.struck is not None]
    load = "load {:.1f}, {:.1f}, {:.1f} (least, median, most)".format(*document["load"])
    state = document["problem"] or ("all accounts in order" if document["over"] else "going on")
    print(f"{document['rounds']} rounds in {document['hours']:.2f} h at {document['code']}, {load}: {state}")
    print(f"{len(struck)} faults, resumed {document['resumed']} times, {document['by_hand']} by hand")
    rows: list[list[object]] = []
    for fault in dict.fromkeys(each.fault for each in struck):
        of = [each.longest_s for each in struck if each.fault == fault]
        rows.append([fault, len(of), f"{sorted(of)[len(of) // 2]:.0f}", f"{max(of):.0f}"])
    _table("Longest round after a fault", ("fault", "times", "median [s]", "most [s]"), rows)
    samples, warm = [Sample(**each) for each in document["memory"]], document["warm"]
    rows = [
        [each["process"], each["lives"], each["oldest"], *(f"{each[name]:.1f}" for name in MEMORY[3:])]
        for each in memory_rows(samples, warm)
    ]
    _table(f"Memory [MiB], from {warm} rounds of age on", MEMORY, rows)
    rows = [
        [
            each["files"],
            *(f"{float(each[name]) / 2**20:.2f}" for name in ("fifth", "half", "end")),
            f"{each['a_commit']:.0f}",
        ]
        for each in disk_rows(document["disk"])
    ]
    columns = ("files", "after a fifth [MiB]", "half [MiB]", "end [MiB]", "bytes a round, 2nd half")
    _table("On the disk", columns, rows)


MEMORY = ("process", "lives", "oldest", "rss", "rss_end", "most", "rss_slope", "uss_slope", "first", "last")


def _table(title: str, columns: tuple[str, ...], rows: list[list[object]]) -> None:
    print_table(title, columns, rows)
    print(markdown_table(columns, rows))


def main() -> None:
    """Run it, or print what a file says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--every", type=int, default=40, help="rounds between two faults, about; 0 for none")
    parser.add_argument("--silos", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=0.0, help="end the run after so long; 0 does not")
    parser.add_argument("--sample", type=int, default=10, help="rounds between two looks at memory and disk")
    parser.add_argument("--warm", type=int, help=f"rounds after which a process's memory is compared [{WARM}]")
    parser.add_argument("--faults", nargs="*", default=[""], help="parts of their names; all by default")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override in the strategy")
    parser.add_argument("--keep", type=Path, help="new folder with a short name for the federation's files, to stay")
    parser.add_argument(
        "--read", type=Path, metavar="FILE", help="print the tables of such a file, and do nothing else"
    )
    parser.add_argument("--out", type=Path, default=Path("bench/results/long-soak.json"))
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell has its background jobs ignore the first
        signal.signal(number, signal.default_int_handler)
    if options.read:
        document = json.loads(options.read.read_text(encoding="utf-8"))
        show(document if options.warm is None else {**document, "warm": options.warm})
        return
    document = follow(options)
    show(document)
    if document["problem"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
