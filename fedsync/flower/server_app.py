"""Flower ServerApp: reads its configuration from the run and starts the strategy.

Entries of the run configuration. All are strings, except ``target-accuracy``. An empty entry has no effect:

| entry | meaning |
|---|---|
| ``strategy`` | path or shipped name of the strategy |
| ``silos`` | file of the silos to emulate |
| ``overrides`` | JSON list of ``a.b=value`` |
| ``out`` | folder for the run's files; by default a temporary folder |
| ``control`` | folder that receives the server's process id and the reason of a failure |
| ``keys`` | the server's key file, for an encrypted run |
| ``registered`` | accept only nodes that are registered by name |
| ``regions`` | JSON: silos of each relay, by relay name |
| ``resume`` | resume the run in ``out`` |
| ``target-accuracy`` | target accuracy, a number; "" for none |
| ``relay`` | path of a socket: run the app of a relay instead, which reads only ``control`` and ``keys`` |
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from threading import Thread

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedsync.common.errors import ConfigError, FedSyncError, RunError
from fedsync.common.files import write_atomically
from fedsync.common.locks import taken
from fedsync.common.processes import exit_with_owner
from fedsync.common.run_claim import Existing, claimed
from fedsync.config.cipher import PlainConfig
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.flower.flower_strategy import FedSync
from fedsync.flower.hub_transport import way_to_silos
from fedsync.flower.result import kept_log
from fedsync.server.checkpoints import clear
from fedsync.server.run_folder import APP, DONE_FILE, ERROR_FILE, PID_FILE, RUN_LOCK, write_error

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    exit_with_owner()
    settings = {key: str(value) for key, value in context.run_config.items()}
    control = _folder(settings, "control")
    if control is None:
        clear(_run(grid, settings))
        return
    with taken(control / RUN_LOCK) as alone:
        if not alone:
            raise RunError(f"another process is at work on the run in {control}")
        if (control / ERROR_FILE).exists():
            raise RunError(f"the run in {control} was stopped before Flower began it")
        try:
            write_atomically(control / PID_FILE, str(os.getpid()).encode())
        except ConfigError:  # a full disk; without the app, the folder shows at once that the run has died
            shutil.rmtree(control / APP, ignore_errors=True)
            raise
        with kept_log(control):
            if settings.get("relay"):
                from fedsync.extras.relays.relay_app import serve_relay

                with way_to_silos(grid, control) as silos:
                    serve_relay(silos, Path(settings["relay"]), _folder(settings, "keys"), control)
            try:
                out = _run(grid, settings)
                # In this order: a run with neither checkpoints nor this file would be started anew.
                (control / DONE_FILE).touch()
                clear(out)
            except FedSyncError as error:
                write_error(control, error)
                raise


def target_of(settings: dict[str, str]) -> float | None:
    """Return the target accuracy in the settings, if any; 0 is a target for tasks with negative scores."""
    text = settings.get("target-accuracy")
    return float(text) if text else None


def _folder(settings: dict[str, str], key: str) -> Path | None:
    return Path(settings[key]) if settings.get(key) else None


def _run(grid: Grid, settings: dict[str, str]) -> Path:
    """Run to the end; return the folder of the run's files, which is claimed here unless ``control`` is locked."""
    overrides = json.loads(settings.get("overrides") or "[]")
    config = StrategyConfig.load(settings["strategy"], overrides)
    cluster = ClusterConfig.load(settings["silos"]) if settings.get("silos") else None
    strategy = FedSync(
        config,
        cluster,
        out=_folder(settings, "out"),
        runtime="local" if cluster is not None else "deployment",
        target_accuracy=target_of(settings),
        keys=_folder(settings, "keys"),
        supervised=cluster is None and bool(settings.get("control")),
        registered=bool(settings.get("registered")),
        regions=json.loads(settings.get("regions") or "null"),
        resume=bool(settings.get("resume")),
    )
    if isinstance(config.cipher, PlainConfig):
        # torch writes the model, and its import takes seconds: import it while silos load, not at the end.
        Thread(target=import_module, args=["fedsync.train.weights"], daemon=True).start()
    existing = Existing.RESUME if settings.get("resume") else Existing.REFUSE
    with nullcontext() if settings.get("control") else claimed(strategy.out, existing):
        strategy.run(grid)
    return strategy.out
