"""A run on real Flower processes on this machine: a SuperLink and one SuperNode a silo, on loopback."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fedsync.common.files import private_folder
from fedsync.common.processes import Children, alive, free_ports, tail, wait_for_port
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.errors import ConfigError, RunError
from fedsync.core.journal import JOURNAL
from fedsync.flower.checkpoints import digest, newest_version, prepare
from fedsync.flower.environment import flower_environment
from fedsync.flower.internals import executor
from fedsync.flower.internals.registration import register_keys, write_connection
from fedsync.flower.run_folder import DONE_FILE, ERROR_FILE, PID_FILE, read_error
from fedsync.identity.certificates import Authority, ServerCertificate, make_authority, make_server_certificate
from fedsync.identity.node_keys import NodeKey, make_node_key
from fedsync.observe.ledger import Ledger
from fedsync.observe.recorder import Listener
from fedsync.observe.tail import Tail
from fedsync.ops.bundle import submit, write_bundle
from fedsync.ops.programs import NODE_SECRET_FILE, executor_command, new_secret, supernode_command
from fedsync.trainer.client import stop_trainers
from fedsync.trainer.key_lookup import KEYS, emulated_rings
from fedsync.trainer.model_export import export_model
from fedsync.trainer.protocol import STATE_FOLDER as STATE

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 120.0
_POLL_S = 0.1

_CONNECTION = "local"


@dataclass(frozen=True, slots=True)
class _Trust:
    """Throw-away certificates and keys of one run, all in its temporary folder."""

    authority: Authority
    server: ServerCertificate
    nodes: Sequence[NodeKey]

    @classmethod
    def make(cls, home: Path, silos: int) -> _Trust:
        authority = make_authority(home / "authority")
        server = make_server_certificate(authority, ["localhost"], home / "certificates")
        # Named by number: a name in a silo file may be one that no file can have.
        nodes = [make_node_key(f"silo-{index}", home / "nodes") for index in range(silos)]
        return cls(authority, server, nodes)

    def superlink(self) -> list[str]:
        """Options of the SuperLink."""
        options = ["--ssl-ca-certfile", str(self.authority.certificate), "--ssl-certfile", str(self.server.certificate)]
        return [*options, "--ssl-keyfile", str(self.server.key), "--enable-supernode-auth"]

    def supernode(self, index: int) -> list[str]:
        """Options of a silo's SuperNode."""
        key = str(self.nodes[index].private)
        return ["--root-certificates", str(self.authority.certificate), "--auth-supernode-private-key", key]


def run_local(
    config: StrategyConfig,
    cluster: ClusterConfig,
    out: Path,
    *,
    target_accuracy: float | None = None,
    listeners: Sequence[Listener] = (),
    secure: bool = True,
    resume: bool = False,
) -> dict[str, Any]:
    """Run a strategy on real processes, throttled as the silo file says, and end them all afterwards.

    Logs of all processes are in ``out/logs``. What silos keep is in ``out/state`` until the run has ended well.
    Processes speak TLS, and the server knows silos by their keys, all of which are made for the run and gone after it.

    Args:
        config: the strategy.
        cluster: the machines that the silos emulate.
        out: folder for the run's files.
        target_accuracy: for ``seconds_to_target``.
        listeners: called after every entry of the journal.
        secure: False leaves out TLS and the keys of nodes.
        resume: go on with the run in ``out``, which was cut off, from its newest checkpoint.

    Returns:
        The summary.

    Raises:
        ConfigError: strategy and silos do not fit together, or there is nothing to resume from.
        RunError: a process died, or the run could not reach its end.
    """
    out = out.resolve()
    _make_ready(out, config, cluster, resume=resume)
    with tempfile.TemporaryDirectory(prefix="fedsync-") as folder:
        home = Path(folder)
        # Under a short name, for trainers listen there: a socket's path has at most 100 characters.
        (home / STATE).symlink_to(private_folder(out / STATE))
        environment = flower_environment(home)
        children = Children(out / "logs", environment)
        try:
            rings = emulated_rings(config, cluster, home / STATE)
            trust = _Trust.make(home, len(cluster.silos)) if secure else None
            names = [silo.name for silo in cluster.silos]
            _start_processes(children, names, {} if rings is None else {KEYS: str(rings[0])}, home, trust)
            keys = None if rings is None else rings[1]
            bundle = _write_bundle(home, config, cluster, out, target_accuracy, keys, registered=secure, resume=resume)
            submit(bundle, _CONNECTION, environment)
            _follow(children, out, home, listeners, resumed=resume)
            if rings is not None:
                export_model(home / STATE, out)
        finally:
            stop_trainers(home / STATE)
            children.stop()
    shutil.rmtree(out / STATE, ignore_errors=True)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return summary


