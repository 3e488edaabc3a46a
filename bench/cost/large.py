"""Cost of a round with a large model: flwr's own FedAvg and FedSync's `local` runtime, side by side in one run.

Both are real processes on this machine, over TLS with node authentication: a SuperLink, a SuperExec, a ServerApp, one
SuperNode a silo. flwr runs as flwr deploys it: a process for every message, and polling for messages every 3 s.
FedSync's silos have an agent and a resident trainer each. The model's training costs almost nothing. The figure is the
time of a round less the slowest silo's training. The first round, in which processes start, does not count.

Memory is the kernel's peak of resident memory (VmHWM) of each process, with pages of mapped files, less that of the
same process in the same federation with a model of a thousand parameters, which has the same imports and the same
steps. Processor time is relative in the same way, summed over all processes of a kind and all rounds. Bytes are those
of loopback in a network namespace of this run, with all traffic between the server's processes, without files and Unix
sockets.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from bench.common import markdown_table, print_table, write_json
from bench.faults.soak_federation import OWN_APP, bundled
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit
from fedsync.core.events import UpdateArrived
from fedsync.core.journal import JOURNAL, read_journal
from fedsync.flower.process_environment import flower_environment
from fedsync.ops import local, runs
from fedsync.ops.programs import CONNECTION

TINY = 1_000
"""Parameters of the model beside which memory is counted."""

TINY_ROUNDS = 3
PATIENCE_S = 1800.0
MIB = 2**20
KINDS = {
    "ServerApp": ("serverapp",),
    "SuperLink": ("superlink",),
    "SuperNode": ("supernode",),
    "agent": ("fedsync.silo.agent.agent",),
    "ClientApp or trainer": ("clientapp", "fedsync.silo.session.resident_trainer"),
}
"""Processes by a word of their command lines; the first that fits counts."""

_NAMESPACE = ("unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


@dataclass(slots=True)
class Side:
    """What one federation took.

    Args:
        rounds_s: seconds of each round, training apart.
        peak: most bytes that were resident in a process, by kind; the largest of its kind.
        own: the same without the pages of mapped files, as far as looking ten times a second finds it.
        traffic: bytes on loopback a round, or None where there is no namespace of its own.
        cpu_s: processor seconds of all processes of a kind, as far as looking ten times a second finds them.
    """

    rounds_s: list[float]
    peak: dict[str, int] = field(default_factory=dict)
    own: dict[str, int] = field(default_factory=dict)
    traffic: float | None = None
    cpu_s: dict[str, float] = field(default_factory=dict)


class Processes:
    """Watches the memory of all that this process has started, in a thread, until the end."""

    def __init__(self) -> None:
        self.peak: dict[str, int] = dict.fromkeys(KINDS, 0)
        self.own: dict[str, int] = dict.fromkeys(KINDS, 0)
        self._cpu_s: dict[tuple[str, int], float] = {}
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def cpu_s(self) -> dict[str, float]:
        """Processor seconds by kind."""
        return {kind: sum(each for (of, _), each in [*self._cpu_s.items()] if of == kind) for kind in KINDS}

    def _watch(self) -> None:
        known: dict[int, str | None] = {}
        while True:
            # A process may become another program soon after its start, and is looked at again.
            for each in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    known[each.pid] = _kind(each.cmdline())
            for _ in range(5):
                for pid, kind in known.items():
                    if kind is not None:
                        self._look(pid, kind)
                time.sleep(0.1)

    def _look(self, pid: int, kind: str) -> None:
        with suppress(OSError, ValueError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            found = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)
                     if name in ("VmHWM", "RssAnon")}  # fmt: skip
            self.peak[kind] = max(self.peak[kind], found.get("VmHWM", 0))
            self.own[kind] = max(self.own[kind], found.get("RssAnon", 0))
            ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            self._cpu_s[kind, pid] = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def _kind(command: Sequence[str]) -> str | None:
    text = " ".join(command[:5])  # the fifth names the program where Python starts it: python -P -m MODULE superlink
    return next((kind for kind, words in KINDS.items() if any(word in text for word in words)), None)


def fedsync_side(folder: Path, silos: int, model: str, rounds: int, settings: Sequence[str]) -> list[float]:
    """Seconds of each round of the `local` runtime, training apart."""
    task = f"{{kind: custom, file: {Path(__file__).with_name('large_model.py')}, options: {{{model}}}}}"
    usual = [f"task={task}", "local.steps=1", "local.batch_size=8", f"stop.rounds={rounds}"]
    config = StrategyConfig.load("fedavg", [*usual, *settings])
    machines = [{"name": f"silo-{index}", "speed": 1e6} for index in range(silos)]
    local.run_local(config, ClusterConfig.model_validate({"silos": machines}), folder)
    computed: dict[str, float] = {}
    commits: list[tuple[float, float]] = []
    for entry in read_journal(folder / JOURNAL)[1]:
        for event in entry.events:
            if isinstance(event, UpdateArrived):
                computed[event.meta.update_id] = event.report.compute_s
        for action in entry.actions:
            if isinstance(action, Commit):
                commits.append((entry.at_s, max(computed[update] for update in action.weights)))
    return _apart(commits)


def flwr_side(folder: Path, silos: int, parameters: int, rounds: int) -> list[float]:
    """Seconds of each round of flwr's own FedAvg, training apart."""
    times = folder / "times.json"
    with tempfile.TemporaryDirectory(prefix="large-") as home:
        processes = local._Processes(folder / "logs", flower_environment(Path(home)))
        try:
            server = local._server(Path(home))
            nodes = local._start_server(processes, server, [f"silo-{index}" for index in range(silos)])
            local._start_silos(processes, server, nodes, {}, None)
            settings = {"parameters": parameters, "silos": silos, "rounds": rounds, "times": str(times)}
            with (
                bundled(OWN_APP, "bench.cost.large_flwr:server"),
                bundled("fedsync.flower.client_app:app", "bench.cost.large_flwr:client"),
            ):
                bundle = runs.write_bundle(Path(home) / "app", settings)
            runs.submit(bundle, CONNECTION, flower_environment(Path(home)))
            end_s = time.monotonic() + PATIENCE_S
            while not times.exists():
                processes.check()
                if time.monotonic() > end_s:
                    raise SystemExit(f"flwr's run did not end in {PATIENCE_S:g} s; see {folder / 'logs'}")
                time.sleep(0.2)
            time.sleep(0.5)
        finally:
            processes.stop(over=True)
    found = json.loads(times.read_text(encoding="utf-8"))
    return _apart([(each["at_s"], each["compute_s"]) for each in found[1:]])  # the first is before any round


