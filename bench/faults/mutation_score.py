"""The share of a mutation tool's mutants of `fedsync/core` and `fedsync/policies` that the tests kill.

The tool is mutmut 3. It makes mutants inside functions only, and none of annotations, docstrings and decorated
functions. A sample is drawn by seed, in random order. None is left out, so some mutants change nothing visible. Each is
shown to the tests that execute the changed statement, until one fails: first tests whose file is named after the
changed file, then `tests/core` and `tests/policies`, the laws, and the others, the fastest first.

Tests that take real processes, and tests beyond `--budget` seconds, do not run: the figure is a lower bound.
A test that takes far longer than usual counts as a failure. Prints a table by folder, the share with Wilson's 95 %
interval, and the survivors. Writes JSON after every mutant; another call continues there.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import math
import random
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

from bench.common import print_table, write_json
from bench.faults.breakages import ROOT
from bench.faults.repository_copy import Copy, Session, copies, in_copies, usually

MUTATED = ("fedsync/core", "fedsync/policies")
NEAR = (("tests/core/", "tests/policies/"), "tests/laws/")
# Flower's processes, command lines in processes of their own, and scripts: minutes, and little of it in these parts.
PROCESSES = ("e2e", "docs", "trainer", "ops", "attacks", "commands", "flower", "identity", "cipher", "train", "tasks")
FILES = ("test_bench.py", "test_packaging.py", "test_deploy.py", "test_cli.py", "test_architecture.py")
LEFT_OUT = [f"tests/{part}" for part in (*PROCESSES, *FILES, "test_breakages.py", "laws/test_laws_bite.py")]
TESTS = ("tests", "-m", "not full", *(f"--ignore={path}" for path in LEFT_OUT))
UNCOVERED = "no test runs it"


@dataclass(frozen=True, slots=True)
class Drawn:
    """One of the tool's mutants.

    Args:
        number: among all of the file, in the tool's order.
        line: first that changes.
        before: the lines that change, without indentation.
        after: what they become.
    """

    file: str
    number: int
    line: int
    before: str
    after: str


def _mutations(file: str, code: str) -> list[tuple[Any, Any]]:
    try:
        from mutmut.mutation.file_mutation import create_mutations
    except ImportError as error:
        raise SystemExit(f"{error}. Install it: pip install -e '.[mutation]'") from error

    tree, mutations, _, _ = create_mutations(file, code)
    # As in the tool itself: what is in no function, such as a default, is executed before any test could choose.
    return [(tree, mutation) for mutation in mutations if mutation.contained_by_top_level_function is not None]


def draw(root: Path, sample: int, seed: int) -> tuple[int, list[Drawn]]:
    """How many mutants there are, and the first ``sample`` of them in an order drawn by seed."""
    every: list[tuple[str, str, Any, Any, int]] = []
    for path in sorted(path for part in MUTATED for path in (root / part).rglob("*.py")):
        file, code = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        pairs = _mutations(file, code)
        every += [(file, code, tree, mutation, number) for number, (tree, mutation) in enumerate(pairs)]
    chosen = random.Random(seed).sample(every, len(every))[:sample]
    drawn = []
    for file, code, tree, mutation, number in chosen:
        changed = tree.deep_replace(mutation.original_node, mutation.mutated_node).code
        drawn.append(Drawn(file, number, *difference(code, changed)))
    return len(every), drawn


def difference(before: str, after: str) -> tuple[int, str, str]:
    """The first line that changes, from 1, and the lines that do so, as they were and as they are."""
    old, new = before.splitlines(), after.splitlines()
    changes = [op for op in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes() if op[0] != "equal"]
    first, last = changes[0], changes[-1]
    parts = (old[first[1] : last[2]], new[first[3] : last[4]])
    return first[1] + 1, *("\n".join(line.strip() for line in part) for part in parts)  # type: ignore[return-value]


def statement(code: str, line: int) -> range:
    """Lines of the innermost statement in which ``line`` is; of one with a body, its head."""
    found = range(line, line + 1)
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno):
            body = getattr(node, "body", None) or getattr(node, "cases", None)
            first = body[0].pattern if body and isinstance(body[0], ast.match_case) else body[0] if body else None
            end = max(first.lineno, node.lineno + 1) if first is not None else (node.end_lineno or node.lineno) + 1
            if line < end:
                found = range(node.lineno, end)
    return found


def judge(copy: Copy, mutant: Drawn, usual: Session, budget_s: float) -> tuple[str, float]:
    """Who killed the mutant, "" for nobody, and the seconds that took."""
    begin_s = time.monotonic()
    code = copy.text(mutant.file)
    ran = usual.lines.get(mutant.file, {})
    running = {name for line in statement(code, mutant.line) for name in ran.get(str(line), [])}
    if not running:
        return "", 0.0
    seconds = {name: test["seconds"] for name, test in usual.tests.items() if not test["killers"]}
    covering = seconds.keys() if running == {""} else running & seconds.keys()
    tree, mutation = _mutations(mutant.file, code)[mutant.number]
    copy.write(mutant.file, tree.deep_replace(mutation.original_node, mutation.mutated_node).code)
    try:
        for stage in stages(covering, seconds, budget_s, mutant.file):
            files = sorted({name.partition("::")[0] for name in stage})
            session = copy.run(files, only=stage, enough=1, limit_s=60.0 + 20.0 * sum(stage.values()))
            killers = session.killers or tuple(session.unread)[:1]
            if killers or not session.tests:
                return (killers or ("pytest does not begin",))[0], time.monotonic() - begin_s
    finally:
        copy.write(mutant.file, code)
    return "", time.monotonic() - begin_s


def stages(
    covering: Collection[str], seconds: Mapping[str, float], budget_s: float, file: str
) -> list[dict[str, float]]:
    """Tests to run, those named after the mutated file first, then near ones, as far as the budget goes."""

    def distance(name: str) -> int:
        if PurePath(file).stem in PurePath(name.partition("::")[0]).stem:
            return 0
        return next((place for place, part in enumerate(NEAR, start=1) if name.startswith(part)), len(NEAR) + 1)

    found: dict[int, dict[str, float]] = defaultdict(dict)
    spent_s = 0.0
    for name in sorted(covering, key=lambda name: (distance(name), seconds[name])):
        spent_s += seconds[name]
        if spent_s > budget_s and found:
            break
        found[distance(name)][name] = seconds[name]
    return list(found.values())


def wilson(hits: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    z, share = 1.959964, hits / of
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z / (1 + z * z / of) * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return middle - half, middle + half


def report(rows: Sequence[Mapping[str, Any]], of: int, wanted: int) -> None:
    """The tables, on standard output."""
    by: dict[str, Counter[bool]] = defaultdict(Counter)
    for row in rows:
        folder = PurePath(row["file"]).parent.relative_to("fedsync").as_posix()
        by[folder][bool(row["killed_by"])] += 1
    print_table(
        f"{len(rows)} of {wanted} drawn from {of} mutants",
        ["folder", "mutants", "killed", "survive"],
        [(folder, sum(counts.values()), counts[True], counts[False]) for folder, counts in sorted(by.items())],
    )
    for row in rows:
        if not row["killed_by"]:
            why = f" ({UNCOVERED})" if not row["seconds"] else ""
            print(f"Survives: {row['file']}:{row['line']}{why}\n    - {_indented(row['before'])}")
            print(f"    + {_indented(row['after'])}")
    killed = sum(bool(row["killed_by"]) for row in rows)
    low, high = wilson(killed, len(rows))
    print(f"Killed: {killed} of {len(rows)}, {killed / len(rows):.1%} (95 %: {low:.1%} to {high:.1%}); a lower bound.")


def _indented(text: str) -> str:
    return text.replace("\n", "\n      ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=400, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument(
        "--budget", type=float, default=120.0, help="seconds of tests for a mutant, as they usually take"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "mutation_score.json")
    arguments = parser.parse_args()
    total, drawn = draw(ROOT, arguments.sample, arguments.seed)
    trace = sorted(path.relative_to(ROOT).as_posix() for part in MUTATED for path in (ROOT / part).rglob("*.py"))
    with copies(arguments.jobs) as every:
        of = {"seed": arguments.seed, "mutants": total, "code": every[0].digest()}
        rows: list[dict[str, Any]] = []
        if arguments.out.exists() and (known := json.loads(arguments.out.read_text(encoding="utf-8")))["of"] == of:
            rows = known["rows"]
        usual = usually(every, arguments.out.with_suffix(".usual.json"), TESTS, trace)
        failing = [name for name, test in usual.tests.items() if test["killers"]]
        print(f"{len(usual.tests)} tests; they fail in a copy and are left out: {failing}", file=sys.stderr, flush=True)
        lock = threading.Lock()
        done = {(row["file"], row["number"]) for row in rows}

        def one(copy: Copy, mutant: Drawn) -> None:
            killer, seconds = judge(copy, mutant, usual, arguments.budget)
            with lock:
                rows.append({**asdict(mutant), "killed_by": killer, "seconds": round(seconds, 1)})
                write_json(arguments.out, {"of": of, "rows": rows})
                print(f"{len(rows)}: {mutant.file}:{mutant.line} {killer or 'SURVIVES'}", file=sys.stderr, flush=True)

        in_copies(every, one, [mutant for mutant in drawn if (mutant.file, mutant.number) not in done])
    report(rows, total, arguments.sample)


if __name__ == "__main__":
    main()
