"""A run on real Flower processes on this machine: a SuperLink and one SuperNode a silo, on loopback."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.errors import ConfigError, RunError
from fedsync.core.journal import JournalEntry, decode
from fedsync.observe.ledger import Ledger
from fedsync.observe.recorder import Listener
from fedsync.runtime import executor
from fedsync.runtime.environment import flower_environment
from fedsync.runtime.link import stop_trainers
from fedsync.runtime.processes import Children, free_ports, tail, wait_for_port
from fedsync.runtime.server import ERROR_FILE, PID_FILE

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 120.0
_POLL_S = 0.1

_BUNDLE = """\
[project]
name = "fedsync-local"
version = "1.0.0"
description = "Wiring of a local FedSync run"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedsync"

[tool.flwr.app.components]
serverapp = "fedsync.runtime.server:app"
clientapp = "fedsync.runtime.silo:app"

[tool.flwr.app.config]
"""


def run_local(
    config: StrategyConfig,
    cluster: ClusterConfig,
    out: Path,
    *,
    target_accuracy: float | None = None,
    listeners: Sequence[Listener] = (),
) -> dict[str, Any]:
    """Run a strategy on real processes, throttled as the silo file says, and end them all afterwards.

    Logs of all processes are in ``out/logs``.

    Args:
        config: the strategy.
        cluster: the machines that the silos emulate.
        out: folder for the run's files.
        target_accuracy: for ``seconds_to_target``.
        listeners: called after every entry of the journal.

    Returns:
        The summary.

    Raises:
        ConfigError: strategy and silos do not fit together.
        RunError: a process died, or the run could not reach its end.
    """
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for stale in ("summary.json", "journal.jsonl", "model.pt"):
        (out / stale).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="fedsync-") as folder:
        home = Path(folder)
        environment = flower_environment(home)
        children = Children(out / "logs", environment)
        try:
            port = _start_processes(children, len(cluster.silos))
            bundle = _write_bundle(home, config, cluster, out, target_accuracy)
            _submit(home, bundle, port, environment)
            _follow(children, out, home, listeners)
        finally:
            stop_trainers(home / "state")
            children.stop()
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return summary


def _start_processes(children: Children, silos: int) -> int:
    """Start the SuperLink and all silos; returns the SuperLink's port."""
    fast = executor.supported()
    if not fast:
        logger.warning("flwr is not a version the resident executor was tested with: using the stock way, slower")
    port, *silo_ports = free_ports(1 + silos)
    address = f"127.0.0.1:{port}"
    child = [sys.executable, "-m", "fedsync.runtime.child"]
    children.start(
        "superlink",
        [*child, "superlink", "--insecure", "--port", str(port), "--disable-runtime-dependency-installation"],
    )
    wait_for_port(port, _START_TIMEOUT_S, children)
    for index, silo_port in enumerate(silo_ports):
        options = ["--insecure", "--superlink", address, "--port", str(silo_port)]
        options += ["--node-config", f"partition-id={index} num-partitions={silos}"]
        if fast:
            poll = str(_POLL_S)
            children.start(
                f"supernode-{index}", [*child, "supernode", "--poll", poll, *options, "--isolation", "process"]
            )
            command = [sys.executable, "-m", "fedsync.runtime.executor", f"127.0.0.1:{silo_port}", poll]
            children.start(f"executor-{index}", command)
        else:
            children.start(f"supernode-{index}", [*child, "supernode", *options])
    return port


def _write_bundle(
    home: Path, config: StrategyConfig, cluster: ClusterConfig, out: Path, target_accuracy: float | None
) -> Path:
    """The Flower app of this run: FedSync's own server and silo side, told where the configuration is."""
    (home / "strategy.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
    (home / "silos.yaml").write_text(yaml.safe_dump(cluster.model_dump(mode="json")), encoding="utf-8")
    settings = {
        "strategy": str(home / "strategy.yaml"),
        "silos": str(home / "silos.yaml"),
        "overrides": "",
        "out": str(out),
        "control": str(home),
        "target-accuracy": float(target_accuracy or 0.0),
    }
    bundle = home / "app"
    bundle.mkdir()
    # JSON's strings and numbers are TOML's too.
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    (bundle / "pyproject.toml").write_text(_BUNDLE + lines, encoding="utf-8")
    return bundle


def _submit(home: Path, bundle: Path, port: int, environment: Any) -> None:
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "local"\n\n[superlink.local]\naddress = "127.0.0.1:{port}"\ninsecure = true\n',
        encoding="utf-8",
    )
    flwr = Path(sys.executable).parent / "flwr"
    done = subprocess.run(
        [str(flwr), "run", str(bundle), "local"],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_START_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise RunError(f"flwr run failed with code {done.returncode}:\n{done.stdout}{done.stderr}")


def _follow(children: Children, out: Path, control: Path, listeners: Sequence[Listener]) -> None:
    """Follow the run's journal until its files are complete."""
    server_pid: int | None = None
    begin, journal, ledger = time.monotonic(), _Tail(out / "journal.jsonl"), Ledger()
    while True:
        for entry in journal.entries():
            ledger.add(entry)
            for listener in listeners:
                listener.follow(ledger)
        if (control / ERROR_FILE).exists():
            raise _error(control / ERROR_FILE)
        if (out / "model.pt").exists() and (out / "summary.json").exists():
            return
        children.check()
        if server_pid is None and (control / PID_FILE).exists():
            server_pid = int((control / PID_FILE).read_text(encoding="utf-8") or 0) or None
        if server_pid is None and time.monotonic() - begin > _START_TIMEOUT_S:
            raise RunError(f"the ServerApp did not start; the end of the log:\n{tail(out / 'logs/superlink.log')}")
        if server_pid is not None and not psutil.pid_exists(server_pid):
            raise RunError(f"the ServerApp died; the end of the log:\n{tail(out / 'logs/superlink.log')}")
        time.sleep(_POLL_S)


def _error(path: Path) -> ConfigError | RunError:
    report = json.loads(path.read_text(encoding="utf-8"))
    if report["kind"] == "config":
        return ConfigError(report["place"], report["problem"], report["remedy"])
    return RunError(report["message"])


class _Tail:
    """New entries of a journal that another process is writing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._header_seen = False

    def entries(self) -> Iterator[JournalEntry]:
        """Entries written completely since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            while (line := file.readline()).endswith(b"\n"):
                self._offset += len(line)
                if self._header_seen:
                    yield decode(JournalEntry, json.loads(line))
                self._header_seen = True