def _apart(ends: Sequence[tuple[float, float]]) -> list[float]:
    """Seconds of each round but the first, without training, from when each ended and how long its training took."""
    return [end_s - before_s - compute_s for (before_s, _), (end_s, compute_s) in pairwise(ends)]


def _traffic() -> int:
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("lo:"))


def case(options: argparse.Namespace) -> Side:
    """One federation, in this process's namespace."""
    seen = Processes()
    before = _traffic()
    with tempfile.TemporaryDirectory(prefix="large-") as name:
        folder = Path(name)
        if options.case == "flwr":
            rounds_s = flwr_side(folder, options.silos, options.parameters, options.rounds)
        else:
            settings = [f"cipher={{kind: {options.cipher}}}", *options.set]
            model = f"parameters: {options.parameters}, frozen: {options.frozen}"
            rounds_s = fedsync_side(folder, options.silos, model, options.rounds, settings)
    traffic = (_traffic() - before) / options.rounds if options.apart else None
    return Side(rounds_s, seen.peak, seen.own, traffic, seen.cpu_s)


def run(options: argparse.Namespace, which: str, parameters: int, frozen: int, rounds: int) -> Side:
    """One federation, in a process and, where that may be, in a network of its own."""
    apart = subprocess.run([*_NAMESPACE, "true"], capture_output=True, check=False).returncode == 0
    with tempfile.TemporaryDirectory(prefix="large-") as folder:
        out = Path(folder) / "side.json"
        command = [sys.executable, __file__, "--case", which, "--out", str(out), "--cipher", options.cipher]
        command += ["--silos", str(options.silos), "--parameters", str(parameters), "--rounds", str(rounds)]
        command += ["--frozen", str(frozen)]
        command += [*(["--apart"] if apart else []), *(part for each in options.set for part in ("--set", each))]
        subprocess.run([*(_NAMESPACE if apart else ()), *command], check=True)
        return Side(**json.loads(out.read_text(encoding="utf-8")))


