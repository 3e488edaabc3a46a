"""``fedsync silo serve``: a silo's trainer by itself, ready before the first message asks for it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from fedsync.common.files import private_folder
from fedsync.config.silo_start import SiloStartConfig
from fedsync.core.errors import ConfigError
from fedsync.flower.environment import trainer_environment
from fedsync.ops.supervisor_loop import stop_on_signals
from fedsync.trainer.client import TrainerClient
from fedsync.trainer.owner_policy import owner_environment
from fedsync.trainer.protocol import IDENTITY, STATE_FOLDER, Describe, Hello, Identity, StillLoading, exchange

logger = logging.getLogger(__name__)

_LOOK_S = 1.0


def serve_silo(config: SiloStartConfig, link: Callable[[Identity], TrainerClient] = TrainerClient) -> None:
    """Run the trainer of the silo's newest run until it ends for want of orders, or SIGTERM or SIGINT comes.

    Task, data and model are in memory then, as they were when it last answered. A message that comes meanwhile, to
    `fedsync silo start` with the same state folder, finds this trainer and starts none.

    Args:
        config: of the silo.
        link: finds a trainer, or starts it.

    Raises:
        ConfigError: no run has reached this silo yet, or its task, data or device are not usable any more.
    """
    state = private_folder(Path(config.state))
    identity = _newest(state / STATE_FOLDER)
    os.environ.update({**trainer_environment(state), **owner_environment(config)})
    with stop_on_signals() as stop:
        trainer = _ready(identity, link, stop)
        while trainer is not None and trainer.alive and not stop.wait(_LOOK_S):
            pass


def _ready(
    identity: Identity, link: Callable[[Identity], TrainerClient], stop: threading.Event
) -> TrainerClient | None:
    """The trainer, however long it loads; None if ``stop`` is set before. It would end with this process."""
    while not stop.is_set():
        try:
            trainer = link(identity)
            hello, _ = exchange(trainer.ask, Describe())
        except StillLoading as error:
            logger.info("%s", error)
        else:
            if isinstance(hello, Hello):
                logger.info("the trainer of %s is ready: %d examples", hello.silo, hello.facts.examples)
            return trainer
    return None


def _newest(trainers: Path) -> Identity:
    """Whose trainer was asked last."""
    found = sorted(trainers.glob(f"*/{IDENTITY}"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in found:
        try:
            return Identity.load(path.parent)
        except (OSError, ValueError) as error:
            logger.warning("%s is passed over: %s", path, error)
    remedy = "A run has to reach it once; its first message starts the trainer"
    raise ConfigError(str(trainers), "no run has reached this silo yet", remedy)
