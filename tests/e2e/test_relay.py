"""Real processes: relays with silos behind them beside a silo without one. What dies comes back, and nothing counts
twice."""

import json
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedsync import replay
from fedsync.cipher.keys.authority import emulated_keys
from fedsync.common.processes import free_ports
from fedsync.config.server_start import ServerStartConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit
from fedsync.extras.relays.relay_start import RELAY_RUN
from fedsync.identity.certificates import make_authority, make_server_certificate
from fedsync.identity.node_keys import make_node_key
from fedsync.ops.runs import RUNS, stop_run, submit_run
from fedsync.server.run_folder import PID_FILE, Phase, phase
from tests.e2e.deployed import deployed, wait_for

DIGITS = "task={kind: digits}"
CLEAR = ["local={steps: 1, batch_size: 8, threads: 1}", "stop.rounds=100000"]
SEALED = [*CLEAR, "cipher={kind: bfv, members: 2}"]
LARGE = "task={kind: mlp, hidden: [700, 700], data: {kind: blobs, samples: 400}, partition: {kind: iid}}"
"""Half a million values, 2 MB: more than goes beside a question or an answer."""


def _files(folder: Path, regions: Mapping[str, str], alone: str, *, sealed: bool) -> None:
    """Of the server, the relays, the silos behind them, and those beside them."""
    names = [*"".join(regions.values()), *alone]
    ports = dict(zip(("server", *regions), free_ports(1 + len(regions)), strict=True))
    keys = {name: make_node_key(name, folder / "nodes") for name in (*regions, *names)}
    sealing = emulated_keys(names, folder / "keys")
    for name in ports:
        make_server_certificate(make_authority(folder / f"{name}-certs"), ["localhost"], folder / f"{name}-certs")

    def own(name: str, silos: str, more: str) -> None:
        known = ", ".join(f"{silo}: {keys[silo].public}" for silo in silos)
        (folder / f"{name}.yaml").write_text(
            f"{{host: 127.0.0.1, port: {ports[name]}, certificates: {name}-certs, state: {name}, silos: {{{known}}}, "
            f"{f'keys: {sealing.server_file}, ' if sealed else ''}{more}}}"
        )

    known = [f"{name}: {{key: {keys[name].public}, silos: [{', '.join(silos)}]}}" for name, silos in regions.items()]
    own("server", alone, f"relays: {{{', '.join(known)}}}")
    for name, silos in regions.items():
        above = f"server: 'localhost:{ports['server']}', authority: server-certs/ca.crt"
        own(name, silos, f"upstream: {{name: {name}, {above}, node_key: {keys[name].private}}}")
    at = {silo: name for name, silos in regions.items() for silo in silos}
    for index, name in enumerate(names):
        above = at.get(name, "server")
        (folder / f"{name}.yaml").write_text(
            f"{{name: {name}, server: 'localhost:{ports[above]}', authority: {above}-certs/ca.crt, "
            f"node_key: {keys[name].private}, state: silo-{name}, index: {index}"
            f"{f', keys: {sealing.silos[name]}' if sealed else ''}}}"
        )


@dataclass
class Federation:
    folder: Path
    out: Path
    everyone: list[str]

    def commits(self) -> list[list[str]]:
        if not (self.out / "journal.jsonl").exists():
            return []
        found = (action for entry in replay(self.out / "journal.jsonl") for action in entry.actions)
        return [sorted(one[0] for one in each.weights) for each in found if isinstance(each, Commit)]

    def all_are_in(self, times: int = 3) -> None:
        """Wait until all silos were in so many more commits."""
        before = self.commits().count(self.everyone)
        wait_for(lambda: self.commits().count(self.everyone) >= before + times, "not all are in rounds", 300.0)

    def kill(self, relay: str, what: str) -> None:
        """Kill a relay's app, the agent that brings it the server's questions, its uplink or its SuperLink."""
        if what == "app":
            process = int((self.folder / relay / RUNS / RELAY_RUN / PID_FILE).read_text())
        else:
            process = json.loads((self.folder / relay / "health.json").read_text())["processes"][what]["pid"]
        os.kill(process, signal.SIGKILL)


@contextmanager
def _running(folder: Path, regions: Mapping[str, str], alone: str, overrides: list[str]) -> Iterator[Federation]:
    _files(folder, regions, alone, sealed=any("cipher" in each for each in overrides))
    everyone = sorted([*"".join(regions.values()), *alone])
    with deployed(folder, everyone, ("server", *regions)):
        for name in regions:
            app = folder / name / RUNS / RELAY_RUN / PID_FILE
            wait_for(app.exists, "the relay's app did not come up", 300.0)
        config = ServerStartConfig.load(folder / "server.yaml")
        strategy = StrategyConfig.load("fedavg", [f"min_silos={len(everyone)}", *overrides])
        out = submit_run(config, strategy, folder / "out")
        yield Federation(folder, out, everyone)
        stop_run(out)
        wait_for(lambda: phase(out) is Phase.OVER, "the run did not end", 120.0)
    ids = [update for entry in replay(out / "journal.jsonl") for action in entry.actions if isinstance(action, Commit)
           for update in action.weights]  # fmt: skip
    assert len(ids) == len(set(ids)), "an update counted twice"
    assert "does not count" not in (folder / "server" / "logs" / "superexec.log").read_text()


@pytest.mark.full
def test_silos_behind_a_relay_are_in_all_rounds_though_it_is_killed(tmp_path_factory: pytest.TempPathFactory) -> None:
    with _running(tmp_path_factory.mktemp("r"), {"north": "ab"}, "c", [DIGITS, *SEALED]) as run:
        run.all_are_in()
        for what in ("app", "agent", "uplink", "superlink"):
            run.kill("north", what)
            run.all_are_in()


@pytest.mark.full
def test_two_relays_bring_large_models_in_the_clear(tmp_path_factory: pytest.TempPathFactory) -> None:
    with _running(tmp_path_factory.mktemp("r"), {"north": "ab", "south": "cd"}, "", [LARGE, *CLEAR]) as run:
        run.all_are_in()
        for name in ("north", "south"):
            run.kill(name, "uplink")
        run.all_are_in()
    log = (run.folder / "server" / "logs" / "superexec.log").read_text()
    assert "asked for one by one" not in log and "at most" not in log, "what relays bring is larger than it may be"
