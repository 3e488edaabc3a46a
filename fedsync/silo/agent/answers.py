"""Forwarder of the agent: passes a server's question (request) to a trainer or a relay's app, and logs the answer.

The forwarder decodes nothing, and imports nothing heavy. If an error occurs, the server sees one code of the closed
list (`fedsync.silo.owner.refusals`), never the text.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from fedsync.common import foreign
from fedsync.common.errors import ConfigError, FedSyncError
from fedsync.common.sandbox.path_sandbox import ALLOWED
from fedsync.model.transfer import Payload
from fedsync.silo.owner.approvals import check_approved
from fedsync.silo.owner.audit import audit_answer
from fedsync.silo.owner.refusals import code_of, refuse
from fedsync.silo.protocol import Ask, Forward, Forwarded, Identity, Refused, write_reply
from fedsync.silo.run_text import run_config_text
from fedsync.silo.session import trainer_socket
from fedsync.silo.session.trainer_client import TrainerClient, asked_for, room_for, trainer_folder
from fedsync.transport.port import BESIDE_BYTES

logger = foreign.logger(__name__)

Config = Mapping[str, bool | int | float | str]  # Flower's node configuration or run configuration

OWN_NODE_KEYS = {
    *("partition-id", "silo-name", "device", "resources", "declared-speed", "relay"),
    *("hub-hosts", "hub-authority"),
}
OWN_RUN_KEYS = {
    *("strategy", "silos", "overrides", "out", "control", "keys", "registered", "regions", "resume", "target-accuracy"),
    "relay",
}
"""Keys of a configuration that FedSync itself reads; the silo's own training code gets the rest. A resumed run is the
same run, although its configuration then has ``resume``.
"""

_YES, _NO = ("on", "true", "yes", "1"), ("off", "false", "no", "0")
_GREET_S = 60.0

_Number = TypeVar("_Number", int, float)

Fetch = Callable[[Path], Payload | None]  # download of a question's payload; a large payload goes to the folder


def connect(identity: Identity) -> Ask:
    """Connect to a silo's trainer; tests replace this function by a trainer in the same process."""
    return TrainerClient(identity).ask


@dataclass(frozen=True, slots=True)
class Place:
    """Context of a question: configurations of the node and the run, and Flower's ids of both."""

    node: Config
    run: Config = field(default_factory=dict)
    ids: str = ""

    @property
    def relay(self) -> Path | None:
        return Path(str(self.node["relay"])) if "relay" in self.node else None

    def answer(self, spec: str, text: str, nbytes: int, fetch: Fetch) -> tuple[str, Payload | None]:
        if self.relay is not None:
            return self._relayed(self.relay, spec, text, nbytes, fetch)
        identity: Identity | None = None
        try:
            begin_s = time.monotonic()
            identity = identify(spec, self.node, self.run)
            check_approved(identity)  # before a model is downloaded, or a trainer started
            asked_for.set(self.ids)
            line = emulated_line(identity, os.environ)
            folder = trainer_folder(identity)
            payload = _fetched(fetch, folder, folder.parent, nbytes)
            line.carried(payload, begin_s)
            reply, answer = connect(identity)(text, payload)
            audit_answer(identity, text, nbytes, reply, answer)  # before anything leaves
            line.carried(answer, time.monotonic())
            return reply, answer
        except Exception as error:
            return refusal(error, identity, text, nbytes), None

    @staticmethod
    def _relayed(socket: Path, spec: str, text: str, nbytes: int, fetch: Fetch) -> tuple[str, Payload | None]:
        try:
            return ask_relay(socket, spec, text, _fetched(fetch, socket.parent, socket.parent, nbytes))
        except Exception as error:  # a relay has no owner, so there is no record to write
            known = isinstance(error, OSError | FedSyncError)
            told = "a question of the server above has no answer, and is asked again: %s"
            logger.warning(told, error, exc_info=None if known else error)
            return write_reply(Refused(code_of(error))), None


