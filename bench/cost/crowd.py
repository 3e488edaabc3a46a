"""What a crowd of silos costs one server: work, memory and files, with a load generator that speaks their protocol.

The server is a real one, `fedsync server start`, with TLS, node authentication and its gate; it starts the run's app
as any other. All silos are one process (`bench/cost/crowd_silos.py`), in which nothing is trained. Updates are
committed as they come, so many at a time (`fedbuff`), in the clear or sealed. The generator takes as much of the
machine as it can, so a commit's seconds say what both of them reach together; milliseconds are processor time.

| figure | is |
|---|---|
| an idle silo | processor time of the SuperLink with silos that wait, less that without: mean, and most with 95 % |
| an order | processor time of SuperLink, ServerApp and all silos, by the updates that are committed meanwhile |
| overhead an order | median of: from the decision to its update, less what the silo says that it worked |
| memory, files | of these processes after each fifth of the commits; of the SuperLink also the most in between |

    python bench/cost/crowd.py [--silos 100 --commit 200] [--sealed] [--commits 20] [--idle 60]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from bench.common import print_table, write_json
from bench.cost.crowd_silos import READY
from bench.cost.growth import of_journal
from fedsync.cipher.keys.emulated import emulated_keys
from fedsync.common.processes import end_processes, free_ports
from fedsync.config.server_start import ServerStartConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit
from fedsync.core.journal import JOURNAL, read_journal
from fedsync.flower.run_folder import PID_FILE
from fedsync.identity.certificates import make_authority, make_server_certificate
from fedsync.identity.node_keys import make_node_key
from fedsync.observe.tail import Tail
from fedsync.ops.programs import DATABASE
from fedsync.ops.registration_loop import DONE
from fedsync.ops.runs import submit_run
from fedsync.ops.supervisor_loop import HEALTH_FILE

START_S, SETTLE_S, WARM_UP = 900.0, 20.0, 1
WINDOW_S = 5.0
_SILOS = "from bench.cost.crowd_silos import main; main()"
LINES_OF_ONE = 3
"""Connections of a silo: one that is held, one for a heartbeat, and one to spare."""


@dataclass(frozen=True, slots=True)
class Sample:
    """How the server was at a time.

    Args:
        at_s: when.
        commits: so far.
        updates: in them.
        superlink_s: processor time of the SuperLink.
        app_s: that of the ServerApp.
        silos_s: that of all silos.
        superlink_mib: resident memory.
        app_mib: likewise.
        silos_mib: of all silos.
        lines: connections to the SuperLink.
        database_mib: with its log.
    """

    at_s: float
    commits: int
    updates: int
    superlink_s: float
    app_s: float
    silos_s: float
    superlink_mib: float
    app_mib: float
    silos_mib: float
    lines: int
    database_mib: float


class Server:
    """A server with its keys and those of its silos.

    Args:
        folder: for all files.
        silos: how many.
        sealed: whether runs are encrypted.
        regions: silos of each relay; those come to their relay, and not here.
    """

    def __init__(
        self, folder: Path, silos: int, *, sealed: bool, regions: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        self.folder = folder
        names = [f"silo-{index}" for index in range(silos)]
        (self.port,) = free_ports(1)
        certificates = folder / "certs"
        make_server_certificate(make_authority(certificates), ["localhost"], certificates)
        keys = {name: str(make_node_key(name, folder / "nodes").public) for name in regions or names}
        relays = {name: {"key": keys[name], "silos": list(silos)} for name, silos in (regions or {}).items()}
        # All silos come from one address, as through a proxy.
        gate = {"connections": max(1000, LINES_OF_ONE * silos), "connections_per_address": 0}
        told = {"host": "127.0.0.1", "port": self.port, "certificates": "certs", "state": "server"}
        file = folder / "server.yaml"
        cipher = {"keys": str(emulated_keys(names, folder / "keys").server_file)} if sealed else {}
        nodes = {"relays": relays} if regions else {"silos": keys}
        file.write_text(yaml.safe_dump({**told, **cipher, "gate": gate, **nodes}))
        self.config = ServerStartConfig.load(file)
        self.out = folder / "run"
        self._journal: Tail | None = None
        self._commits = self._updates = 0
        self._processes = [self._started("server", "-m", "fedsync", "server", "start", "--server", str(file))]

    def _started(self, log: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{log}.out").open("ab") as out:
            return subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def crowd(self, silos: int, *arguments: str, program: str = _SILOS) -> None:
        """Start the silos; returns when all are there."""
        told = ["--port", str(self.port), "--silos", str(silos), "--parent", str(os.getpid()), *arguments]
        self._processes.append(self._started("silos", "-c", program, str(self.folder), *told))
        self.until("silos that are there", (self.folder / READY).exists)

    def until(self, what: str, there: object) -> float:
        """Wait for something; returns the seconds that it took."""
        began_s = time.monotonic()
        while not there():  # type: ignore[operator]
            if time.monotonic() > began_s + START_S or any(each.poll() is not None for each in self._processes):
                logs = [each.read_text()[-2000:] for each in self.folder.glob("*.out")]
                raise SystemExit(f"no {what}: {logs}")
            time.sleep(0.2)
        return time.monotonic() - began_s

    def registered(self, silos: int) -> bool:
        """Whether all silos may come."""
        health = Path(self.config.state) / HEALTH_FILE
        told = json.loads(health.read_text()).get("silos", {}) if health.exists() else {}
        return list(told.values()).count(DONE) == silos

    def sample(self) -> Sample:
        links, apps = self._superlink(), self._app()
        silos = psutil.Process(self._processes[1].pid) if len(self._processes) > 1 else None
        used = [_used(each) for each in (links, apps, silos)]
        sizes = [_resident_mib(each) for each in (links, apps, silos)]
        if self._journal is None and (self.out / JOURNAL).exists():
            self._journal = Tail(self.out / JOURNAL)
        for entry in () if self._journal is None else self._journal.entries():
            for action in entry.actions:
                if isinstance(action, Commit):
                    self._commits += 1
                    self._updates += len(action.weights)
        stored = sum(each.stat().st_size for each in (self.folder / "server").glob(f"{DATABASE}*"))
        figures: tuple[Any, ...] = time.monotonic(), self._commits, self._updates, *used, *sizes
        return Sample(*figures, lines=len(links.net_connections("tcp")) - 1, database_mib=stored / 2**20)

    def _superlink(self) -> psutil.Process:
        for process in psutil.Process(self._processes[0].pid).children(recursive=True):
            with suppress(psutil.Error):
                if "launch superlink" in " ".join(process.cmdline()):
                    return process
        raise SystemExit(f"there is no SuperLink: {(self.folder / 'fedsync.out').read_text()[-2000:]}")

    def _app(self) -> psutil.Process | None:
        with suppress(psutil.Error, FileNotFoundError, ValueError):
            return psutil.Process(int((self.out / PID_FILE).read_text()))
        return None

    def idle(self, seconds: float) -> list[float]:
        """Shares of a core that the SuperLink takes now, by window."""
        superlink, shares = self._superlink(), list[float]()
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            used_s, begun_s = _used(superlink), time.monotonic()
            time.sleep(WINDOW_S)
            shares.append((_used(superlink) - used_s) / (time.monotonic() - begun_s))
        return shares

    def submit(self, silos: int, commit: int, commits: int, *, sealed: bool) -> None:
        settings = ["task={kind: digits}", f"min_silos={silos}", f"barrier={{kind: buffered, size: {commit}}}"]
        settings += ["local.steps=1", "local.batch_size=8", f"stop.rounds={commits}"]
        settings += ["aggregation={kind: fedbuff, server_rate: 1.0, staleness: {kind: constant}}"]
        settings += ["cipher={kind: bfv, bits: 16}"] if sealed else []
        submit_run(self.config, StrategyConfig.load("fedbuff", settings), self.out)

    def end(self) -> None:
        end_processes(list(reversed(self._processes)))


def _used(process: psutil.Process | None) -> float:
    """Processor seconds so far."""
    with suppress(psutil.Error):
        return float(sum(process.cpu_times()[:2])) if process is not None else 0.0
    return 0.0


def _resident_mib(process: psutil.Process | None) -> float:
    with suppress(psutil.Error):
        return process.memory_info().rss / 2**20 if process is not None else 0.0
    return 0.0


def beyond(waiting: list[float], alone: list[float]) -> tuple[float, float]:
    """Mean of what silos that wait take, and the most of it with 95 % (Welch's interval, for normal windows)."""
    mean = statistics.fmean(waiting) - statistics.fmean(alone)
    spread = sum(statistics.variance(each) / len(each) for each in (waiting, alone)) ** 0.5
    return mean, mean + 1.645 * spread


def measured(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """All figures of a crowd."""
    silos, commits = options.silos, options.commits
    server = Server(folder, silos, sealed=options.sealed)
    found: dict[str, object] = {}
    try:
        found["registered_s"] = server.until("registration", lambda: server.registered(silos))
        time.sleep(SETTLE_S if options.idle else 0)
        found["without"] = server.idle(options.idle) if options.idle else []
        server.crowd(silos, "--work", str(options.work))
        if options.idle:
            time.sleep(SETTLE_S)
            found["idle"] = server.idle(options.idle)
            report_idle(silos, found["idle"], found["without"])  # type: ignore[arg-type]
        samples = [server.sample()]
        server.submit(silos, options.commit, commits, sealed=options.sealed)
        while samples[-1].commits < commits:
            server.until("another second", iter((False, False, False, False, False, True)).__next__)
            samples.append(server.sample())
            if options.verbose:
                print(samples[-1], flush=True)
        found["samples"] = [asdict(each) for each in samples]
        found["overhead_s"] = of_journal(read_journal(server.out / JOURNAL)[1])["overhead_s"]
    finally:
        server.end()
    return found


def report_idle(silos: int, waiting: list[float], alone: list[float]) -> None:
    mean, most = (100 * each / silos for each in beyond(waiting, alone))
    without = 100 * statistics.fmean(alone)
    print(
        f"an idle silo: {mean:.4f} % of a core, at most {most:.4f} % (95 %); without silos {without:.1f} %", flush=True
    )


def report(options: argparse.Namespace, found: dict[str, object]) -> None:
    samples = [Sample(**each) for each in found["samples"]]  # type: ignore[attr-defined]
    first = next(each for each in samples if each.commits >= WARM_UP)
    last = samples[-1]
    by_fifth = [
        (part, next(each for each in samples if each.commits >= max(WARM_UP, options.commits * part / 5)))
        for part in range(1, 6)
    ]
    updates, seconds = max(1, last.updates - first.updates), last.at_s - first.at_s
    kind = "sealed" if options.sealed else "plain"
    print_table(
        f"{options.silos} silos, {kind}, commits of {options.commit}, 10,026 parameters; "
        f"{os.cpu_count()} processors, load {found['load']:.1f} to {os.getloadavg()[0]:.1f}",
        ("fifths", "commits", "SuperLink [MiB]", "most since the last [MiB]", "ServerApp [MiB]", "database [MiB]",
         "connections", "all silos [MiB]"),
        [
            (part, each.commits, f"{each.superlink_mib:.0f}", f"{_most_mib(samples, each, options.commits / 5):.0f}",
             f"{each.app_mib:.0f}", f"{each.database_mib:.1f}", each.lines, f"{each.silos_mib:.0f}")
            for part, each in by_fifth
        ],
    )  # fmt: skip
    print(f"registered after {found['registered_s']:.0f} s")
    joined_s, joining_s = first.at_s - samples[0].at_s, first.superlink_s - samples[0].superlink_s
    print(f"the first commit after {joined_s:.0f} s, with {joining_s:.1f} s of processor time of the SuperLink")
    print(f"{(last.commits - first.commits) / seconds:.2f} commits and {updates / seconds:.1f} updates a second")
    print(f"overhead an order: {found['overhead_s']:.2f} s")
    link_ms = 1e3 * (last.superlink_s - first.superlink_s) / updates
    app_ms = 1e3 * (last.app_s - first.app_s) / updates
    silos_ms = 1e3 * (last.silos_s - first.silos_s) / updates
    print(
        f"an order: SuperLink {link_ms:.1f} ms, ServerApp {app_ms:.1f} ms, its silo {silos_ms:.1f} ms of processor time"
    )


def _most_mib(samples: list[Sample], last: Sample, commits: float) -> float:
    """Most memory of the SuperLink in the so many commits that end with a sample."""
    span = (each for each in samples if last.commits - commits < each.commits and each.at_s <= last.at_s)
    return max(each.superlink_mib for each in span)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--silos", type=int, default=100)
    parser.add_argument("--sealed", action="store_true")
    parser.add_argument("--commit", type=int, default=0, help="updates of a commit; as many as silos, at most 200")
    parser.add_argument("--commits", type=int, default=20)
    parser.add_argument("--work", type=float, default=0.0, help="seconds that an order takes at its silo")
    parser.add_argument("--idle", type=float, default=60.0, help="seconds to measure silos that wait; 0 for none")
    parser.add_argument("--keep", type=Path, help="a new folder for all files; by default one that is removed")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("bench/results/crowd.json"))
    options = parser.parse_args()
    options.commit = options.commit or min(options.silos, 200)
    load = os.getloadavg()[0]
    if options.keep is not None:
        options.keep.mkdir(mode=0o700, parents=True)
        found = measured(options, options.keep.resolve())
    else:
        with tempfile.TemporaryDirectory(prefix="crowd-") as name:
            found = measured(options, Path(name))
    found["load"] = load
    report(options, found)
    write_json(options.out, found)


if __name__ == "__main__":
    main()
