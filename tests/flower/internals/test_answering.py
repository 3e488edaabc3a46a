"""A SuperNode that answers itself: with what Flower's own keeps, and nobody who fetches messages from a server."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from importlib import import_module

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.app.user_config import UserConfig
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supernode import start_client_internal as internal
from flwr.supernode.nodestate import NodeStateFactory

from fedsync.common.fence import ALLOWED
from fedsync.flower.internals import answering, versions
from tests.flower.grid import run_identity

RUN, NODE = 1, 7

pytestmark = pytest.mark.skipif(not versions.supported(), reason="this flwr is not a tested version")

Client = Callable[[Message, Context], Message]


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(ALLOWED, "{}")  # a real silo's
    with run_identity():
        yield


class SuperNode:
    """What a SuperNode keeps of messages."""

    def __init__(self) -> None:
        factory = NodeStateFactory(ObjectStoreFactory())
        self.state, self.store = factory.state(), factory.objectstore_factory.store()
        self.state.set_node_id(NODE)
        run = Run.create_empty(RUN)
        run.fab_hash = hashlib.sha256(b"").hexdigest()
        self.state.store_run(run)
        self.state.store_fab(Fab(run.fab_hash, b"", {}))
        config: UserConfig = {}
        self.state.set_run_series_context(run.series_id, Context(RUN, NODE, config, RecordDict(), config, 0))
        self.answers = answering.Answers()

    def hand_in(self, text: str, *, queues: bool = False) -> None:
        """A message, as if the server had sent it."""
        said = {"said": ConfigRecord({"text": text}), "fedsync": ConfigRecord({"spec": json.dumps({"queues": queues})})}
        message = Message(RecordDict({**said}), dst_node_id=NODE, message_type="query")
        internal._insert_message(message, self.state, self.store)

    def answer(self, monkeypatch: pytest.MonkeyPatch, client: Client) -> Message:
        monkeypatch.setattr(answering, "installed_app", lambda run, fab: client)
        self.answers.begin(self.state, self.store)
        (reply,) = self.ready()
        return reply

    def ready(self) -> list[Message]:
        """Answers that can go out."""
        self.answers.hand_in(self.state, self.store)
        return list(self.state.get_messages_legacy(is_reply=True))

    def told(self, reply: Message) -> str:
        """The text in an answer, as the server gets it."""
        return str(self.sent(reply).content["fedsync"]["text"])  # type: ignore[index, call-overload]

    def sent(self, reply: Message) -> Message:
        parts = {name: self.store.get(name) for name in list(self.store.store)}  # type: ignore[attr-defined]
        whole = inflate_object_from_contents(reply.metadata.message_id, parts)  # type: ignore[arg-type]
        assert isinstance(whole, Message)
        return whole


def echo(message: Message, context: Context) -> Message:
    assert context.node_id == NODE
    return Message(message.content, reply_to=message)


def test_a_message_is_answered_and_its_parts_give_way_to_those_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    node = SuperNode()
    node.hand_in("hello")
    reply = node.answer(monkeypatch, echo)
    assert node.sent(reply).content["said"]["text"] == "hello"  # type: ignore[index, call-overload]
    node.store.delete(reply.metadata.message_id)
    assert len(node.store) == 0, "nothing of the message is left"
    assert node.state.get_message_processing_duration(reply.metadata.reply_to_message_id) >= 0


def test_what_a_client_raises_is_the_answer_and_the_next_message_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(message: Message, context: Context) -> Message:
        raise TimeoutError("not today")

    node = SuperNode()
    node.hand_in("hello")
    said = node.answer(monkeypatch, refuses)
    assert not said.has_error(), "Flower's errors have words"
    assert node.told(said) == '{"type":"Refused","code":"internal"}'
    node.hand_in("again")
    assert not node.answer(monkeypatch, echo).has_error()


def test_a_run_that_is_not_known_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    node = SuperNode()
    node.state.run_store.clear()  # type: ignore[attr-defined]
    node.hand_in("hello")
    assert node.told(node.answer(monkeypatch, echo)) == '{"type":"Refused","code":"internal"}'


def test_the_supernode_of_this_process_answers_before_it_sends_and_opens_no_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = import_module("flwr.supernode.cli.flower_supernode")
    node, sent = SuperNode(), []

    def push(**options: object) -> None:
        sent.append((options.keys(), len(node.state.get_messages_legacy(is_reply=True))))

    pulled: list[int | None] = [3, None]
    monkeypatch.setattr(internal, "_pull_and_store_message", lambda **ways: pulled.pop(0))
    monkeypatch.setattr(internal, "_push_messages", push)
    monkeypatch.setattr(program, "_start_supernode_http_api", None)
    monkeypatch.setattr(answering, "installed_app", lambda run, fab: echo)
    answering.answer_here()
    pull: Callable[..., int | None] = internal._pull_and_store_message  # type: ignore[assignment]
    node.hand_in("hello")
    assert pull(state=node.state) == 3
    internal._push_messages(state=node.state, object_store=node.store, send=None, push_object=None)  # type: ignore[arg-type]
    assert pull(state=node.state) is None, "nothing is under way, so Flower may make its pause"
    assert sent == [({"state", "object_store", "send", "push_object"}, 1)]
    server, thread = program._start_supernode_http_api("configuration", "state")
    thread.join(timeout=5)
    assert not thread.is_alive() and not server.should_exit


def test_nothing_of_messages_that_were_answered_stays_in_the_supernodes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its state holds of fifty messages it holds of ten; Flower's own keeps a task of 1.7 KiB for each."""
    node, sent = SuperNode(), list[str]()
    monkeypatch.setattr(answering, "installed_app", lambda run, fab: echo)
    for name in ("_pull_and_store_message", "_push_messages"):
        monkeypatch.setattr(internal, name, getattr(internal, name))
    monkeypatch.setattr(import_module("flwr.supernode.cli.flower_supernode"), "_start_supernode_http_api", None)
    answering.answer_here()

    def turn(text: str, broken: bool) -> None:
        said = {"said": ConfigRecord({"text": text}), "fedsync": ConfigRecord({"spec": "{}"})}
        message = Message(RecordDict({**said}), dst_node_id=NODE, message_type="query")
        parts = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
        message.metadata.__dict__["_message_id"] = message.object_id
        tree = get_object_tree(message)

        def part(run: int, name: str) -> bytes:
            if broken:
                raise OSError("the line broke")
            return parts[name]

        run = internal._pull_and_store_message(
            state=node.state,
            object_store=node.store,
            node_config={},
            receive=lambda: (remove_content_from_message(message), tree),
            get_run=lambda number: pytest.fail("it is known"),
            get_fab=lambda digest, number: pytest.fail("it is known"),
            pull_object=part,
            confirm_message_received=lambda run, name: None,
            trusted_entities=None,
        )
        assert (run is None) == broken
        if not broken:
            internal._push_messages(
                state=node.state,
                object_store=node.store,
                send=lambda reply, tree, seconds: (sent.append(reply.metadata.reply_to_message_id), (set(), ""))[1],
                push_object=lambda *told: None,
            )

    def kept() -> dict[str, int]:
        both = {**vars(node.state), **vars(node.store)}
        return {name: len(held) for name, held in both.items() if isinstance(held, dict | list | set)}

    for index in range(10):
        turn(f"{index}", broken=index % 5 == 4)
    before = kept()
    for index in range(10, 60):
        turn(f"{index}", broken=index % 5 == 4)
    assert len(set(sent)) == 48 and kept() == before
    assert before["time_store"] == 1 and before["task_store"] == before["msg_store"] == before["store"] == 0