def _fetched(fetch: Fetch, folder: Path, within: Path, nbytes: int) -> Payload | None:
    if nbytes <= BESIDE_BYTES:
        return fetch(folder)
    with room_for(within, nbytes):
        return fetch(folder)


def refusal(error: Exception, identity: Identity | None = None, asked: str = "", nbytes: int = 0) -> str:
    """Return the answer to a question that failed with an error; arguments as `audit_answer`. Raises nothing."""
    reply = write_reply(refuse(error))
    try:
        audit_answer(identity, asked, nbytes, reply, None)
    except Exception as unwritten:  # an answer without audit record is reduced to a code
        reply = write_reply(refuse(unwritten))
    return reply


def ask_relay(socket: Path, spec: str, text: str, payload: Payload | None) -> tuple[str, Payload | None]:
    """Ask the relay's app; `OSError` if it does not start within a minute, or ends before it answers."""
    from fedsync.extras.relays.relay_messages import RelayCall, write

    end_s = time.monotonic() + _GREET_S
    while (caller := trainer_socket.call(socket)) is None:
        if time.monotonic() > end_s:
            raise OSError("the relay's app is not there")
        time.sleep(0.5)
    with caller:
        try:
            trainer_socket.send(caller, Forward(write(RelayCall(spec, text)), 0.0), payload)
            told, answer = trainer_socket.receive(caller)
        except EOFError as error:
            raise OSError("the relay's app ended before it answered") from error
    assert isinstance(told, Forwarded)
    return told.text, answer


@dataclass(frozen=True, slots=True)
class EmulatedLine:
    """Network line of an emulated machine: delay of a message one way [s], and of each byte [s]."""

    latency_s: float = 0.0
    byte_s: float = 0.0

    def carried(self, payload: Payload | None, begin_s: float) -> None:
        nbytes = 0 if payload is None else payload.nbytes
        time.sleep(max(0.0, begin_s + self.latency_s + nbytes * self.byte_s - time.monotonic()))


def emulated_line(identity: Identity, environment: Mapping[str, str]) -> EmulatedLine:
    machines = [] if environment.get(ALLOWED) else json.loads(identity.spec).get("emulate", [])
    if not 0 <= identity.index < len(machines):
        return EmulatedLine()
    # Mirrors `fedsync.config.cluster.SiloConfig`, whose imports a thin client avoids.
    machine = machines[identity.index]
    mbps = machine.get("bandwidth_mbps")
    return EmulatedLine(float(machine.get("latency_s", 0.0)), 0.0 if mbps is None else 8e-6 / float(mbps))


def identify(spec: str, node: Config, run: Config = MappingProxyType({})) -> Identity:
    """Return the identity of a node's silo, with the owner's decisions in the node's configuration, as ``partition-id=0
    silo-name="clinic-a" device="cuda:0" resources="off" declared-speed=200.0``. `ConfigError` for a wrong kind of
    value.
    """
    index, device = _number(node, "partition-id", int) or 0, node.get("device")
    consent = str(node.get("resources", True)).strip().lower()
    if consent not in (*_YES, *_NO):
        problem = f"{node['resources']!r} is neither on nor off"
        raise ConfigError("node configuration, resources", problem, "Write on or off")
    return Identity(
        spec=spec,
        index=index,
        name=str(node.get("silo-name", f"silo-{index}")),
        declared_speed=_number(node, "declared-speed", float),
        device=None if device is None else str(device),
        resources=consent in _YES,
        node_config=json.dumps({key: node[key] for key in sorted(node.keys() - OWN_NODE_KEYS)}),
        run_config=run_config_text({key: run[key] for key in run.keys() - OWN_RUN_KEYS}),
    )


def _number(node: Config, key: str, kind: type[_Number]) -> _Number | None:
    try:
        return kind(node[key]) if key in node else None
    except (ValueError, OverflowError):
        raise ConfigError(f"node configuration, {key}", f"{node[key]!r} is no number", "Write a number") from None
