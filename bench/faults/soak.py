"""The fault campaign: a real federation with TLS, node authentication and encryption, under every kind of fault.

Runs follow one another in a federation, and ``--at-once`` federations work side by side. Each run has one fault at a
random moment of a random round, and few rounds, since a fault shows in the rounds after it. FedSync's own supervisors
restart what ends; only a run that ends with a reason (its disk is full) is resumed by hand, as its operator would.
A run has survived if it reaches its last round with every commit accounted for: versions without a gap, no update in
two of them, no update lost without a record, a journal that replays to the same decisions, and the last version at the
silos. It has not survived if it stood still for four minutes. This tests the table of docs/reliability.md.

Each finished run is recorded, and ``--resume`` continues with the missing runs.

With ``--orders N`` it sends N orders through one silo instead and measures the memory of its processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from rich.console import Console

from bench.common import markdown_table, print_table, write_json
from bench.faults.soak_federation import Federation
from bench.faults.soak_samples import ROLES
from fedsync import replay
from fedsync.common.errors import FedSyncError
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit, Discard
from fedsync.core.events import UpdateArrived, WorkFailed
from fedsync.ops.runs import resume_run, stop_run, submit_run
from fedsync.server.run_folder import DONE_FILE, ERROR_FILE

CUT_S = 30.0
BY_HAND, STILL_S = 3, 240.0


@dataclass(slots=True)
class Run:
    """One in the federation, seen from outside.

    Args:
        federation: where it runs.
        out: folder of its files.
        began_s: time of day when it was submitted.
        by_hand: how often it was resumed so.
        longest_s: longest time without a commit so far, from the first on.
    """

    federation: Federation
    out: Path
    began_s: float
    by_hand: int = 0
    longest_s: float = 0.0
    _seen: int = 0
    _seen_s: float = 0.0
    _read: tuple[int, int] = (0, 0)

    def find(self, word: str) -> list[psutil.Process]:
        """Processes that serve it; trainers of runs before it do not."""
        since_s = self.began_s if "trainer" in word else 0.0
        return self.federation.processes(word, since_s)

    def look(self) -> int:
        """Commits so far, by the journal."""
        commits, now_s = self._count(), time.monotonic()
        if self._seen:
            self.longest_s = max(self.longest_s, now_s - self._seen_s)
        if commits != self._seen or not self._seen_s:
            self._seen, self._seen_s = commits, now_s
        return commits

    def _count(self) -> int:
        """Commits in the journal, of which only what is new is read: a run may be long, and is looked at often."""
        journal = self.out / "journal.jsonl"
        if not journal.exists():
            return 0
        with journal.open("rb") as file:
            begin, commits = self._read if file.seek(0, 2) >= self._read[0] else (0, 0)  # it is cut back at a resume
            file.seek(begin)
            while (line := file.readline()).endswith(b"\n"):
                begin, commits = begin + len(line), commits + line.count(b'"type":"Commit"')
        self._read = begin, commits
        return commits

    def stuck(self) -> str:
        """Ends it if it stood still for too long, and says so; how long it takes in all says more of the machine."""
        if time.monotonic() - self._seen_s < STILL_S:
            return ""
        with contextlib.suppress(FedSyncError):
            stop_run(self.out)
        return f"no commit in {STILL_S:g} s"

    def wait_for(self, commits: int) -> str:
        """Wait until it has come so far; returns what went wrong, or nothing."""
        while self.look() < commits:
            if (self.out / ERROR_FILE).exists():
                return (self.out / ERROR_FILE).read_text()
            if problem := self.stuck():
                return problem
            time.sleep(0.1)
        return ""

    def see_through(self) -> str:
        """Wait for its end; what ends with a reason is resumed by hand. Returns what went wrong, or nothing."""
        while not (self.out / DONE_FILE).exists():
            self.look()
            error = self.out / ERROR_FILE
            if error.exists():
                if self.by_hand == BY_HAND:
                    return f"failed again and again: {error.read_text()}"
                self.by_hand += 1
                with contextlib.suppress(FedSyncError):  # the SuperLink may be on its way back
                    resume_run(self.federation.config, self.out)
            if problem := self.stuck():
                return problem
            time.sleep(0.1)
        return ""


# What can break.


def _kill(word: str) -> Callable[[Run, random.Random], None]:
    def inject(run: Run, rng: random.Random) -> None:
        rng.choice(run.find(word)).kill()

    return inject


def _kill_all(run: Run, rng: random.Random) -> None:
    """Every machine loses its power, and comes back."""
    run.federation.kill()
    run.federation.start()


def _cut(run: Run, rng: random.Random) -> None:
    run.federation.proxy.cut(CUT_S)


def _fill_server(run: Run, rng: random.Random) -> None:
    """No file of the server's may grow beyond what the journal has and a little."""
    (server,) = run.find("flwr-serverapp")
    size = (run.out / "journal.jsonl").stat().st_size + 500
    server.rlimit(psutil.RLIMIT_FSIZE, (size, psutil.RLIM_INFINITY))


