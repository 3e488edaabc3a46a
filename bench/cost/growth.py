"""Cost of each additional silo: seconds and memory of growing federations on this machine.

Runs `fedsync run` with tiny orders (a step on a few samples), and measures its processes.

| column | is |
|---|---|
| start | from the command to the first order, when all silos have joined with loaded trainers |
| round | median time between two commits, without the first three |
| overhead an order | median time from the decision to the update, less the silo's reported work |
| server an order | processor time of SuperLink and ServerApp (with the hub) during the rounds, per order |
| idle | processor time of both while one silo works long and others wait, less that without the others |
| a silo more | memory of silos' processes (PSS: a shared page counts once), less one silo's (RSS) |

    python bench/cost/growth.py [--silos 4 8 16] [--rounds 25] [--out bench/results/growth.json]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from bench.common import print_table, write_json
from fedsync.common.processes import OWNER
from fedsync.core.actions import Commit, Dispatch
from fedsync.core.events import UpdateArrived
from fedsync.core.journal import JOURNAL, JournalEntry, read_journal
from fedsync.observe.tail import Tail

WARM_UP = 3
LIGHT = ["task={kind: digits}", "local.steps=1", "local.batch_size=8"]
LONG_S = 40.0
"""How long the one silo works while the others wait [s], and how much of that at both ends does not count."""

EDGE_S = 8.0
SERVER_WORDS = ("launch superlink", "flwr-serverapp")
SILO_WORDS = (
    "launch supernode",
    "fedsync.silo.agent.agent",
    "fedsync.silo.session.resident_trainer",
    "fedsync.common.fork_server",
)
"""Words in the command lines of processes of the server, and of silos."""


class Federation:
    """A run, and its processes.

    Args:
        folder: for its files.
        speeds: of its silos [samples/s].
        settings: of its strategy.
        name: of the strategy.
    """

    def __init__(self, folder: Path, speeds: Iterable[float], name: str, settings: Iterable[str]) -> None:
        silos = folder / "silos.yaml"
        lines = [f"  - {{name: silo-{index}, speed: {speed!r}}}" for index, speed in enumerate(speeds)]
        silos.write_text("\n".join(["silos:", *lines, ""]))
        self.out = folder / "out"
        self._begun_s = time.monotonic()
        sets = [word for each in (*LIGHT, f"min_silos={len(lines)}", *settings) for word in ("--set", each)]
        command = [sys.executable, "-m", "fedsync", "run", name, "--silos", str(silos), "--out", str(self.out)]
        self._log = (folder / "log").open("w+")
        self._process = subprocess.Popen([*command, *sets], stdout=self._log, stderr=subprocess.STDOUT)

    @property
    def ended(self) -> bool:
        if self._process.poll() not in (None, 0):
            self._log.seek(0)
            raise SystemExit(f"the run failed: {self._log.read()[-2000:]}")
        return self._process.returncode == 0

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._begun_s

    def processes(self, *words: str) -> list[psutil.Process]:
        """Those whose command line has one of these words."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                known = any(word in " ".join(process.cmdline()) for word in words)
                if known and process.environ().get(OWNER) == str(self._process.pid):
                    found.append(process)
        return found

    def server_s(self) -> float:
        """Processor seconds of the server so far."""
        times = [process.cpu_times() for process in self.processes(*SERVER_WORDS)]
        return sum(each.user + each.system for each in times)

    def until(self, kind: type[Any], count: int) -> bool:
        """Wait for so many events or actions; False if the run ended before."""
        journal = None
        seen = 0
        while not self.ended:
            if journal is None and (self.out / JOURNAL).exists():
                journal = Tail(self.out / JOURNAL)
            for entry in () if journal is None else journal.entries():
                seen += sum(isinstance(each, kind) for each in (*entry.events, *entry.actions))
            if seen >= count:
                return True
            time.sleep(0.1)
        return False

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(300)
        self._log.close()


