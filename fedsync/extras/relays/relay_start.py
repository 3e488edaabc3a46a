"""Start of a relay: a Flower run on the relay's own SuperLink, whose app forwards the upstream server's requests.

The run is submitted once, when the relay's SuperLink first accepts connections. Afterwards the watchdog restarts a dead
app, as for every run.
"""

from __future__ import annotations

import socket
import threading
from pathlib import Path

from fedsync.common import foreign
from fedsync.common.backoff import Backoff
from fedsync.common.errors import FedSyncError
from fedsync.common.files import private_folder
from fedsync.config.server_start import ServerStartConfig
from fedsync.ops.programs import RELAY_SOCKET
from fedsync.ops.runs import RUN_FILE, RUNS, hand_over

logger = foreign.logger(__name__)

RELAY_RUN = "relay"

_PAUSES = Backoff(0.5, 20.0)
_CONNECT_S = 1.0


def begin_relaying(config: ServerStartConfig, stop: threading.Event) -> None:
    """Submit the relay's run unless already submitted; retries until success, or until ``stop`` is set."""
    if config.upstream is None:
        return
    state = Path(config.state)
    folder, tries = state.resolve() / RUNS / RELAY_RUN, 0
    while not (folder / RUN_FILE).exists() and not stop.wait(_PAUSES.pause_s(tries)):
        tries += 1
        try:
            host, _, port = config.loopback.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
            private_folder(state / RUNS)
            private_folder(folder)
            told = {"relay": str(state / RELAY_SOCKET), "control": str(folder), "keys": config.keys or ""}
            hand_over(config, folder, {**told})
        except (FedSyncError, OSError) as error:
            logger.info("the relay's app is not started yet, and tried again: %s", error)