def _fill_silo(run: Run, rng: random.Random) -> None:
    """One trainer can write nothing for two seconds."""
    trainer = rng.choice(run.find("fedsync.silo.session.resident_trainer"))
    trainer.rlimit(psutil.RLIMIT_FSIZE, (0, psutil.RLIM_INFINITY))
    time.sleep(2.0)
    with contextlib.suppress(psutil.NoSuchProcess):
        trainer.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))


FAULTS: dict[str, Callable[[Run, random.Random], None]] = {
    "kill -9 trainer": _kill("fedsync.silo.session.resident_trainer"),
    "kill -9 agent": _kill("fedsync.silo.agent.agent"),
    "kill -9 SuperNode": _kill("launch supernode"),
    "kill -9 ServerApp": _kill("flwr-serverapp"),
    "kill -9 SuperLink": _kill("launch superlink"),
    "kill -9 all at once": _kill_all,
    f"network of a silo cut for {CUT_S:g} s": _cut,
    "disk full at the server": _fill_server,
    "disk full at a silo for 2 s": _fill_silo,
}
LIES = {
    "silo answers garbage": "garbage",
    "silo answers twice": "twice",
    "silo answers for another round": "other_round",
    "silo floods": "flood",
}
NONE = "none"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run of FedSync at a commit; ``problem`` is empty if it survived."""

    code: str
    fault: str
    seed: int
    at_commit: int
    resumed: int
    by_hand: int
    longest_round_s: float
    seconds: float
    problem: str


def account(run: Run, newest: int, *, lied: bool) -> str:
    """What does not add up in a run's files, or nothing.

    Args:
        run: that is over.
        newest: its last version; where figures are sealed, one more than its rounds, which scores the last.
        lied: whether a silo lied in it, some of which the server must have refused.
    """
    try:
        entries = replay(run.out / "journal.jsonl")
    except FedSyncError as error:
        return str(error)[:300]
    actions = [action for entry in entries for action in entry.actions]
    commits = [action for action in actions if isinstance(action, Commit)]
    used = [update_id for commit in commits for update_id in commit.weights]
    arrived = {e.meta.update_id for entry in entries for e in entry.events if isinstance(e, UpdateArrived)}
    dropped = {action.update_id for action in actions if isinstance(action, Discard)}
    if lied and not any(isinstance(event, WorkFailed) for entry in entries for event in entry.events):
        return "nothing was refused of a silo that lied"
    if [commit.version for commit in commits] != list(range(1, newest + 1)):
        return f"versions {[commit.version for commit in commits]}"
    if len(used) != len(set(used)):
        return "an update was counted twice"
    if not set(used) <= arrived:
        return "an update was counted that never came"
    if not arrived <= set(used) | dropped:
        return f"lost without a word: {sorted(arrived - set(used) - dropped)}"
    if not run.federation.sealed:
        return ""
    versions = []
    for version in run.federation.versions():
        if version == newest:
            return ""
        versions.append(version)
    return f"the silos have versions {versions}"


def one(fault: str, federation: Federation, options: argparse.Namespace, seed: int) -> Outcome:
    """A run, a fault in it, and what became of it."""
    rng = random.Random(f"{fault} {seed}")
    rounds: int = options.rounds
    at_commit, delay_s = rng.randint(1, rounds - 2), rng.uniform(0.0, 0.5)
    begin_s, resumed = time.monotonic(), federation.resumed
    settings = ["task={kind: digits}", f"local.steps={options.steps}", f"stop.rounds={rounds}"]
    settings += ["local.batch_size=32", "local.threads=1"]
    settings.append(f"silos=[{', '.join(federation.names)}]")  # it begins when all are there
    # A liar is set aside, and the run goes on and ends without it.
    least = f"cipher.members={options.silos - 1}" if fault in LIES else f"min_silos={options.silos}"
    config = StrategyConfig.load("fedavg", [*settings, *options.set, least])
    out = federation.folder / "server" / "runs" / f"{fault.replace(' ', '-')}-{seed}"
    federation.lie(LIES.get(fault))
    run = Run(federation, submit_run(federation.config, config, out), time.time())
    problem = run.wait_for(at_commit)
    if not problem and fault in FAULTS:
        time.sleep(delay_s)
        FAULTS[fault](run, rng)
        problem = "it was over before its fault" if run.look() == rounds else ""
    problem = problem or run.see_through() or account(run, rounds + (config.policies().tally > 0), lied=fault in LIES)
    seconds, resumed = time.monotonic() - begin_s, federation.resumed - resumed
    return Outcome(code(), fault, seed, at_commit, resumed, run.by_hand, run.longest_s, seconds, problem)


def code() -> str:
    """The commit that is measured."""
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def campaign(faults: Sequence[str], options: argparse.Namespace) -> list[Outcome]:
    """Every fault, so many times each; Ctrl-C ends it with what there is."""
    outcomes = [Outcome(**each) for each in json.loads(options.out.read_text())] if options.resume else []
    seeds = range(options.seed, options.seed + options.runs)
    over = {(outcome.seed, outcome.fault) for outcome in outcomes}
    missing = [(seed, fault) for seed in seeds for fault in faults if (seed, fault) not in over]
    console, begin_s = Console(stderr=True), time.monotonic()
    lock, stop = threading.Lock(), threading.Event()

    def keep(outcome: Outcome) -> None:
        said = outcome.problem or f"survived, {outcome.resumed} + {outcome.by_hand} resumed"
        said += f", {outcome.seconds:.0f} s, longest round {outcome.longest_round_s:.0f} s"
        with lock:
            outcomes.append(outcome)
            write_json(options.out, [asdict(each) for each in outcomes])
            console.print(
                f"{len(outcomes)}: {outcome.fault}, seed {outcome.seed}, after commit {outcome.at_commit}: {said}",
                soft_wrap=True,
            )

    for lies in (False, True):
        part = [(seed, fault) for seed, fault in missing if (fault in LIES) is lies]
        parts = [[] if stop.is_set() else part[index :: options.at_once] for index in range(options.at_once)]
        with ThreadPoolExecutor(options.at_once) as pool:
            done = [pool.submit(_campaign, each, options, keep, stop, lies=lies) for each in parts if each]
            try:
                wait(done)
            except KeyboardInterrupt:
                stop.set()
                console.print("each run that has begun comes to its end")
        for each in done:
            each.result()
    console.print(f"{time.monotonic() - begin_s:.0f} s in all")
    return outcomes


def _campaign(
    missing: Sequence[tuple[int, str]],
    options: argparse.Namespace,
    keep: Callable[[Outcome], None],
    stop: threading.Event,
    *,
    lies: bool,
) -> None:
    """Faults in one federation; its first silo lies where some are to."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        federation = Federation(Path(folder), options.silos, liar=lies)
        federation.start()
        try:
            for seed, fault in missing:
                if stop.is_set():
                    break
                keep(one(fault, federation, options, seed))
        finally:
            federation.stop()


