"""The silo's side of Flower: a pipe to the silo's resident trainer.

Flower may start a process for every message, and serves one message at a time. So nothing heavy is imported here, and
nothing is decoded: text and bytes go to the trainer's socket and come back from it. Large ones are files, which the
trainer is told the names of, and go from and to the server's gate. An order that the server wants to hear of before it
ends is handed over: the trainer answers in time, with the update or with how far the silo is.

Nothing is raised to Flower, which would send the error's words to the server.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import APP_DIR
from flwr.supercore.utils import get_flwr_home

from fedsync.common.fence import ALLOWED
from fedsync.core import foreign
from fedsync.core.errors import SERVER, ConfigError, FedSyncError, ProtocolError
from fedsync.core.transfer import Payload
from fedsync.flower import messages, payloads
from fedsync.flower.parcels import Parcel, Ticket, Uploaded
from fedsync.trainer.approvals import check_approved
from fedsync.trainer.audit import audit_answer
from fedsync.trainer.bundle import announce
from fedsync.trainer.client import TrainerClient, asked_for, trainer_folder
from fedsync.trainer.protocol import RESOURCES, Ask, Identity, Refused, write_reply
from fedsync.trainer.refusals import code_of, refuse
from fedsync.trainer.run_text import run_config_text

logger = foreign.logger(__name__)

app = ClientApp()

Config = Mapping[str, bool | int | float | str]
"""Flower's node configuration, or run configuration."""

_OWN_NODE_KEYS = {"partition-id", "silo-name", "device", "processes", "resources", "declared-speed"}
_OWN_RUN_KEYS = {
    *("strategy", "silos", "overrides", "out", "control", "keys", "registered", "regions", "resume", "target-accuracy"),
    "relay",
}
"""What FedSync itself reads of a configuration; the rest is for the silo's own training code. A run that is resumed is
the same run, though ``resume`` then says so."""

_YES, _NO = ("on", "true", "yes", "1"), ("off", "false", "no", "0")


def connect(identity: Identity) -> Ask:
    """The way to the trainer of a silo; tests put a trainer of this process in its place."""
    announce(get_flwr_home() / APP_DIR)
    return TrainerClient(identity).ask


class ParcelWay(Protocol):
    """The way to what is left at the server's gate; see `fedsync.flower.parcels`."""

    def fetch(self, parcel: Parcel, folder: Path) -> Payload:
        """A parcel, which is a map of a file in ``folder``."""

    def upload(self, ticket: Ticket, payload: Payload) -> Uploaded | None:
        """Leave a payload; None where the server takes no more."""


parcels: ParcelWay | None = None
"""That of this process, where it is a SuperNode that answers its messages itself."""


_taking_in = threading.Lock()


def use_parcels(way: ParcelWay) -> None:
    """Have large payloads go past Flower's messages."""
    global parcels
    parcels = way


@app.query()
@app.train()
@app.evaluate()
def _forward(message: Message, context: Context) -> Message:
    identity, text, nbytes = None, "", 0
    try:
        begin_s = time.monotonic()
        spec, text, payload = messages.read_request(message)
        if "relay" in context.node_config:
            return _relayed(message, Path(str(context.node_config["relay"])), spec, text, payload)
        identity, nbytes = identify(spec, context.node_config, os.environ, context.run_config), _length(payload)
        check_approved(identity)  # before a model is fetched, or a trainer started
        asked_for.set(f"{context.run_id} {context.node_id}")
        line = emulated_line(identity, os.environ)
        # A line brings one after the other, so that no order overtakes the one that it is queued behind.
        with nullcontext() if payload is None else _taking_in:
            if isinstance(payload, Parcel):
                if parcels is None:
                    raise ProtocolError(SERVER, "parcel", "this node cannot fetch any")
                payload = parcels.fetch(payload, trainer_folder(identity))
            line.carried(payload, begin_s)
        reply, answer = connect(identity)(text, payload)
        audit_answer(identity, text, nbytes, reply, answer)  # before anything leaves
        begin_s = time.monotonic()
        packed = None if answer is None else _packed(message, answer)
        line.carried(answer, begin_s)
        return messages.answer(message, reply, packed, fetches=parcels is not None)
    except Exception as error:
        if "relay" in context.node_config:
            return _not_handed_on(message, error)
        return refusal(message, error, identity, text, nbytes)


