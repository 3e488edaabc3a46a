"""What a silo answers: a question goes to the trainer of its run, or to the relay's app, and the answer is put down.

Nothing is decoded here, and nothing heavy is imported. Errors become a code of the closed list
(`fedsync.silo.owner.refusals`): what they say is not for the server.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from fedsync.common import foreign
from fedsync.common.errors import ConfigError, FedSyncError
from fedsync.common.sandbox.path_sandbox import ALLOWED
from fedsync.model.transfer import Payload
from fedsync.silo.owner.approvals import check_approved
from fedsync.silo.owner.audit import audit_answer
from fedsync.silo.owner.refusals import code_of, refuse
from fedsync.silo.protocol import RESOURCES, Ask, Forward, Forwarded, Identity, Refused, write_reply
from fedsync.silo.relays.relay_messages import RelayCall, write
from fedsync.silo.run_text import run_config_text
from fedsync.silo.session import connection
from fedsync.silo.session.trainer_client import TrainerClient, asked_for, check_room, trainer_folder
from fedsync.transport.questions import BESIDE_BYTES

logger = foreign.logger(__name__)

Config = Mapping[str, bool | int | float | str]
"""Flower's node configuration, or run configuration."""

OWN_NODE_KEYS = {
    *(
        "partition-id",
        "silo-name",
        "device",
        "processes",
        "resources",
        "declared-speed",
        "relay",
        "hub-hosts",
        "hub-authority",
    )
}
OWN_RUN_KEYS = {
    *("strategy", "silos", "overrides", "out", "control", "keys", "registered", "regions", "resume", "target-accuracy"),
    "relay",
}
"""What FedSync itself reads of a configuration; the rest is for the silo's own training code. A run that is resumed is
the same run, though ``resume`` then says so."""

_YES, _NO = ("on", "true", "yes", "1"), ("off", "false", "no", "0")
_GREET_S = 60.0

Fetch = Callable[[Path], Payload | None]
"""Brings what goes with a question, to a folder where it is large."""


def connect(identity: Identity) -> Ask:
    """The way to the trainer of a silo; tests put a trainer of this process in its place."""
    return TrainerClient(identity).ask


@dataclass(frozen=True, slots=True)
class Place:
    """Where a question is answered: the node's and the run's configuration, and Flower's numbers of both."""

    node: Config
    run: Config = field(default_factory=dict)
    ids: str = ""

    @property
    def relay(self) -> Path | None:
        """Socket of the relay's app whose node this is; None at a silo."""
        return Path(str(self.node["relay"])) if "relay" in self.node else None

    def answer(self, spec: str, text: str, nbytes: int, fetch: Fetch) -> tuple[str, Payload | None]:
        """The answer to a question, as text, and the bytes beside it.

        Args:
            spec: of the run, as JSON.
            text: of the question.
            nbytes: that come with it.
            fetch: brings them.
        """
        if self.relay is not None:
            return self._relayed(self.relay, spec, text, fetch)
        identity: Identity | None = None
        try:
            begin_s = time.monotonic()
            identity = identify(spec, self.node, os.environ, self.run)
            check_approved(identity)  # before a model is fetched, or a trainer started
            asked_for.set(self.ids)
            line = emulated_line(identity, os.environ)
            folder = trainer_folder(identity)
            if nbytes > BESIDE_BYTES:
                check_room(folder.parent, nbytes)
            payload = fetch(folder) if nbytes else None
            line.carried(payload, begin_s)
            reply, answer = connect(identity)(text, payload)
            audit_answer(identity, text, nbytes, reply, answer)  # before anything leaves
            line.carried(answer, time.monotonic())
            return reply, answer
        except Exception as error:
            return refusal(error, identity, text, nbytes), None

    @staticmethod
    def _relayed(socket: Path, spec: str, text: str, fetch: Fetch) -> tuple[str, Payload | None]:
        try:
            return ask_relay(socket, spec, text, fetch(socket.parent))
        except Exception as error:  # a relay has no owner to be told of it
            known = isinstance(error, OSError | FedSyncError)
            told = "a question of the server above has no answer, and is asked again: %s"
            logger.warning(told, error, exc_info=None if known else error)
            return write_reply(Refused(code_of(error))), None


def refusal(error: Exception, identity: Identity | None = None, asked: str = "", nbytes: int = 0) -> str:
    """The answer to a question of which nothing came but an error; arguments as `audit_answer`. Raises nothing."""
    reply = write_reply(refuse(error))
    try:
        audit_answer(identity, asked, nbytes, reply, None)
    except Exception as unwritten:  # a code of the closed list is all that leaves then
        reply = write_reply(refuse(unwritten))
    return reply


def ask_relay(socket: Path, spec: str, text: str, payload: Payload | None) -> tuple[str, Payload | None]:
    """Hand a question to the relay's app; waits for it where it is not there yet.

    Raises:
        OSError: it is not there for a minute, or ends before it answers.
    """
    end_s = time.monotonic() + _GREET_S
    while (caller := connection.call(socket)) is None:
        if time.monotonic() > end_s:
            raise OSError("the relay's app is not there")
        time.sleep(0.5)
    with caller:
        try:
            connection.send(caller, Forward(write(RelayCall(spec, text)), 0.0), payload)
            told, answer = connection.receive(caller)
        except EOFError as error:
            raise OSError("the relay's app ended before it answered") from error
    assert isinstance(told, Forwarded)
    return told.text, answer


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
        node_config=json.dumps({key: node[key] for key in sorted(node.keys() - OWN_NODE_KEYS)}),
        run_config=run_config_text({key: run[key] for key in run.keys() - OWN_RUN_KEYS}),
    )


def _consents(place: str, value: bool | float | str) -> bool:
    word = str(value).strip().lower()
    if word not in (*_YES, *_NO):
        raise ConfigError(place, f"{value!r} is neither on nor off", "Write on or off")
    return word in _YES
