"""Runner of FedSync in Flower's own simulation engine, in this process."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from fedsync.common.errors import FedSyncError, RunError, not_installed
from fedsync.common.run_claim import Claim, claimed
from fedsync.config.cluster import ClusterConfig
from fedsync.config.silo_start import check_short
from fedsync.config.strategy import StrategyConfig
from fedsync.flower.process_environment import flower_in_this_process
from fedsync.observe.recorder import Listener, add_to_summary
from fedsync.server.timeouts import Timeouts
from fedsync.silo.owner.key_lookup import KEYS, emulated_rings
from fedsync.silo.owner.model_export import export_model
from fedsync.silo.owner.privacy_ledger import kept_tallies, spent_by
from fedsync.silo.session.trainer_client import stop_trainers

_START_S = 600.0
"""Limit of a run without any work [s]: the engine starts all silos, which takes minutes on a busy machine."""

_STOP_S = 2.0
"""Wait of an interrupted run for its silos' answers [s]; Flower's threads never end if Ray ends before the answers."""

_LONGEST_HOME = 46
"""Maximum length of the path below which Ray creates Unix sockets, with the digits of this process's id [bytes]."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Interruptible:
    """Grid whose calls raise `KeyboardInterrupt` once ``over`` is set, because signals reach only the main thread."""

    def __init__(self, grid: Any, over: threading.Event) -> None:
        self._grid, self._over = grid, over

    def __getattr__(self, name: str) -> Any:
        if self._over.is_set():
            raise KeyboardInterrupt
        return getattr(self._grid, name)


def run_simulation(
    config: StrategyConfig,
    cluster: ClusterConfig,
    out: Path | Claim,
    *,
    target_accuracy: float | None = None,
    listeners: Sequence[Listener] = (),
) -> dict[str, Any]:
    """Run a strategy on Flower's simulation engine (Ray), with one throttled actor per silo; return the summary. Raises
    `ConfigError` if strategy and silos do not fit together or Ray is missing, `RunError` if the run fails.
    """
    with (
        claimed(out) as run,
        tempfile.TemporaryDirectory(prefix="fedsync-") as home,
        flower_in_this_process(Path(home)),
    ):
        check_short("TMPDIR", home, _LONGEST_HOME - len(str(os.getpid())))
        return _run(config, cluster, run, Path(home), target_accuracy, listeners)


def _run(
    config: StrategyConfig,
    cluster: ClusterConfig,
    out: Path,
    home: Path,
    target_accuracy: float | None,
    listeners: Sequence[Listener],
) -> dict[str, Any]:
    try:
        import ray
    except ImportError as error:
        raise not_installed("--runtime flower", "Ray", "sim") from error
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation as run_flower_simulation

    from fedsync.flower.client_app import app as client_app
    from fedsync.flower.flower_strategy import FedSync

    rings = emulated_rings(config, cluster, home)
    if rings is not None:
        os.environ[KEYS] = str(rings[0])
    strategy = FedSync(
        config,
        cluster,
        out=out,
        runtime="flower",
        target_accuracy=target_accuracy,
        listeners=listeners,
        timing=Timeouts.of(config.waiting, supervised=False, idle_s=_START_S),
        keys=None if rings is None else rings[1],
        checkpoints=0,  # its silos end with this process, so the run cannot be resumed
    )
    errors: list[FedSyncError] = []
    over = threading.Event()
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        # Flower replaces exceptions of a ServerApp by its own, which say less.
        try:
            strategy.run(cast(Grid, _Interruptible(grid, over)))
        except FedSyncError as error:
            errors.append(error)
        except KeyboardInterrupt:
            stop_trainers(home / "state")
            time.sleep(_STOP_S)

    # Flower's log has a line per round at INFO; FedSync reports progress itself.
    logging.getLogger("flwr").setLevel(logging.ERROR)

    def interrupt(*_: object) -> None:
        if over.is_set():
            raise KeyboardInterrupt
        over.set()

    silos, in_main = len(cluster.silos), threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in _SIGNALS} if in_main else {}
    # Ray counts one processor per actor: actors only wait for the trainers of their silos.
    engine: dict[str, Any] = {"num_cpus": silos, "_temp_dir": str(home / "ray"), "logging_level": "error"}
    try:
        # Ray replaces the handler of SIGTERM, so it starts before Flower's engine, which uses the Ray that it finds.
        ray.init(include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}, **engine)
        for number in before:
            signal.signal(number, interrupt)
        run_flower_simulation(
            server_app,
            client_app,
            num_supernodes=silos,
            backend_config={
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                "init_args": {**engine, "ignore_reinit_error": True},
            },
        )
        if over.is_set():
            raise KeyboardInterrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.environ.pop(KEYS, None)
        stop_trainers(home / "state")
        ray.shutdown()
    if errors:
        raise errors[0]
    if strategy.run_summary is None:
        raise RunError("Flower's simulation engine ended without running the strategy; see the log above")
    files = {} if rings is None else export_model(home / "state", out)
    if rings is None and config.privacy is None:
        return strategy.run_summary
    return add_to_summary(out, files, spent_by(kept_tallies(home / "state")))
