"""SuperNodes that one stock SuperLink carries: processor time and memory of both while no run is active.

Starts Flower's own SuperLink on loopback, adds SuperNodes up to each number in turn, and measures for some seconds
after the last one has connected.

| column | is |
|---|---|
| connected | seconds from the start of the added SuperNodes until each has its node ID |
| SuperLink | processor time a minute, and memory (PSS: a shared page counts once) |
| a SuperNode | the same, mean over all SuperNodes |
| full at | number of SuperNodes at which the SuperLink would take one core, if its work grows by the slope |

The slope is the line of least squares through processor time by number of SuperNodes.

    python bench/cost/supernodes.py [--nodes 4 8 16 32] [--seconds 60] [--out bench/results/supernodes.json]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from bench.common import print_table, write_json
from fedsync.common.processes import free_ports

CONNECTED = "SuperNode ID:"
PATIENCE_S = 600.0
"""Longest wait until all SuperNodes have connected [s]."""


class Network:
    """A SuperLink and its SuperNodes, each a process with a log in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (self._port,) = free_ports(1)
        self._started: list[psutil.Popen] = []
        host = ("--host", "127.0.0.1", "--port", str(self._port), "--insecure", "--isolation", "process")
        self.superlink = self._start("superlink", *host)
        time.sleep(5)
        self.nodes: list[psutil.Popen] = []

    def grow(self, count: int) -> float:
        """Add SuperNodes until there are ``count``; return the seconds until the last one has connected."""
        began_s = time.monotonic()
        for at, port in enumerate(free_ports(count - len(self.nodes)), start=len(self.nodes)):
            here = ("--port", str(port), "--isolation", "process")
            self.nodes.append(
                self._start("supernode", "--superlink", f"127.0.0.1:{self._port}", "--insecure", *here, log=at)
            )
        while sum(CONNECTED in log.read_text() for log in self._folder.glob("supernode*")) < count:
            if time.monotonic() - began_s > PATIENCE_S or any(each.poll() is not None for each in self._started):
                raise SystemExit(f"only some of {count} SuperNodes connected; see the logs in {self._folder}")
            time.sleep(0.5)
        return time.monotonic() - began_s

    def end(self) -> None:
        for process in reversed(self._started):
            process.terminate()
        _, left = psutil.wait_procs(self._started, timeout=20)
        for survivor in left:
            survivor.kill()

    def _start(self, program: str, *options: str, log: int | str = "") -> psutil.Popen:
        environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1"}
        environment["FLWR_HOME"] = str(self._folder / "flwr")
        command = [str(Path(sys.executable).with_name(f"flower-{program}")), *options]
        with (self._folder / f"{program}{log}.log").open("w") as file:
            process = psutil.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        self._started.append(process)
        return process


def family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def cpu_s(process: psutil.Process) -> float:
    """Processor time of a process and its children so far [s]."""
    return sum(times.user + times.system for times in (each.cpu_times() for each in family(process)))


def mib(process: psutil.Process) -> float:
    """Memory of a process and its children, PSS [MiB]."""
    return sum(each.memory_full_info().pss for each in family(process)) / 2**20


def measured(network: Network, count: int, seconds: float) -> dict[str, float]:
    connected_s = network.grow(count)
    time.sleep(10)  # the first requests of a SuperNode are not idle ones
    every = [network.superlink, *network.nodes]
    before, began_s = [cpu_s(process) for process in every], time.monotonic()
    time.sleep(seconds)
    minutes = (time.monotonic() - began_s) / 60
    link, *nodes = ((cpu_s(process) - old) / minutes for process, old in zip(every, before, strict=True))
    return {
        "nodes": count,
        "connected_s": connected_s,
        "superlink_cpu_s_a_minute": link,
        "superlink_mib": mib(network.superlink),
        "supernode_cpu_s_a_minute": float(np.mean(nodes)),
        "supernode_mib": float(np.mean([mib(process) for process in network.nodes])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", nargs="+", type=int, default=[4, 8, 16, 32])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement")
    parser.add_argument("--out", type=Path, default=Path("bench/results/supernodes.json"))
    options = parser.parse_args()
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="fedsync-") as folder:
        network = Network(Path(folder))
        try:
            for count in sorted(options.nodes):
                rows.append(measured(network, count, options.seconds))
                print(f"{count} SuperNodes measured", flush=True)
        finally:
            network.end()
    print_table(
        "idle SuperNodes of one SuperLink (processor seconds a minute, MiB)",
        ("SuperNodes", "connected s", "SuperLink cpu", "SuperLink MiB", "a SuperNode cpu", "a SuperNode MiB"),
        [
            [f"{value:.0f}" if at in (0, 3, 5) else f"{value:.2f}" for at, value in enumerate(row.values())]
            for row in rows
        ],
    )
    full_at = None
    if len(rows) > 1:
        slope, start = np.polyfit([r["nodes"] for r in rows], [r["superlink_cpu_s_a_minute"] for r in rows], 1)
        full_at = (60 - start) / slope if slope > 0 else None
        print(f"SuperLink: {slope:.3f} s a minute for each SuperNode; full at {full_at or float('inf'):.0f}")
    write_json(options.out, {"rows": rows, "full_at": full_at})


if __name__ == "__main__":
    main()