def figures(whole: Side, tiny: Side, model_bytes: int) -> dict[str, float]:
    """One side's column; memory and bytes as multiples of the model.

    Raises:
        SystemExit: a kind of process was never seen, so its row would be 0.
    """
    unseen = [kind for kind in KINDS if not whole.peak[kind] and kind != "agent"]  # flwr has none
    if unseen:
        raise SystemExit(f"No process was recognised as {', '.join(unseen)}; compare KINDS with their command lines")
    found = {"seconds a round": median(whole.rounds_s)}
    for kind in KINDS:
        more_s = whole.cpu_s[kind] - tiny.cpu_s[kind]
        found[f"{kind}, processor seconds a round"] = more_s / (len(whole.rounds_s) + 1)
        found[f"{kind}, MiB beyond an idle one"] = (whole.peak[kind] - tiny.peak[kind]) / MIB
        found[f"{kind}, x the model"] = (whole.peak[kind] - tiny.peak[kind]) / model_bytes
        found[f"{kind}, without mapped files"] = (whole.own[kind] - tiny.own[kind]) / model_bytes
    if whole.traffic is not None:
        found["bytes on loopback a round, x the model"] = whole.traffic / model_bytes
    return found


def _rows(sides: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    one, other = sides["flwr"], sides.get("fedsync", sides["flwr"])
    return [
        [name, f"{one[name]:.2f}", f"{other[name]:.2f}", f"{one[name] / other[name]:.2f} x" if other[name] else "-"]
        for name in one
        if name in other
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--silos", type=int, default=2)
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument(
        "--frozen", type=int, default=0, help="of the parameters, those that do not travel; FedSync only"
    )
    parser.add_argument("--rounds", type=int, default=8, help="with the first one, which does not count")
    parser.add_argument(
        "--cipher",
        choices=("plain", "bfv", "masked", "pad"),
        default="plain",
        help="of FedSync; masked wants three silos",
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of FedSync's strategy")
    parser.add_argument("--sides", nargs="+", choices=("flwr", "fedsync"), default=["flwr", "fedsync"])
    parser.add_argument("--out", type=Path, default=Path("bench/results/large.json"))
    parser.add_argument("--case", choices=("flwr", "fedsync"), help=argparse.SUPPRESS)
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        write_json(options.out, asdict(case(options)))
        return
    model_bytes = 4 * (options.parameters - options.frozen)
    measured: dict[str, Any] = {}
    for which in options.sides:
        tiny = run(options, which, TINY, 0, TINY_ROUNDS)
        whole = run(options, which, options.parameters, options.frozen, options.rounds)
        measured[which] = {"figures": figures(whole, tiny, model_bytes), "whole": asdict(whole), "idle": asdict(tiny)}
    columns = ("", "flwr's FedAvg", f"FedSync, {' '.join([options.cipher, *options.set])}", "flwr's is")
    found = {which: side["figures"] for which, side in measured.items()}
    if len(found) == 1:
        (which, side), columns = next(iter(found.items())), columns[:1]
        rows = [[name, f"{value:.2f}"] for name, value in side.items()]
        columns = ("", which)
    else:
        rows = _rows(found)
    size = f"{options.parameters / 1e6:g} M parameters, of which {model_bytes / MIB:.0f} MiB travel"
    title = f"{options.silos} silos, {size}, TLS on both sides"
    print_table(title, columns, rows)
    print(markdown_table(columns, rows))
    arguments = {name: getattr(options, name) for name in ("silos", "parameters", "frozen", "rounds", "cipher", "set")}
    write_json(options.out, {"arguments": arguments, **measured})


if __name__ == "__main__":
    main()