def rounds(silos: int, count: int) -> dict[str, float]:
    """All figures but what an idle silo costs."""
    with tempfile.TemporaryDirectory(prefix="growth-") as name:
        run = Federation(Path(name), [1e6] * silos, "lb-bsp", [f"stop.rounds={count + WARM_UP}"])
        try:
            run.until(Dispatch, silos)
            start_s = run.age_s
            run.until(Commit, WARM_UP)
            used_s = run.server_s()
            run.until(Commit, count)
            used_s = run.server_s() - used_s
            memory = beyond_first(run, silos)
            while not run.ended:
                time.sleep(0.2)
            entries = read_journal(run.out / JOURNAL)[1]
        finally:
            run.end()
    orders = (count - WARM_UP) * silos
    found = {"silos": silos, "start_s": start_s, "memory_mib": memory, **of_journal(entries)}
    return {**found, "server_ms": 1e3 * used_s / orders}


def of_journal(entries: Iterable[JournalEntry]) -> dict[str, float]:
    """Seconds of rounds, and those of an order beside its work."""
    began: dict[str, float] = {}
    commits: list[float] = []
    overheads: list[float] = []
    for entry in entries:
        for event in entry.events:
            if isinstance(event, UpdateArrived) and len(commits) >= WARM_UP:
                overheads.append(event.at_s - began[event.meta.update_id] - event.report.compute_s)
        for action in entry.actions:
            if isinstance(action, Dispatch):
                began[action.order.update_id] = entry.at_s
            elif isinstance(action, Commit):
                commits.append(entry.at_s)
    taken = [after - before for before, after in pairwise(commits[WARM_UP:])]
    return {"round_s": median(taken), "overhead_s": median(overheads)}


def beyond_first(run: Federation, silos: int) -> float:
    """MiB of each silo but the first."""
    processes = run.processes(*SILO_WORDS)
    shared = sum(process.memory_full_info().pss for process in processes)
    largest = [
        max((each.memory_info().rss for each in processes if word in " ".join(each.cmdline())), default=0)
        for word in SILO_WORDS[:3]
    ]
    return float(shared - sum(largest)) / 2**20 / max(1, silos - 1)


def idle(silos: int) -> float:
    """Share of a core that the server uses while one silo works for long and the others wait."""
    with tempfile.TemporaryDirectory(prefix="growth-") as name:
        run = Federation(Path(name), [8 / LONG_S, *[1e6] * (silos - 1)], "fedavg", ["stop.rounds=1"])
        try:
            run.until(UpdateArrived, silos - 1)
            if silos == 1:
                run.until(Dispatch, 1)
            time.sleep(EDGE_S)
            used_s, begun_s = run.server_s(), time.monotonic()
            time.sleep(LONG_S - 2 * EDGE_S)
            return (run.server_s() - used_s) / (time.monotonic() - begun_s)
        finally:
            run.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--silos", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", type=Path, default=Path("bench/results/growth.json"))
    options = parser.parse_args()
    load = os.getloadavg()[0]
    found = []
    for silos in options.silos:
        found.append(rounds(silos, options.rounds))
        print(found[-1], flush=True)
    alone, together = idle(1), idle(max(options.silos))
    waits = max(1, max(options.silos) - 1)
    print_table(
        f"lb-bsp, orders of one step; {os.cpu_count()} processors, load {load:.1f} to {os.getloadavg()[0]:.1f}",
        ("silos", "start [s]", "round [s]", "overhead an order [s]", "server an order [ms]", "a silo more [MiB]"),
        [
            (one["silos"], f"{one['start_s']:.0f}", f"{one['round_s']:.2f}", f"{one['overhead_s']:.2f}",
             f"{one['server_ms']:.1f}", f"{one['memory_mib']:.0f}")
            for one in found
        ],
    )  # fmt: skip
    print(f"an idle silo costs the server {100 * (together - alone) / waits:.3f} % of a core")
    write_json(options.out, {"load": load, "rounds": found, "idle": {"one": alone, "all": together, "waiting": waits}})


if __name__ == "__main__":
    main()
