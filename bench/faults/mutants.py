"""Small harmful breakages of the code, one at a time: which tests notice them?

The lists are in `breakages/`, one a suite. Nothing is changed in place: each job works on a copy in a temporary folder.
First the tests run on the unchanged code, and must pass; this run records which tests execute which line.
Then each mutant runs the tests that execute the changed lines, the fastest first, until two different killers are
known (a law that a failure names, else a test). If none noticed, all other tests run, too. So a mutant with only one
killer was shown to all tests that could notice it. With ``--killers 1`` the first killer is enough: the survivors are
the same, and known several times sooner. The record of the first run is kept beside the results, and
is used again while code and tests are unchanged.

Prints a table of mutants, killers with the mutants that only they notice, and the survivors; writes JSON. A mutant that
runs out of time counts as killed, and is marked. A mutant with which tests cannot be collected is an error of the list.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.common import print_table, write_json
from bench.faults.breakages import ROOT, Mutant, suites
from bench.faults.repository_copy import TIME_OUT, Copy, Session, copies, in_copies, usually


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a mutant.

    Args:
        killers: laws or tests that noticed; at most a few, as ``--killers`` says.
        seconds: that the tests took.
        first: the first test that failed.
        error: why the mutant is none.
    """

    killers: tuple[str, ...]
    seconds: float
    first: str = ""
    error: str = ""


def as_it_is(every: Sequence[Copy], kept: Path, tests: Sequence[str], trace: Sequence[str]) -> Session:
    """The tests once, without a mutant; what they do is kept in a file.

    Raises:
        SystemExit: some do not pass, or they test another FedSync than the copy's.
    """
    session = usually(every, kept, tests, trace)
    if session.killers or session.unread or not session.tests:
        kept.unlink()
        raise SystemExit(f"The tests fail without a mutant:\n{session.output}")
    strangers = [file for file in trace if file not in session.lines]
    if strangers:
        raise SystemExit(f"The tests do not import {', '.join(strangers)}")
    return session


def concerned(lines: range, ran: dict[str, list[str]], every: Collection[str]) -> set[str]:
    """Tests that execute one of the lines; all, if one is executed by imports or none at all."""
    by = {test for line in lines for test in ran.get(str(line), [])}
    return set(every) if not by or "" in by else by & set(every)


def judge(copy: Copy, mutant: Mutant, tests: Sequence[str], usual: Session, killers: int) -> Fate:
    """Run the tests that execute what the mutant changes, and if none of them notices, the others."""
    begin_s = time.monotonic()
    near = concerned(mutant.lines(copy.root), usual.lines[mutant.file], usual.tests)
    original = copy.text(mutant.file)
    session = Session()
    copy.write(mutant.file, mutant.source(copy.root))
    try:
        for chosen in (near, usual.tests.keys() - near):
            if not chosen or session.killers:
                break
            seconds = {name: usual.tests[name]["seconds"] for name in chosen}
            order = dict(sorted(seconds.items(), key=lambda each: each[1]))
            session = copy.run(tests, only=order, enough=killers, limit_s=60.0 + 10.0 * sum(order.values()))
            if session.unread or not (session.tests or session.timed_out):
                return Fate((), time.monotonic() - begin_s, error=f"nothing runs any more: {session.output}")
    finally:
        copy.write(mutant.file, original)
    return Fate(session.killers, time.monotonic() - begin_s, session.first)


def run_all(
    mutants: Sequence[Mutant], tests: Sequence[str], jobs: int, kept: Path, killers: int = 2
) -> dict[str, Fate]:
    """The fate of every mutant, by name."""
    with copies(jobs) as every:
        usual = as_it_is(every, kept, tests, sorted({mutant.file for mutant in mutants}))
        seconds = sum(test["seconds"] for test in usual.tests.values())
        print(f"{len(usual.tests)} tests pass without a mutant in {seconds:.0f} s", file=sys.stderr, flush=True)

        def one(copy: Copy, mutant: Mutant) -> Fate:
            fate = judge(copy, mutant, tests, usual, killers)
            print(f"{fate.seconds:6.1f} s  {mutant.name}: {_told(fate)}", file=sys.stderr, flush=True)
            return fate

        return dict(zip((mutant.name for mutant in mutants), in_copies(every, one, mutants), strict=True))


def _told(fate: Fate) -> str:
    return fate.error or ", ".join(killer.rpartition("::")[2] for killer in fate.killers) or "SURVIVES"


def report(mutants: Sequence[Mutant], fates: dict[str, Fate], killers: int) -> None:
    """The tables, on standard output."""
    rows = [(mutant.name, _told(fates[mutant.name]), f"{fates[mutant.name].seconds:.1f}") for mutant in mutants]
    print_table("Mutants", ["mutant", "killed by", "seconds"], rows)
    kills = Counter(killer for fate in fates.values() for killer in fate.killers)
    alone = {killer: [name for name, fate in fates.items() if fate.killers == (killer,)] for killer in kills}
    if killers > 1:
        print_table(
            f"Killers; of a mutant that several notice, {killers} are known",
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
    parser.add_argument("--killers", type=int, default=2, help="after which a mutant's tests end [2]")
    parser.add_argument("--out", type=Path, help="JSON file [bench/results/mutants-SUITE.json]")
    arguments = parser.parse_args()
    suite = known[arguments.suite]
    mutants = [mutant for mutant in suite.mutants if not arguments.only or mutant.name in arguments.only]
    if arguments.only and len(mutants) != len(set(arguments.only)):
        raise SystemExit(f"Unknown: {', '.join(sorted(set(arguments.only) - {mutant.name for mutant in mutants}))}")
    out = arguments.out or ROOT / "bench" / "results" / f"mutants-{arguments.suite}.json"
    kept, tests = out.with_suffix(".usual.json"), arguments.tests or suite.tests
    fates = run_all(mutants, tests, arguments.jobs, kept, arguments.killers)
    report(mutants, fates, arguments.killers)
    rows = [{**asdict(mutant), **asdict(fates[mutant.name])} for mutant in mutants]
    write_json(out, {"suite": arguments.suite, "mutants": rows})
    if any(fate.error for fate in fates.values()):
        raise SystemExit("Some mutants are none; see above.")


if __name__ == "__main__":
    main()
