"""Local run on real Flower processes: a server and one SuperNode per silo, on loopback."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from fedsync.common import foreign
from fedsync.common.errors import RunError
from fedsync.common.files import OWNER_FOLDER, private_folder
from fedsync.common.fork_server import FORK_SERVER, start_fork_server
from fedsync.common.processes import Child, end_processes, free_ports, tail
from fedsync.common.run_claim import Claim, Existing, claimed
from fedsync.config.cluster import ClusterConfig
from fedsync.config.server_start import HubConfig, ServerStartConfig
from fedsync.config.silo_start import LONGEST_STATE, LogsConfig, check_short
from fedsync.config.strategy import StrategyConfig
from fedsync.core.journal import JOURNAL
from fedsync.flower.launch import entry_point
from fedsync.flower.process_environment import flower_environment
from fedsync.flower.registration import register_each
from fedsync.identity.certificates import Authority, make_authority, make_server_certificate
from fedsync.identity.node_keys import NodeKey, make_node_key
from fedsync.observe.ledger import KEPT_ROUNDS, Ledger
from fedsync.observe.recorder import Listener, add_to_summary
from fedsync.observe.run_builder import measuring
from fedsync.observe.run_state import RUN_LOG
from fedsync.observe.tail import Tail
from fedsync.ops.programs import CONNECTION, server_programs, supernode_command, supernode_trust
from fedsync.ops.runs import RUNS, connect, hand_over, prepare_run
from fedsync.ops.supervisor import LOGS_FOLDER, LoggedProcess, Program
from fedsync.server.checkpoints import newest_version, resumed
from fedsync.server.run_folder import ERROR_FILE, PID_FILE, Phase, end_process, ends, phase, read_error
from fedsync.silo.agent.joins import stop_agent
from fedsync.silo.owner.key_lookup import KEYS, emulated_rings
from fedsync.silo.owner.model_export import export_model
from fedsync.silo.owner.privacy_ledger import kept_tallies, spent_by
from fedsync.silo.protocol import STATE_FOLDER as STATE
from fedsync.silo.session.trainer_client import SHARED_MODULES, stop_trainers

logger = foreign.logger(__name__)

_START_TIMEOUT_S = 120.0
_LEAVE_S = 30.0
_POLL_S = 0.1


def run_local(
    config: StrategyConfig,
    cluster: ClusterConfig,
    out: Path | Claim,
    *,
    target_accuracy: float | None = None,
    listeners: Sequence[Listener] = (),
    resume: bool = False,
) -> dict[str, Any]:
    """Run a strategy on real processes, throttled by the silo file, and return the summary.

    The processes are the programs of a real server and of real silos, but without restarts: the end of a process ends
    the run. Logs are in ``out/logs``. State of silos is in ``out/state`` until the run ends successfully. Processes use
    TLS, and the server authenticates silos by keys; certificates and keys exist only for this run. With ``resume``, the
    interrupted run in ``out`` continues from its newest checkpoint.

    Raises:
        ConfigError: strategy and silos do not fit together, or there is no checkpoint to resume from.
        RunError: a process died, or the run failed.
    """
    with claimed(out, Existing.RESUME if resume else Existing.REFUSE) as folder:
        out = folder.resolve()
        if resume:
            # The server does this too, but the journal must be truncated before `_follow` reads it. `resumed` raises
            # without a checkpoint, because the folder may have a finished run, whose files must stay.
            resumed(out, measuring(config), cluster)
            for stale in ("summary.json", "model.pt"):
                (out / stale).unlink(missing_ok=True)
        try:
            return _carry_out(out, config, cluster, target_accuracy, listeners, resume=resume)
        except (KeyboardInterrupt, RunError):
            if newest_version(out) is not None:
                logger.warning("it can go on: fedsync run --resume %s", quote(str(out)))
            raise


def _carry_out(
    out: Path,
    config: StrategyConfig,
    cluster: ClusterConfig,
    target_accuracy: float | None,
    listeners: Sequence[Listener],
    *,
    resume: bool,
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="fedsync-") as folder:
        home = Path(folder)
        # A short path, because trainers create sockets there, and socket paths have at most 100 characters.
        check_short("TMPDIR", folder, LONGEST_STATE)
        (home / STATE).symlink_to(private_folder(out / STATE))
        control = home / RUNS / "local"
        control.mkdir(parents=True)
        processes, over = _Processes(out / LOGS_FOLDER, flower_environment(home)), False
        try:
            fork_servers = _start_fork_servers(processes, home, config, len(cluster.silos))
            rings = emulated_rings(config, cluster, home / STATE)
            server = _server(home)
            nodes = _start_server(processes, server, [silo.name for silo in cluster.silos])
            environment = {} if rings is None else {KEYS: str(rings[0])}
            _start_silos(processes, server, nodes, environment, fork_servers)
            keys = "" if rings is None else str(rings[1])
            settings = prepare_run(
                control, out, config, cluster,
                keys=keys, resume=resume, target_accuracy=target_accuracy,
            )  # fmt: skip
            hand_over(server, control, settings)
            _follow(processes, out, control, listeners, resumed=resume)
            files = {} if rings is None else export_model(home / STATE, out)
            if rings is not None or config.privacy is not None:
                add_to_summary(out, files, spent_by(kept_tallies(home / STATE)))
            over = ends(control, _LEAVE_S)
        except KeyboardInterrupt:
            logger.warning("stopping")
            raise
        finally:
            # End the server first: it would commit updates of leaving silos, and continue with the other silos.
            try:
                end_process(control)
            finally:  # also after a second Ctrl-C
                stop_agent(home / STATE)
                stop_trainers(home / STATE)
                processes.stop(over=over)
    shutil.rmtree(out / STATE, ignore_errors=True)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return summary


@dataclass(slots=True)
class _Processes:
    logs: Path
    environment: Mapping[str, str]
    _groups: list[dict[str, LoggedProcess]] = field(default_factory=list)
    _fork_servers: list[Child] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.logs.mkdir(mode=OWNER_FOLDER, exist_ok=True)

    def start_fork_server(self, path: Path, modules: Sequence[str]) -> Path:
        """Start a fork server; its end does not end the run, because programs can also start without it."""
        log = self.logs / f"{path.name}.log"
        self._fork_servers.append(start_fork_server(path, modules, self.environment, log))
        return path

    def start(self, programs: Sequence[Program], fork_server: Path | None = None) -> None:
        self._groups.append({})
        for program in programs:
            started = LoggedProcess(program, self.environment, self.logs, LogsConfig(), fork_server)
            self._groups[-1][program.role] = started
        self.check()

    def check(self) -> None:
        for role, process in (each for group in self._groups for each in group.items()):
            code = process.poll()
            if code is not None:
                raise RunError(f"{role} ended with code {code}: {process.last_words()}; see {self.logs}")

    def stop(self, *, over: bool) -> None:
        """End silos first, and the server last. After the end of the run, processes are killed: their state is useless,
        and Flower's processes need seconds to end.
        """
        if over:
            LoggedProcess.kill([each for group in self._groups for each in group.values()])
        for group in reversed(self._groups):
            for process in reversed(group.values()):
                process.end()
        end_processes(self._fork_servers)


def _start_fork_servers(
    processes: _Processes, home: Path, config: StrategyConfig, silos: int
) -> tuple[Path, Path] | None:
    """Start fork servers of SuperNodes and trainers, so that imports happen once; None for one silo."""
    if silos < 2:
        return None
    return (
        processes.start_fork_server(home / "supernodes", [entry_point("supernode").module]),
        processes.start_fork_server(home / "trainers", [*SHARED_MODULES, *config.task.libraries]),
    )


def _server(home: Path) -> ServerStartConfig:
    certificates = home / "certificates"
    make_server_certificate(make_authority(certificates), ["localhost"], certificates)
    (port,) = free_ports(1)
    return ServerStartConfig(
        host="127.0.0.1", port=port, certificates=str(certificates), state=str(home), hub=HubConfig(port=0)
    )


def _start_server(processes: _Processes, server: ServerStartConfig, names: Sequence[str]) -> list[NodeKey]:
    processes.start(server_programs(server, lasting=False))
    end_s = time.monotonic() + _START_TIMEOUT_S
    while not _listens(server.port):
        processes.check()
        if time.monotonic() > end_s:
            raise RunError(f"nothing listens on port {server.port} after {_START_TIMEOUT_S:g} s")
        time.sleep(_POLL_S)
    connect(server)
    home = Path(server.state)
    # Files are named by number, because a silo's name may be invalid as a file name.
    nodes = [make_node_key(f"silo-{index}", home / "nodes") for index in range(len(names))]
    public = {name: node.public for name, node in zip(names, nodes, strict=True)}
    register_each(public, home, CONNECTION).check()
    return nodes


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def _start_silos(
    processes: _Processes,
    server: ServerStartConfig,
    nodes: Sequence[NodeKey],
    environment: Mapping[str, str],
    fork_servers: tuple[Path, Path] | None,
) -> None:
    supernodes, trainers = fork_servers or (None, None)
    if trainers is not None:
        environment = {**environment, FORK_SERVER: str(trainers)}
    programs, authority = [], Authority.at(Path(str(server.certificates))).certificate
    for index, node in enumerate(nodes):
        trust = supernode_trust(authority, node.private)
        command = supernode_command(server.loopback, f"partition-id={index} num-partitions={len(nodes)}", trust)
        programs.append(Program(f"supernode-{index}", command, environment))
    processes.start(programs, supernodes)


def _follow(processes: _Processes, out: Path, control: Path, listeners: Sequence[Listener], *, resumed: bool) -> None:
    """Follow the run's journal until its files are complete; listeners do not get entries before a resume."""
    journal, ledger = Tail(out / JOURNAL), Ledger(keep=KEPT_ROUNDS)
    for entry in journal.entries() if resumed else ():
        ledger.add(entry)
    while True:
        now = phase(control)
        for entry in journal.entries():
            ledger.add(entry)
            for listener in listeners:
                listener.follow(ledger)
        if (control / ERROR_FILE).exists():
            raise read_error(control)
        if now is Phase.OVER:
            return
        if now is Phase.DIED:
            problem = "died" if (control / PID_FILE).exists() else "did not start"
            log = control / RUN_LOG if (control / RUN_LOG).exists() else out / LOGS_FOLDER / "superexec.log"
            raise RunError(f"the ServerApp {problem}; the end of the log: {tail(log)}")
        processes.check()
        time.sleep(_POLL_S)