def _make_ready(out: Path, config: StrategyConfig, cluster: ClusterConfig, *, resume: bool) -> None:
    """Remove from the run's folder what is of another run, or of the end of this one."""
    out.mkdir(parents=True, exist_ok=True)
    if resume:
        # Also done by the server, but the journal is to be short before it is followed here. Where there is nothing to
        # go on from, the folder may be that of a run that ended well: nothing of it goes before that is known.
        prepare(out, digest(config, cluster))
    else:
        if newest_version(out):
            remedy = f"Go on with it: --resume {out}; or choose another --out, or remove the folder"
            raise ConfigError(str(out), "a run was cut off here, and can go on", remedy)
        (out / JOURNAL).unlink(missing_ok=True)
        shutil.rmtree(out / STATE, ignore_errors=True)
    for stale in ("summary.json", "model.pt"):
        (out / stale).unlink(missing_ok=True)


def _start_processes(
    children: Children, names: Sequence[str], silo_environment: Mapping[str, str], home: Path, trust: _Trust | None
) -> None:
    """Start the SuperLink and all silos, which alone get ``silo_environment``."""
    fast = executor.supported()
    if not fast:
        logger.warning("flwr is not a version the resident executor was tested with: using the stock way, slower")
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    child = [sys.executable, "-m", "fedsync.flower.internals.launch"]
    superlink = [*child, "superlink", *(["--gate"] if fast else []), "--host", "127.0.0.1", "--port", str(port)]
    superlink += ["--insecure"] if trust is None else trust.superlink()
    children.start("superlink", [*superlink, "--disable-runtime-dependency-installation"])
    wait_for_port(port, _START_TIMEOUT_S, children)
    authority = None if trust is None else trust.authority.certificate
    write_connection(home, _CONNECTION, address, authority)
    if trust is not None:
        public = {name: node.public for name, node in zip(names, trust.nodes, strict=True)}
        register_keys(public, home, _CONNECTION, address, trust.authority.certificate)
    secret = new_secret(home / NODE_SECRET_FILE) if fast else None
    for index in range(len(names)):
        options = ["--insecure"] if trust is None else trust.supernode(index)
        options += ["--superlink", address]
        options += ["--node-config", f"partition-id={index} num-partitions={len(names)}"]
        silo_port = home / f"supernode-{index}.port"
        if secret is not None:
            children.start(f"supernode-{index}", supernode_command(silo_port, options, secret, _POLL_S))
            children.start(f"executor-{index}", executor_command(silo_port, secret, _POLL_S), silo_environment)
        else:
            children.start(f"supernode-{index}", supernode_command(silo_port, options), silo_environment)


def _write_bundle(
    home: Path,
    config: StrategyConfig,
    cluster: ClusterConfig,
    out: Path,
    target_accuracy: float | None,
    keys: Path | None,
    *,
    registered: bool,
    resume: bool,
) -> Path:
    """The Flower app of this run: FedSync's own server and silo side, told where the configuration is."""
    (home / "strategy.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
    (home / "silos.yaml").write_text(yaml.safe_dump(cluster.model_dump(mode="json")), encoding="utf-8")
    settings: dict[str, str | float] = {
        "strategy": str(home / "strategy.yaml"),
        "silos": str(home / "silos.yaml"),
        "overrides": "",
        "out": str(out),
        "control": str(home),
        "keys": "" if keys is None else str(keys),
        "registered": "yes" if registered else "",
        "resume": "yes" if resume else "",
        "target-accuracy": "" if target_accuracy is None else float(target_accuracy),
    }
    return write_bundle(home / "app", settings)


def _follow(children: Children, out: Path, control: Path, listeners: Sequence[Listener], *, resumed: bool) -> None:
    """Follow the run's journal until its files are complete; what a resumed run did before is no news."""
    server_pid: int | None = None
    begin, journal, ledger = time.monotonic(), Tail(out / JOURNAL), Ledger()
    for entry in journal.entries() if resumed else ():
        ledger.add(entry)
    while True:
        done = (control / DONE_FILE).exists()
        for entry in journal.entries():
            ledger.add(entry)
            for listener in listeners:
                listener.follow(ledger)
        if (control / ERROR_FILE).exists():
            raise read_error(control)
        if done:
            return
        children.check()
        if server_pid is None and (control / PID_FILE).exists():
            server_pid = int((control / PID_FILE).read_text(encoding="utf-8") or 0) or None
        if server_pid is None and time.monotonic() - begin > _START_TIMEOUT_S:
            raise RunError(f"the ServerApp did not start; the end of the log:\n{tail(out / 'logs/superlink.log')}")
        if server_pid is not None and not alive(server_pid):
            raise RunError(f"the ServerApp died; the end of the log:\n{tail(out / 'logs/superlink.log')}")
        time.sleep(_POLL_S)
