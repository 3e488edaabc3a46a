"""Breaks the code in small ways that somebody would suffer from, one at a time, and sees which tests notice.

The lists are in `breakages/`, one a suite. Nothing is changed in place: each job works on a copy in a temporary folder.
First the tests run once as the code is, and must pass; from that run it is known which tests execute which line.
Then, for each mutant, those tests run that execute what it changes, the fastest first, until two different killers are
known (a law that names itself in a failure, else a test), and if none noticed, all the others too. So a mutant that
only one killer notices has been shown to all who could.

Prints a table of mutants, killers with what only they notice, and the survivors; writes JSON. A mutant that runs out of
time counts as killed, and is shown as such; one with which tests cannot even be read is an error of the list.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from bench.common import print_table, write_json
from bench.faults.breakages import ROOT, Mutant, suites
from bench.faults.watching import ASKED, seen_beside

NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "runs", "build", "dist", "site", "results")
TIME_OUT = "the time limit"
ENOUGH = 2
"""Killers after which a mutant is nobody's alone."""


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a mutant.

    Args:
        killers: laws or tests that noticed; at most a few, see `ENOUGH`.
        seconds: that the tests took.
        first: the first test that failed.
        error: why the mutant is none.
    """

    killers: tuple[str, ...]
    seconds: float
    first: str = ""
    error: str = ""


@dataclass(slots=True)
class Session:
    """What one run of pytest has shown; see `bench.faults.watching`."""

    tests: dict[str, dict[str, Any]] = field(default_factory=dict)
    lines: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    output: str = ""
    timed_out: bool = False

    @property
    def killers(self) -> tuple[str, ...]:
        killers = {killer for test in self.tests.values() for killer in test["killers"]}
        return tuple(sorted(killers | ({TIME_OUT} if self.timed_out else set())))

    @property
    def first(self) -> str:
        return next((name for name, test in self.tests.items() if test["killers"]), "")


class Copy:
    """The repository in a folder of its own, in which files may be changed and tests run."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "repository"
        shutil.copytree(ROOT, self.root, ignore=NOT_COPIED)

    def write(self, file: str, text: str) -> None:
        """Change a file; what was compiled of it is forgotten, for its age may be the same."""
        path = self.root / file
        path.write_text(text, encoding="utf-8")
        Path(cache_from_source(path)).unlink(missing_ok=True)

    def restore(self, file: str) -> None:
        self.write(file, (ROOT / file).read_text(encoding="utf-8"))

    def run(
        self,
        tests: Sequence[str],
        *,
        trace: Sequence[str] = (),
        only: Sequence[str] | None = None,
        enough: int = 0,
        limit_s: float | None = None,
    ) -> Session:
        """Run tests; see `bench.faults.watching` for what may be asked."""
        asked = self.root.parent / "asked.json"
        asked.write_text(json.dumps({"trace": trace, "only": only, "enough": enough}), encoding="utf-8")
        seen = seen_beside(asked)
        seen.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-p", "bench.faults.watching", "-p", "no:cacheprovider", *tests]
        known = {"PYTHONPATH": str(self.root), ASKED: str(asked), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        with (self.root.parent / "output").open("w+") as output:
            # A session of its own, so that whatever a test has started ends with it.
            child = subprocess.Popen(
                command,
                cwd=self.root,
                env={**os.environ, **known},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            timed_out = False
            try:
                child.wait(limit_s)
            except subprocess.TimeoutExpired:
                timed_out = True
            finally:
                _end(child)
            output.seek(0)
            text = output.read()[-4000:]
        found = json.loads(seen.read_text(encoding="utf-8")) if seen.exists() else {}
        return Session(**found, output=text, timed_out=timed_out)


def _end(child: subprocess.Popen[Any]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, 9)
    child.wait()


def as_it_is(copy: Copy, tests: Sequence[str], trace: Sequence[str]) -> Session:
    """The tests once, without a mutant.

    Raises:
        SystemExit: some do not pass, or they test another FedSync than the copy's.
    """
    session = copy.run(tests, trace=trace)
    if session.killers or session.unread or not session.tests:
        raise SystemExit(f"The tests fail without a mutant:\n{session.output}")
    strangers = [file for file in trace if file not in session.lines]
    if strangers:
        raise SystemExit(f"The tests do not import {', '.join(strangers)}")
    return session


def concerned(lines: range, ran: dict[str, list[str]], every: Collection[str]) -> set[str]:
    """Tests that execute one of the lines; all, if one is executed by imports or none at all."""
    by = {test for line in lines for test in ran.get(str(line), [])}
    return set(every) if not by or "" in by else by & set(every)


def judge(copy: Copy, mutant: Mutant, tests: Sequence[str], usual: Session) -> Fate:
    """Run the tests that execute what the mutant changes, and if none of them notices, the others."""
    begin_s = time.monotonic()
    near = concerned(mutant.lines(), usual.lines[mutant.file], usual.tests)
    session = Session()
    copy.write(mutant.file, mutant.source())
    try:
        for chosen in (near, usual.tests.keys() - near):
            if not chosen or session.killers:
                break
            order = sorted(chosen, key=lambda name: usual.tests[name]["seconds"])
            limit_s = 60.0 + 5.0 * sum(usual.tests[name]["seconds"] for name in order)
            session = copy.run(tests, only=order, enough=ENOUGH, limit_s=limit_s)
            if session.unread or not (session.tests or session.timed_out):
                return Fate((), time.monotonic() - begin_s, error=f"nothing runs any more: {session.output}")
    finally:
        copy.restore(mutant.file)
    return Fate(session.killers, time.monotonic() - begin_s, session.first)


def run_all(mutants: Sequence[Mutant], tests: Sequence[str], jobs: int) -> dict[str, Fate]:
    """The fate of every mutant, by name."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for job in range(jobs):
            copies.put(Copy(Path(folder) / str(job)))
        copy = copies.get()
        usual = as_it_is(copy, tests, sorted({mutant.file for mutant in mutants}))
        copies.put(copy)
        seconds = sum(test["seconds"] for test in usual.tests.values())
        print(f"{len(usual.tests)} tests pass without a mutant in {seconds:.0f} s", file=sys.stderr, flush=True)

        def one(mutant: Mutant) -> Fate:
            copy = copies.get()
            try:
                fate = judge(copy, mutant, tests, usual)
            finally:
                copies.put(copy)
            print(f"{fate.seconds:6.1f} s  {mutant.name}: {_told(fate)}", file=sys.stderr, flush=True)
            return fate

        with ThreadPoolExecutor(jobs) as pool:
            return dict(zip((mutant.name for mutant in mutants), pool.map(one, mutants), strict=True))


def _told(fate: Fate) -> str:
    return fate.error or ", ".join(killer.rpartition("::")[2] for killer in fate.killers) or "SURVIVES"


def report(mutants: Sequence[Mutant], fates: dict[str, Fate]) -> None:
    """The tables, on standard output."""
    rows = [(mutant.name, _told(fates[mutant.name]), f"{fates[mutant.name].seconds:.1f}") for mutant in mutants]
    print_table("Mutants", ["mutant", "killed by", "seconds"], rows)
    kills = Counter(killer for fate in fates.values() for killer in fate.killers)
    alone = {killer: [name for name, fate in fates.items() if fate.killers == (killer,)] for killer in kills}
    print_table(
        "Killers; of a mutant that several notice, two are known",
        ["killer", "mutants that only it kills"],
        [(killer.rpartition("::")[2], ", ".join(alone[killer]) or "-") for killer in sorted(kills)],
    )
    killed = sum(bool(fate.killers) for fate in fates.values())
    timed_out = sum(TIME_OUT in fate.killers for fate in fates.values())
    print(f"Killed: {killed} of {len(mutants)}, {killed / len(mutants):.1%}; {timed_out} by the time limit.")
    for mutant in mutants:
        if not fates[mutant.name].killers:
            print(f"Survives: {mutant.name} ({mutant.file}): {mutant.equivalent or 'a hole in the tests'}")
        elif mutant.equivalent:
            print(f"Killed, though it was said that nothing could: {mutant.name}: {mutant.equivalent}")


def main() -> None:
    known = suites()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=sorted(known), default="deciding", help="which list")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants only")
    parser.add_argument("--tests", nargs="+", metavar="ARG", help="arguments of pytest instead of the suite's tests")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--out", type=Path, help="JSON file [bench/results/mutants-SUITE.json]")
    arguments = parser.parse_args()
    suite = known[arguments.suite]
    mutants = [mutant for mutant in suite.mutants if not arguments.only or mutant.name in arguments.only]
    if arguments.only and len(mutants) != len(set(arguments.only)):
        raise SystemExit(f"Unknown: {', '.join(sorted(set(arguments.only) - {mutant.name for mutant in mutants}))}")
    fates = run_all(mutants, arguments.tests or suite.tests, arguments.jobs)
    report(mutants, fates)
    out = arguments.out or ROOT / "bench" / "results" / f"mutants-{arguments.suite}.json"
    rows = [{**asdict(mutant), **asdict(fates[mutant.name])} for mutant in mutants]
    write_json(out, {"suite": arguments.suite, "mutants": rows})
    if any(fate.error for fate in fates.values()):
        raise SystemExit("Some mutants are none; see above.")


if __name__ == "__main__":
    main()
