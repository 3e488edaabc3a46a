"""Start of a relay: a SuperNode at the upstream server, and a run on the relay's own SuperLink.

The app of this run forwards the upstream server's requests. The run is submitted once, when the relay's SuperLink first
accepts connections. Afterwards the watchdog restarts a dead app, as for every run.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path

from fedsync.common import foreign
from fedsync.common.backoff import Backoff
from fedsync.common.errors import ConfigError, FedSyncError
from fedsync.common.files import private_folder
from fedsync.common.proxies import proxied, way_to
from fedsync.config.server_start import ServerStartConfig, UpstreamConfig
from fedsync.ops.programs import ROOM, confined, supernode_command, supernode_trust
from fedsync.ops.runs import RUN_FILE, RUNS, change_settings, hand_over
from fedsync.ops.supervisor import Program
from fedsync.silo.agent.joins import FOLDER as AGENT_FOLDER
from fedsync.silo.agent.joins import OWN_NODE

logger = foreign.logger(__name__)

RELAY_RUN, RELAY_SOCKET, UPLINK = "relay", "relay.sock", "uplink"

_PAUSES = Backoff(0.5, 20.0)
_CONNECT_S = 1.0


def begin_relaying(config: ServerStartConfig, stop: threading.Event) -> None:
    """Submit the relay's run, with retries until success, or until ``stop`` is set. A run that was submitted before
    gets the settings of the present file, which apply when the watchdog resumes it.
    """
    if config.upstream is None:
        return
    state = Path(config.state)
    folder, tries = state.resolve() / RUNS / RELAY_RUN, 0
    told = {"relay": str(state / RELAY_SOCKET), "control": str(folder), "keys": config.keys or ""}
    if (folder / RUN_FILE).exists():
        try:
            change_settings(folder, told)
        except FedSyncError as error:
            logger.warning("the relay's app keeps its former settings: %s", error)
    while not (folder / RUN_FILE).exists() and not stop.wait(_PAUSES.pause_s(tries)):
        tries += 1
        try:
            host, _, port = config.loopback.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
            private_folder(state / RUNS)
            private_folder(folder)
            hand_over(config, folder, {**told})
        except (FedSyncError, OSError) as error:
            logger.info("the relay's app is not started yet; it is tried again: %s", error)


def uplink_programs(upstream: UpstreamConfig, state: Path) -> list[Program]:
    """Return a relay's SuperNode, whose agent forwards the server's requests to the relay's app. Raises `ConfigError`
    if the proxy is unusable, or this system cannot isolate a run's code.
    """
    trust = supernode_trust(Path(upstream.authority), Path(upstream.node_key))
    host = upstream.server.rpartition(":")[0].strip("[]")
    node = {
        "partition-id": 0,
        "relay": str(state / RELAY_SOCKET),
        "hub-hosts": host,
        "hub-authority": upstream.authority,
    }
    command = supernode_command(upstream.server, f'partition-id=0 relay="{node["relay"]}"', trust)
    way = proxied(way_to(upstream.server, os.environ), os.environ, host)
    uplink = Program("uplink", command, way, rejoins=True)
    folder = private_folder(private_folder(state / UPLINK) / AGENT_FOLDER)
    environment = {**way, OWN_NODE: json.dumps(node)}
    remedy = "Use a Linux with Landlock (5.13, better 6.7) for the relay"
    unable = ConfigError("server.yaml, upstream", "this system cannot isolate the code of the server above", remedy)
    return confined(uplink, folder, state / UPLINK / ROOM, environment, [host], [str(state)], unable)
