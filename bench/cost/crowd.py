"""Cost of hundreds of silos at one server: work, memory and files, with a load generator that speaks their protocol.

The server (`bench/cost/crowd_server.py`) is a real ServerApp with its hub, TLS and sessions. Only the SuperLink is
missing, which would carry each silo's join and heartbeats. All silos are one process (`bench/cost/crowd_silos.py`) and
train nothing. A commit takes a fixed number of updates in order of arrival (`fedbuff`), in the clear or encrypted.
The load generator uses all of the machine that it can get, so the seconds of a commit are those of server and generator
together. Milliseconds are processor time. `hub.py` measures the cost of a waiting silo.

| figure | is |
|---|---|
| an order | processor time of the ServerApp and of all silos, per committed update |
| overhead an order | median time from the decision to the update, less the silo's reported work |
| memory, files | of these processes after each fifth of the commits, and the maximum in between |

    python bench/cost/crowd.py [--silos 100 --commit 200] [--sealed] [--commits 20]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import yaml

from bench.common import print_table, write_json
from bench.cost.growth import of_journal
from fedsync.cipher.keys.authority import emulated_keys
from fedsync.common.processes import OWNER, end_processes
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit
from fedsync.core.journal import JOURNAL, read_journal
from fedsync.identity.certificates import make_authority, make_server_certificate
from fedsync.observe.tail import Tail
from fedsync.ops.runs import prepare_run
from fedsync.server.run_folder import HUB, HubPlace

START_S, LOOK_S, WARM_UP = 900.0, 0.2, 1


@dataclass(frozen=True, slots=True)
class Sample:
    """How the server was at a time.

    Args:
        at_s: when.
        commits: so far.
        updates: in them.
        app_s: processor time of the ServerApp.
        silos_s: that of all silos.
        app_mib: resident memory.
        silos_mib: of all silos.
        lines: connections to the hub.
    """

    at_s: float
    commits: int
    updates: int
    app_s: float
    silos_s: float
    app_mib: float
    silos_mib: float
    lines: int


class Server:
    """A server's run, and its silos.

    Args:
        folder: for all files.
        silos: how many.
        strategy: of the run.
        regions: silos of each relay, which come to it and not to the server.
    """

    def __init__(
        self, folder: Path, silos: int, strategy: StrategyConfig, regions: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        self.folder, self.out, self._silos = folder, folder / "run", silos
        names = [f"silo-{index}" for index in range(silos)]
        authority = make_authority(folder / "authority")
        files = make_server_certificate(authority, [], folder / "server")
        sealed = strategy.cipher.kind != "plain"
        keys = str(emulated_keys(names, folder / "keys").server_file) if sealed else ""
        paths = str(files.certificate), str(files.key), str(authority.certificate)
        HubPlace("127.0.0.1", (0,), "127.0.0.1", *paths).save(folder / "hub.json")
        self.out.mkdir()
        settings = prepare_run(self.out, self.out, strategy, keys=keys, regions=regions)
        told = {"settings": settings, "nodes": [*(regions or names)], "keys": keys}
        (folder / "told.yaml").write_text(yaml.safe_dump(told))
        self._journal: Tail | None = None
        self._commits = self._updates = 0
        self._processes: list[psutil.Popen] = []
        self._used = [(0.0, 0.0, 0)] * 2

    def start(self, *arguments: str) -> None:
        """Start the server, and silos with these arguments."""
        self._start("crowd_server")
        self._start("crowd_silos", "--silos", str(self._silos), *arguments)

    def _start(self, module: str, *arguments: str) -> None:
        command = [sys.executable, "-c", f"from bench.cost.{module} import main; main()", str(self.folder), *arguments]
        with (self.folder / f"{module}.out").open("ab") as out:
            self._processes.append(
                psutil.Popen(
                    command,
                    env={**os.environ, HUB: str(self.folder / "hub.json"), OWNER: str(os.getpid())},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def samples(self, commits: int, look: Callable[[Sample], object]) -> list[Sample]:
        """Looks at it, one after the other, until it has come so far."""
        found, began_s = [self._sample()], time.monotonic()
        while found[-1].commits < commits:
            late = not self._commits and time.monotonic() > began_s + START_S
            if late or any(each.poll() for each in self._processes):
                logs = [each.read_text()[-2000:] for each in self.folder.glob("*.out")]
                raise SystemExit(f"the run does not go on: {logs}")
            time.sleep(LOOK_S)
            found.append(self._sample())
            look(found[-1])
        return found

    def _sample(self) -> Sample:
        if self._journal is None and (self.out / JOURNAL).exists():
            self._journal = Tail(self.out / JOURNAL)
        for entry in () if self._journal is None else self._journal.entries():
            for action in entry.actions:
                if isinstance(action, Commit):
                    self._commits += 1
                    self._updates += len(action.weights)
        self._used = [_used(each) or before for each, before in zip(self._processes, self._used, strict=True)]
        (app_s, app_mib, lines), (silos_s, silos_mib, _) = self._used
        return Sample(
            time.monotonic(), self._commits, self._updates, app_s, silos_s, app_mib, silos_mib, max(lines - 1, 0)
        )

    def end(self) -> None:
        end_processes(list(reversed(self._processes)))


def _used(process: psutil.Process) -> tuple[float, float, int] | None:
    """Processor seconds so far, resident MiB, and sockets; None where it has ended."""
    with suppress(psutil.Error):
        times = process.cpu_times()
        return times.user + times.system, process.memory_info().rss / 2**20, len(process.net_connections("tcp"))
    return None


def of_an_order(samples: Sequence[Sample]) -> tuple[float, float]:
    """Processor time of the ServerApp and of all silos for an update, but of the first commits [ms]."""
    first, last = next(each for each in samples if each.commits >= WARM_UP), samples[-1]
    updates = max(1, last.updates - first.updates)
    return 1e3 * (last.app_s - first.app_s) / updates, 1e3 * (last.silos_s - first.silos_s) / updates


def measured(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """All figures of a crowd."""
    settings = ["task={kind: digits}", f"min_silos={options.silos}"]
    settings += [f"barrier={{kind: buffered, size: {options.commit}}}", f"stop.rounds={options.commits}"]
    settings += ["local.steps=1", "local.batch_size=8", *(["cipher={kind: bfv, bits: 16}"] if options.sealed else [])]
    settings += ["aggregation={kind: fedbuff, server_rate: 1.0, staleness: {kind: constant}}"]
    server = Server(folder, options.silos, StrategyConfig.load("fedbuff", settings))
    try:
        server.start("--work", str(options.work))
        samples = server.samples(options.commits, print if options.verbose else id)
        overhead_s = of_journal(read_journal(server.out / JOURNAL)[1])["overhead_s"]
        return {"samples": [asdict(each) for each in samples], "overhead_s": overhead_s}
    finally:
        server.end()


def report(options: argparse.Namespace, found: dict[str, object]) -> None:
    samples = [Sample(**each) for each in found["samples"]]  # type: ignore[attr-defined]
    first, last = next(each for each in samples if each.commits >= WARM_UP), samples[-1]
    rows, before = [], samples[0]
    for part in range(1, 6):
        each = next(each for each in samples if each.commits >= max(WARM_UP, options.commits * part / 5))
        most_mib = max(other.app_mib for other in samples if before.at_s <= other.at_s <= each.at_s)
        figures = (f"{each.app_mib:.0f}", f"{most_mib:.0f}", each.lines, f"{each.silos_mib:.0f}")
        rows.append((part, each.commits, *figures))
        before = each
    kind = "sealed" if options.sealed else "plain"
    print_table(
        f"{options.silos} silos, {kind}, commits of {options.commit}, 10,026 parameters; "
        f"{os.cpu_count()} processors, load {found['load']:.1f} to {os.getloadavg()[0]:.1f}",
        ("fifths", "commits", "ServerApp [MiB]", "most since the last [MiB]", "connections", "all silos [MiB]"),
        rows,
    )
    print(f"the first commit after {first.at_s - samples[0].at_s:.0f} s, with {first.app_s:.1f} s of processor time")
    commits, updates, seconds = last.commits - first.commits, last.updates - first.updates, last.at_s - first.at_s
    print(f"{commits / seconds:.2f} commits and {updates / seconds:.1f} updates a second")
    app_ms, silos_ms = of_an_order(samples)
    print(f"overhead an order: {found['overhead_s']:.2f} s")
    print(f"an order: ServerApp {app_ms:.1f} ms, its silo {silos_ms:.1f} ms of processor time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--silos", type=int, default=100)
    parser.add_argument("--sealed", action="store_true")
    parser.add_argument("--commit", type=int, default=0, help="updates of a commit; as many as silos, at most 200")
    parser.add_argument("--commits", type=int, default=20)
    parser.add_argument("--work", type=float, default=0.0, help="seconds that an order takes at its silo")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("bench/results/crowd.json"))
    options = parser.parse_args()
    options.commit = options.commit or min(options.silos, 200)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="crowd-") as name:
        found = {**measured(options, Path(name)), "load": load}
    report(options, found)
    write_json(options.out, found)


if __name__ == "__main__":
    main()
