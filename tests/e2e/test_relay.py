"""Real processes: a relay with two silos beside a silo without one, sealed; its app is killed, and comes back."""

import os
import signal
from pathlib import Path

import pytest

from fedsync import replay
from fedsync.cipher.keys.emulated import emulated_keys
from fedsync.common.processes import end_processes, free_ports
from fedsync.config.server_start import ServerStartConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit
from fedsync.flower.run_folder import PID_FILE, Phase, phase
from fedsync.identity.certificates import make_authority, make_server_certificate
from fedsync.identity.node_keys import make_node_key
from fedsync.ops.relay import RELAY_RUN
from fedsync.ops.runs import RUNS, stop_run, submit_run
from tests.e2e.deployed import fedsync, wait_for

SEALED = [
    *("task={kind: digits}", "local={steps: 1, batch_size: 8, threads: 1}", "min_silos=3", "stop.rounds=100000"),
    "cipher={kind: bfv, members: 2}",
]


def _files(folder: Path) -> list[str]:
    """Of the server, the relay, and silos a and b behind it beside c; returns the names of their files."""
    ports = free_ports(2)
    keys = {name: make_node_key(name, folder / "nodes") for name in ("north", "a", "b", "c")}
    sealing = emulated_keys(["a", "b", "c"], folder / "keys")
    for name in ("server", "north"):
        make_server_certificate(make_authority(folder / f"{name}-certs"), ["localhost"], folder / f"{name}-certs")

    def own(name: str, port: int, silos: str, more: str) -> None:
        known = ", ".join(f"{silo}: {keys[silo].public}" for silo in silos)
        (folder / f"{name}.yaml").write_text(
            f"{{host: 127.0.0.1, port: {port}, certificates: {name}-certs, state: {name}, silos: {{{known}}}, "
            f"keys: {sealing.server_file}, {more}}}"
        )

    own("server", ports[0], "c", f"relays: {{north: {{key: {keys['north'].public}, silos: [a, b]}}}}")
    above = f"server: 'localhost:{ports[0]}', authority: server-certs/ca.crt, node_key: {keys['north'].private}"
    own("north", ports[1], "ab", f"upstream: {{name: north, {above}}}")
    for index, name in enumerate("abc"):
        at = "server" if name == "c" else "north"
        (folder / f"{name}.yaml").write_text(
            f"{{name: {name}, server: 'localhost:{ports[0 if name == 'c' else 1]}', authority: {at}-certs/ca.crt, "
            f"node_key: {keys[name].private}, state: silo-{name}, keys: {sealing.silos[name]}, index: {index}}}"
        )
    return ["server.yaml", "north.yaml"]


@pytest.mark.full
def test_silos_behind_a_relay_are_in_all_rounds_also_after_its_app_was_killed(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("r")
    started = [fedsync("server", "start", "--server", name, cwd=folder) for name in _files(folder)]
    started += [fedsync("silo", "start", "--silo", f"{name}.yaml", cwd=folder) for name in "abc"]
    app = folder / "north" / RUNS / RELAY_RUN
    try:
        wait_for(lambda: (app / PID_FILE).exists(), "the relay's app did not come up", 300.0)
        config = ServerStartConfig.load(folder / "server.yaml")
        out = submit_run(config, StrategyConfig.load("fedavg", SEALED), folder / "out")

        def commits() -> list[list[str]]:
            if not (out / "journal.jsonl").exists():
                return []
            found = (action for entry in replay(out / "journal.jsonl") for action in entry.actions)
            return [sorted(one[0] for one in each.weights) for each in found if isinstance(each, Commit)]

        wait_for(lambda: commits().count(["a", "b", "c"]) > 2, "not all are in rounds", 300.0)
        os.kill(int((app / PID_FILE).read_text()), signal.SIGKILL)
        before = len(commits())
        wait_for(lambda: ["a", "b", "c"] in commits()[before + 2 :], "they did not come back", 300.0)
        stop_run(out)
        wait_for(lambda: phase(out) is Phase.OVER, "the run did not end", 60.0)
        for process in started:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)
    finally:
        end_processes(started)
    ids = [update for entry in replay(out / "journal.jsonl") for action in entry.actions if isinstance(action, Commit)
           for update in action.weights]  # fmt: skip
    assert len(ids) == len(set(ids)), "an update counted twice"
    assert "does not count" not in (folder / "server" / "logs" / "superexec.log").read_text()
