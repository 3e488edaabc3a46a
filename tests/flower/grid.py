"""A grid in this process: silos answer at once, and tests decide what they answer."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.app.user_config import UserConfig
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedsync.common.errors import ProtocolError
from fedsync.extras.relays.relay_messages import read_region_request
from fedsync.flower import client_app
from fedsync.flower import flower_messages as messages
from fedsync.model.transfer import MAX_SEALED_BYTES, Payload
from fedsync.server.outbox import kind_of
from fedsync.silo.agent import answers
from fedsync.silo.protocol import (
    MAX_LAYOUT_TEXT,
    Ask,
    Identity,
    Reply,
    Request,
    read_reply,
    read_request,
    write_reply,
    write_request,
)
from fedsync.silo.session.service import TrainerService
from fedsync.transport.port import SiloQuestion

Answer = Callable[[Message, Context], Message | None]

trainers: dict[Identity, TrainerService] = {}
"""Those in this process."""


def honest(message: Message, context: Context) -> Message:
    """What the real silo side answers."""
    return client_app.app(message, context)


def unless(lost: Callable[[Request], object]) -> Answer:
    """A silo that is honest, and loses requests of which ``lost`` is true; ``lost`` hears each before its answer."""

    def answer(message: Message, context: Context) -> Message | None:
        return None if lost(asked(message)) else honest(message, context)

    return answer


def changing(kind: type, change: Callable[[Any, Payload | None], tuple[Reply, Payload | None]]) -> Answer:
    """A silo that is honest but for its replies of this kind, which are what ``change`` makes of them."""

    def answer(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        found, payload = said(reply)
        return saying(message, *change(found, payload)) if isinstance(found, kind) else reply

    return answer


class DirectGrid(Grid):
    """Nodes 1..n that keep their context; ``answers`` replaces what a node says, by node."""

    def __init__(self, nodes: int, answers: dict[int, Answer] | None = None) -> None:
        self.nodes = set(range(1, nodes + 1))
        self.starts = dict.fromkeys(self.nodes, 1)
        """How often each node was started."""
        self.names: dict[int, str] = {}
        """Names under which nodes are registered."""
        self.answers = answers or {}
        self.pushed: list[tuple[int, str]] = []
        self._replies: dict[str, Message] = {}
        self._contexts = {
            node: Context(
                run_id=1,
                node_id=node,
                node_config=cast(UserConfig, {"partition-id": node - 1}),
                state=RecordDict(),
                run_config=cast(UserConfig, {}),
            )
            for node in self.nodes
        }

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *arguments: Any, **options: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, *arguments: Any, **options: Any) -> Iterable[Message]:
        raise AssertionError("the driver has its own push and pull")

    def get_node_ids(self) -> Iterable[int]:
        return sorted(self.nodes)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [
            NodeInfo(node_id=node, name=self.names.get(node), last_activated_at=str(self.starts[node]))
            for node in sorted(self.nodes)
        ]

    def push_messages(self, sent: Iterable[Message]) -> Iterable[str]:
        for message in sent:
            node = message.metadata.dst_node_id
            self.pushed.append((node, kind(message)))
            if node not in self.nodes:
                yield ""
                continue
            identifier = f"message-{len(self.pushed)}"
            message.metadata.__dict__["_message_id"] = identifier
            reply = self.answers.get(node, honest)(message, self._contexts[node])
            if reply is not None:
                self._replies[identifier] = reply
            yield identifier

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(identifier) for identifier in message_ids if identifier in self._replies]


@contextmanager
def silos_in_this_process() -> Iterator[None]:
    """Silos have their trainers in this process, which belongs to a run, as Flower's messages demand."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "connect", connect)
        trainers.clear()
        with run_identity():
            yield


def connect(identity: Identity, make: Callable[[Identity], TrainerService] = TrainerService) -> Ask:
    """The way to a silo's trainer in this process, which is made if there is none."""
    if identity not in trainers:
        trainers[identity] = make(identity)
    return trainers[identity].ask


def keep_state(monkeypatch: pytest.MonkeyPatch, folder_of: Callable[[Identity], Path]) -> None:
    """Trainers in this process keep what survives them in a folder each."""

    def make(identity: Identity) -> TrainerService:
        folder = folder_of(identity)
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        identity.save(folder)
        return TrainerService(identity, folder)

    monkeypatch.setattr(answers, "connect", lambda identity: connect(identity, make))


def kind(message: Message) -> str:
    """Name of what a message asks a silo, or a relay; its text, if that is no request."""
    text = messages.read_request(message)[1]
    try:
        for_relay = read_region_request(text)
        return type(read_request(text) if for_relay is None else for_relay).__name__
    except ProtocolError:
        return text


def asked(message: Message) -> Request:
    return read_request(messages.read_request(message)[1])


def posing(request: Request, payload: Payload | None = None, spec: str = "{}", node: int = 1) -> Message:
    """A message that asks a silo something."""
    return messages.request(node, SiloQuestion(write_request(request), payload, spec=spec, kind=kind_of(request)))


def said(reply: Message) -> tuple[Reply, Payload | None]:
    """What a silo answered."""
    text, payload = messages.read_answer(reply, "a", MAX_SEALED_BYTES)
    return read_reply(text, "a", MAX_LAYOUT_TEXT), payload


def saying(message: Message, reply: Reply, payload: Payload | None = None) -> Message:
    return messages.answer(message, write_reply(reply), payload)


@contextmanager
def run_identity() -> Iterator[None]:
    """This process belongs to run 1, without which Flower makes no messages."""
    before = (TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id)
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    try:
        yield
    finally:
        TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id = before