def _relayed(message: Message, socket: Path, spec: str, text: str, payload: Payload | Parcel | None) -> Message:
    """What the relay answers whose node this is."""
    from fedsync.flower.relay_app import ask_relay

    if isinstance(payload, Parcel):
        if parcels is None:
            raise ProtocolError(SERVER, "parcel", "this node cannot fetch any")
        with _taking_in:
            payload = parcels.fetch(payload, socket.parent)
    reply, answer = ask_relay(socket, spec, text, payload)
    packed = None if answer is None else _packed(message, answer)
    return messages.relay_answer(message, reply, packed, fetches=parcels is not None)


def _not_handed_on(message: Message, error: Exception) -> Message:
    """The answer of a relay's node to what its relay's app did not answer; a relay has no owner to be told of it."""
    known = isinstance(error, OSError | FedSyncError)
    told = "a question of the server above has no answer, and is asked again: %s"
    logger.warning(told, error, exc_info=None if known else error)
    return messages.answer(message, write_reply(Refused(code_of(error))), fetches=parcels is not None)


def refusal(
    message: Message, error: Exception, identity: Identity | None = None, asked: str = "", nbytes: int = 0
) -> Message:
    """The answer to a message of which nothing came but an error; arguments as `audit_answer`. Raises nothing."""
    reply = write_reply(refuse(error))
    try:
        audit_answer(identity, asked, nbytes, reply, None)
    except Exception as unwritten:  # a code of the closed list is all that leaves then
        reply = write_reply(refuse(unwritten))
    return messages.answer(message, reply, fetches=parcels is not None)


def _length(payload: Payload | Parcel | None) -> int:
    return 0 if payload is None else payload.nbytes


@dataclass(frozen=True, slots=True)
class EmulatedLine:
    """The line of a machine that a silo emulates: how long a message takes one way [s], and each byte [s]."""

    latency_s: float = 0.0
    byte_s: float = 0.0

    def carried(self, payload: Payload | None, begin_s: float) -> None:
        """Wait until a message has come that began then."""
        nbytes = 0 if payload is None else payload.nbytes
        time.sleep(max(0.0, begin_s + self.latency_s + nbytes * self.byte_s - time.monotonic()))


def emulated_line(identity: Identity, environment: Mapping[str, str]) -> EmulatedLine:
    """The line of the machine that a silo emulates; one that takes no time where it has an owner, or emulates none."""
    machines = [] if environment.get(ALLOWED) else json.loads(identity.spec).get("emulate", [])
    if not 0 <= identity.index < len(machines):
        return EmulatedLine()
    # As in `fedsync.config.cluster.SiloConfig`, whose imports a thin client does without.
    machine = machines[identity.index]
    mbps = machine.get("bandwidth_mbps")
    return EmulatedLine(float(machine.get("latency_s", 0.0)), 0.0 if mbps is None else 8e-6 / float(mbps))


def _packed(message: Message, answer: Payload) -> payloads.Packed:
    """An answer for the message, or what it is called where it was left."""
    ticket = messages.read_ticket(message)
    if ticket is not None and parcels is not None and answer.nbytes > payloads.SMALL_BYTES:
        uploaded = parcels.upload(ticket, answer)
        if uploaded is not None:
            return uploaded
    return payloads.pack(answer)


def identify(spec: str, node: Config, environment: Mapping[str, str], run: Config = MappingProxyType({})) -> Identity:
    """Which silo a node is, and what its owner has decided.

    The owner decides by the node's configuration, ``partition-id=0 silo-name="clinic-a" device="cuda:0"
    processes=2 resources="off" declared-speed=200.0``, and by the environment variable ``FEDSYNC_RESOURCES=off``. To
    tell of the machine takes the consent of all.

    Args:
        spec: the run's specification as JSON.
        node: configuration of the node.
        environment: variables of this process.
        run: configuration of the run.

    Raises:
        ConfigError: a value means nothing.
    """
    index, declared, device = int(node.get("partition-id", 0)), node.get("declared-speed"), node.get("device")
    processes = node.get("processes")
    return Identity(
        spec=spec,
        index=index,
        name=str(node.get("silo-name", f"silo-{index}")),
        declared_speed=None if declared is None else float(declared),
        device=None if device is None else str(device),
        processes=None if processes is None else int(processes),
        resources=_consents("node configuration, resources", node.get("resources", True))
        and _consents(RESOURCES, environment.get(RESOURCES) or "on"),
        node_config=json.dumps({key: node[key] for key in sorted(node.keys() - _OWN_NODE_KEYS)}),
        run_config=run_config_text({key: run[key] for key in run.keys() - _OWN_RUN_KEYS}),
    )


def _consents(place: str, value: bool | float | str) -> bool:
    word = str(value).strip().lower()
    if word not in (*_YES, *_NO):
        raise ConfigError(place, f"{value!r} is neither on nor off", "Write on or off")
    return word in _YES