class Held:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.go_on = {"first": threading.Event(), "second": threading.Event()}

    def __call__(self, message: Message, context: Context) -> Message:
        assert self.go_on[str(message.content["said"]["text"])].wait(20)  # type: ignore[index, call-overload]
        return echo(message, context)


def texts(node: SuperNode, replies: list[Message]) -> list[object]:
    return [node.sent(reply).content["said"]["text"] for reply in replies]  # type: ignore[index, call-overload]


def test_a_message_is_taken_in_while_another_is_answered_where_the_run_queues_orders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node, client = SuperNode(), Held()
    monkeypatch.setattr(answering, "installed_app", lambda run, fab: client)
    for text in client.go_on:
        node.hand_in(text, queues=True)
        node.answers.begin(node.state, node.store)
        assert not node.ready(), "it is begun, and nothing waits for it"
    assert node.answers.wait(0.0), "there is something to wait for"
    client.go_on["second"].set()
    assert node.answers.wait(20)
    assert texts(node, node.ready()) == ["second"]
    client.go_on["first"].set()
    assert node.answers.wait(20)
    assert texts(node, node.ready()) == ["first"] and not node.answers.wait(0.0)


@pytest.mark.parametrize(("queues", "most"), [(False, 4), (True, 1)], ids=["another run's", "too many"])
def test_other_messages_wait_until_one_is_answered(queues: bool, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    node, client = SuperNode(), Held()
    monkeypatch.setattr(answering, "installed_app", lambda run, fab: client)
    monkeypatch.setattr(answering, "MOST_AT_ONCE", most)
    node.hand_in("first", queues=queues)
    waiting = threading.Thread(target=node.answers.begin, args=(node.state, node.store), daemon=True)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    client.go_on["first"].set()
    waiting.join(20)
    assert texts(node, node.ready()) == ["first"]
