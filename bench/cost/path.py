"""Files and functions of FedSync in one steady round, and the processes that an order crosses in each direction.

Three silos train under BSP, in virtual time and on real processes, in the clear and encrypted. Every process records
the functions of ``fedsync/`` that it calls, from the end of round 3 to that of round 5. This covers at least one whole
round even if the clocks of the processes differ, and no start-up. Forked processes count. The user's own process, the
processes that start others, lambdas and comprehensions do not count.

    python bench/cost/path.py
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.common import print_table, write_json
from fedsync.cli import Runtime, runner
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.observe.ledger import Ledger

FIRST, LAST = 3, 5
# 10 steps of 32 samples: 0.8 s an order, so that whoever watches the journal is in time.
SILOS = [{"name": name, "speed": 400.0} for name in ("a", "b", "c")]
SETTINGS = ["task={kind: digits}", f"stop.rounds={LAST + 2}", "local.steps=10", "local.batch_size=32"]

WAY = ("ServerApp", "agent", "trainer")
"""Roles of processes, in the order in which an order passes them."""

HOOK = """
import mmap, os, sys, threading
folder, root = os.environ["PATH_TRACE"], os.environ["PATH_ROOT"] + os.sep
flag = mmap.mmap(os.open(os.path.join(folder, "flag"), os.O_RDONLY), 1, prot=mmap.PROT_READ)
mine, notes, seen = 0, None, set()
def begin():
    # A forked process shows the command line of what it has become, not of what forked it.
    global mine, notes, seen
    with open("/proc/self/cmdline") as file:
        words = file.read().replace("\\0", " ")
    role = next((role for word, role in (
        ("flwr-serverapp", "ServerApp"), (" superlink ", "SuperLink"), (" supernode ", "SuperNode"),
        ("fedsync.silo.agent.agent", "agent"), ("fedsync.silo.session.resident_trainer", "trainer"),
    ) if word in words), "virtual" if os.environ.get("PATH_HERE") == str(os.getpid()) else None)
    mine, seen = os.getpid(), set()
    notes = role and open(os.path.join(folder, f"{role}-{mine}.txt"), "a", buffering=1)
def note(frame, event, argument):
    if flag[0] and event == "call":
        if mine != os.getpid():
            begin()
        code = frame.f_code
        if notes and code not in seen:
            seen.add(code)
            if code.co_filename.startswith(root):
                notes.write(f"{code.co_filename[len(root):]}:{code.co_qualname}\\n")
threading.setprofile(note)
sys.setprofile(note)
"""


class _Window:
    """Switches the recording on and off, in all processes at once; follows a run."""

    def __init__(self, folder: Path) -> None:
        (folder / "flag").write_bytes(b"\0")
        with (folder / "flag").open("r+b") as file:
            self._flag = mmap.mmap(file.fileno(), 1)

    def follow(self, ledger: Ledger) -> None:
        self._flag[0] = FIRST <= len(ledger.rounds) < LAST


@contextmanager
def _hooked(folder: Path, *, here: bool) -> Iterator[None]:
    """Have the processes that are started meanwhile record, or this one."""
    spec = find_spec("fedsync")
    assert spec is not None and spec.origin is not None
    (folder / "sitecustomize.py").write_text(HOOK)
    before = dict(os.environ)
    os.environ.update(PATH_TRACE=str(folder), PATH_ROOT=str(Path(spec.origin).parent))
    if here:
        os.environ["PATH_HERE"] = str(os.getpid())
        exec(HOOK, {})  # what sitecustomize does elsewhere
    else:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), before.get("PYTHONPATH", "")])
    try:
        yield
    finally:
        sys.setprofile(None)
        os.environ.clear()
        os.environ.update(before)


def measure(runtime: Runtime, cipher: str) -> dict[str, Any]:
    """Files and functions by role of a process, and the crossings each way."""
    config = StrategyConfig.load("bsp", [*SETTINGS, f"cipher={{kind: {cipher}}}"])
    cluster = ClusterConfig.model_validate({"silos": SILOS})
    with tempfile.TemporaryDirectory(prefix="path-") as name:
        folder = Path(name)
        window = _Window(folder)
        with _hooked(folder, here=runtime is Runtime.VIRTUAL):
            runner(runtime)(config, cluster, folder / "out", listeners=[window])
        found: dict[str, set[str]] = {}
        for file in sorted(folder.glob("*-*.txt")):
            found.setdefault(file.name.partition("-")[0], set()).update(file.read_text().splitlines())
    roles = {role: _counted(calls) for role, calls in found.items()}
    way = [role for role in WAY if role in roles]
    everything = _counted(set().union(*found.values()))
    return {
        "runtime": str(runtime.value), "cipher": cipher, "files": len(everything), "crossings": max(0, len(way) - 1),
        "functions": sum(len(names) for names in everything.values()), "roles": roles,
    }  # fmt: skip


def _counted(calls: set[str]) -> dict[str, list[str]]:
    """Functions by file."""
    files: dict[str, set[str]] = {}
    for call in calls:
        file, _, name = call.partition(":")
        if "<" not in name.rpartition(".")[2]:
            files.setdefault(file, set()).add(name)
    return {file: sorted(names) for file, names in sorted(files.items())}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runtime", choices=["virtual", "local"], action="append")
    parser.add_argument("--cipher", choices=["plain", "bfv"], action="append")
    parser.add_argument("--files", action="store_true", help="also list the files of each role")
    parser.add_argument("--out", type=Path, default=Path("bench/results/path.json"))
    options = parser.parse_args(arguments)
    found = [
        measure(Runtime(runtime), cipher)
        for runtime in options.runtime or ["virtual", "local"]
        for cipher in options.cipher or ["plain", "bfv"]
    ]
    print_table(
        "what one steady BSP round of three silos passes of fedsync/",
        ("runtime", "cipher", "files", "functions", "crossings each way", "files by process"),
        [
            (*(one[key] for key in ("runtime", "cipher", "files", "functions", "crossings")),
             ", ".join(f"{role} {len(files)}" for role, files in one["roles"].items()))
            for one in found
        ],
    )  # fmt: skip
    if options.files:
        print(json.dumps([{role: list(files) for role, files in one["roles"].items()} for one in found], indent=1))
    write_json(options.out, found)


if __name__ == "__main__":
    main()
