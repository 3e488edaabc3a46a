"""A copy of the repository with changeable files, in which tests run, for `mutants.py` and `mutation_score.py`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from bench.faults.breakages import ROOT
from bench.faults.watching import ASKED, seen_beside

T = TypeVar("T")
V = TypeVar("V")

NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "runs", "build", "dist", "site", "results")
IMPORTED = ("numpy", "pydantic", "pytest", "hypothesis", "yaml", "coverage", "typer", "torch", "statsmodels.api")
"""What workers import before they fork."""

TIME_OUT = "the time limit"


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


@contextmanager
def copies(jobs: int) -> Iterator[list[Copy]]:
    """So many copies, one for each job."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ExitStack() as stack:
        every = []
        for job in range(jobs):
            every.append(Copy(Path(folder) / str(job)))
            stack.callback(every[-1].close)
        yield every


def in_copies(every: Sequence[Copy], work: Callable[[Copy, T], V], values: Sequence[T]) -> list[V]:
    """``work`` on all values, in their order, each copy with one at a time."""
    free: SimpleQueue[Copy] = SimpleQueue()
    for copy in every:
        free.put(copy)

    def one(value: T) -> V:
        copy = free.get()
        try:
            return work(copy, value)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(every)) as pool:
        return list(pool.map(one, values))


def usually(every: Sequence[Copy], kept: Path, tests: Sequence[str], trace: Sequence[str]) -> Session:
    """What the tests do as the code is, from the file ``kept`` if it is of this code; each copy runs a part of them."""
    of = {"digest": every[0].digest(), "tests": list(tests), "trace": list(trace)}
    if kept.exists() and (known := json.loads(kept.read_text(encoding="utf-8")))["of"] == of:
        return Session(**known["session"])
    parts = in_copies(
        every,
        lambda copy, place: copy.run(tests, trace=trace, part=(place, len(every))),
        range(len(every)),
    )
    whole = Session(timed_out=any(part.timed_out for part in parts), output="".join(part.output for part in parts))
    for part in parts:
        whole.tests |= part.tests
        whole.unread |= part.unread
        for file, lines in part.lines.items():
            known_lines = whole.lines.setdefault(file, {})
            for line, names in lines.items():
                known_lines[line] = sorted({*known_lines.get(line, ()), *names})
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps({"of": of, "session": asdict(whole)}), encoding="utf-8")
    return whole


class Copy:
    """The repository in a folder of its own, with a process that runs tests there."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "repository"
        shutil.copytree(ROOT, self.root, ignore=NOT_COPIED)
        self._asked = folder / "asked.json"
        self._output = folder / "output"
        # The worker is the original's: nothing that it holds may be broken.
        worker = [sys.executable, "-c", f"import worker; worker.main({list(IMPORTED)})"]
        known = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        self._worker = subprocess.Popen(
            worker,
            cwd=Path(__file__).parent,
            # It imports what lies beside it, whatever a command that ran in this process has set.
            env={**os.environ, **known, "PYTHONSAFEPATH": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        """End the worker."""
        assert self._worker.stdin is not None
        self._worker.stdin.close()
        self._worker.wait()

    def digest(self) -> str:
        """Of the code and its tests."""
        digest = hashlib.blake2b(digest_size=16)
        for path in sorted(path for part in ("fedsync", "tests") for path in (self.root / part).rglob("*.*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(self.root)}".encode() + path.read_bytes())
        return digest.hexdigest()

    def text(self, file: str) -> str:
        return (self.root / file).read_text(encoding="utf-8")

    def write(self, file: str, text: str) -> None:
        """Change a file; what was compiled of it is forgotten, for its age may be the same."""
        path = self.root / file
        path.write_text(text, encoding="utf-8")
        Path(cache_from_source(path)).unlink(missing_ok=True)

    def run(
        self,
        tests: Sequence[str],
        *,
        trace: Sequence[str] = (),
        only: Mapping[str, float] | None = None,
        enough: int = 0,
        part: tuple[int, int] = (0, 1),
        limit_s: float | None = None,
    ) -> Session:
        """Run tests, as they come or in the order of ``only``; see `bench.faults.watching` for what may be asked."""
        asked = {"trace": list(trace), "only": only, "enough": enough, "part": part}
        self._asked.write_text(json.dumps(asked), encoding="utf-8")
        seen = seen_beside(self._asked)
        seen.unlink(missing_ok=True)
        ask = {
            "root": str(self.root),
            "arguments": ["-p", "bench.faults.watching", "-p", "no:cacheprovider", *tests],
            "variables": {"PYTHONPATH": str(self.root), ASKED: str(self._asked)},
            "output": str(self._output),
            "limit_s": limit_s,
        }
        assert self._worker.stdin is not None and self._worker.stdout is not None
        print(json.dumps(ask), file=self._worker.stdin, flush=True)
        timed_out = json.loads(self._worker.stdout.readline())
        found = json.loads(seen.read_text(encoding="utf-8")) if seen.exists() else {}
        output = self._output.read_text(encoding="utf-8", errors="replace")[-4000:]
        return Session(**found, output=output, timed_out=timed_out)