def rows(outcomes: Sequence[Outcome]) -> list[list[object]]:
    """Of the table: by fault."""
    table: list[list[object]] = []
    for fault in dict.fromkeys(outcome.fault for outcome in outcomes):
        of = [outcome for outcome in outcomes if outcome.fault == fault]
        survived, resumed = sum(not each.problem for each in of), sum(each.resumed for each in of)
        longest, seconds = max(each.longest_round_s for each in of), max(each.seconds for each in of)
        by_hand = sum(each.by_hand for each in of)
        table.append([fault, len(of), survived, resumed, by_hand, f"{longest:.0f}", f"{seconds:.0f}"])
    return table


COLUMNS = ("fault", "runs", "survived", "resumed", "by hand", "longest round [s]", "longest run [s]")


# Memory.


def watch_memory(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Resident memory of a silo's and the server's processes after a fifth of the orders, and at their end [MiB].

    Not their unique memory, which grows when another process that has the same libraries ends.
    """
    words = {role: word for role, word in ROLES.items() if role != "SuperExec"}
    found: dict[str, dict[str, float]] = {name: {} for name in words}
    settings = [
        "task={kind: digits}",
        "local.steps=1",
        "local.batch_size=8",
        "local.threads=1",
        f"stop.rounds={options.orders}",
    ]
    config = StrategyConfig.load("fedavg", [*settings, "min_silos=1", *options.set])
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        federation = Federation(Path(folder), 1)
        federation.start()
        try:
            run = Run(federation, submit_run(federation.config, config), time.time())
            for share, label in ((0.2, "warm"), (0.98, "end")):
                problem = run.wait_for(int(share * options.orders))
                if problem:
                    raise SystemExit(problem)
                for name, word in words.items():
                    found[name][label] = sum(each.memory_info().rss for each in run.find(word)) / 2**20
            run.see_through()
        finally:
            federation.stop()
    for name in words:
        found[name]["growth"] = found[name]["end"] / found[name]["warm"] - 1
    return found


def main() -> None:
    """Run the campaign, or what ``--orders`` says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=10, help="of each fault")
    parser.add_argument("--seed", type=int, default=0, help="of the first run of each fault")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--silos", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100, help="local steps an order")
    parser.add_argument("--at-once", type=int, default=2, help="federations side by side")
    every = [NONE, *FAULTS, *LIES]
    parser.add_argument("--faults", nargs="*", default=every, help="parts of their names; all by default")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override in the strategy")
    parser.add_argument("--orders", type=int, default=0, help="watch memory over so many orders instead")
    parser.add_argument("--resume", action="store_true", help="go on with the campaign in --out")
    parser.add_argument("--out", type=Path, default=Path("bench/results/soak.json"))
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell has its background jobs ignore the first
        signal.signal(number, signal.default_int_handler)
    options.set = ["cipher={kind: bfv}", *options.set]
    if options.orders:
        memory = watch_memory(options)
        cells = [
            [name, f"{each['warm']:.0f}", f"{each['end']:.0f}", f"{each['growth']:+.1%}"]
            for name, each in memory.items()
        ]
        print_table(
            f"{options.orders} orders through one silo", ("process", "warm [MiB]", "end [MiB]", "growth"), cells
        )
        write_json(options.out.with_name("soak-memory.json"), memory)
        return
    faults = [fault for fault in every if any(part in fault for part in options.faults)]
    outcomes = campaign(faults, options)
    codes = ", ".join(dict.fromkeys(outcome.code for outcome in outcomes))
    print_table(f"{options.silos} silos, {options.rounds} rounds, {options.set}, at {codes}", COLUMNS, rows(outcomes))
    print(markdown_table(COLUMNS, rows(outcomes)))
    if any(outcome.problem for outcome in outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
