"""The resident ClientApp process, beside Flower's own runtime interface of a SuperNode, in this process."""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.app.user_config import UserConfig
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supernode.main import create_app
from flwr.supernode.nodestate import NodeStateFactory
from flwr.supernode.start_client_internal import _insert_message

from fedsync.common.processes import free_ports
from fedsync.flower.internals import executor, supernode_client
from fedsync.flower.internals.executor import _GivenUp, _unless_given_up, run_task
from fedsync.flower.internals.supernode_client import PendingTask, SupernodeClient, client_of
from tests.flower.grid import run_identity

RUN, NODE = 1, 7


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(executor, "_WANTED_S", 0.01)
    with run_identity():
        yield


class SuperNode:
    """Flower's runtime interface with what a SuperNode keeps, and nobody who fetches messages from a server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "secret").write_bytes(secrets.token_bytes(32))
        self.door = SupernodeClient(folder / "port", folder / "secret")

    def start(self) -> None:
        """On another port, and with nothing in memory."""
        factory = NodeStateFactory(ObjectStoreFactory())
        self.state, self.store = factory.state(), factory.objectstore_factory.store()
        self.state.set_node_id(NODE)
        (port,) = free_ports(1)
        app = create_app(factory, (self.folder / "secret").read_bytes())
        self._server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="critical"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        (self.folder / "port").write_text(str(port))
        while not self._server.started:
            self._thread.join(0.005)
            assert self._thread.is_alive()

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()

    def hand_in(self, text: str) -> None:
        """A message for the executor, as if the server had sent it."""
        run = Run.create_empty(RUN)
        run.fab_hash, run.fab_id = hashlib.sha256(b"").hexdigest(), "someone/something"
        self.state.store_run(run)
        self.state.store_fab(Fab(run.fab_hash, b"", {}))
        config: UserConfig = {}
        context = Context(RUN, NODE, config, RecordDict(), config, run.series_id)
        self.state.set_run_series_context(run.series_id, context)
        message = Message(RecordDict({"said": ConfigRecord({"text": text})}), dst_node_id=NODE, message_type="query")
        _insert_message(message, self.state, self.store)
        assert self.state.create_task(TaskType.CLIENT_APP, RUN, run.fab_hash) is not None

    def answers(self) -> list[Message]:
        """What the executor has said, without contents; once."""
        return list(self.state.get_messages_legacy(is_reply=True))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SuperNode]:
    node = SuperNode(tmp_path)
    node.start()
    yield node
    node.stop()


def apps(answer: Callable[[Message, Context], Message]) -> Any:
    """Every bundle's app is this one."""
    return SimpleNamespace(of=lambda run, fab: answer)


def echo(message: Message, context: Context) -> Message:
    return Message(message.content, reply_to=message)


def test_a_message_is_answered_over_the_supernodes_own_interface(node: SuperNode) -> None:
    assert node.door.acquire() is None
    node.hand_in("hello")
    task = node.door.acquire()
    assert task is not None and task.address == node.door.address
    assert run_task(node.door, task, apps(echo)) is None
    (answer,) = node.answers()
    assert not answer.has_error()


def test_what_an_app_raises_is_the_answer(node: SuperNode) -> None:
    def refuses(message: Message, context: Context) -> Message:
        raise TimeoutError("not today")

    node.hand_in("hello")
    task = node.door.acquire()
    assert task is not None and run_task(node.door, task, apps(refuses)) is None
    (answer,) = node.answers()
    assert answer.error.reason == "TimeoutError: not today"


def test_messages_are_for_who_has_the_secret(node: SuperNode, caplog: pytest.LogCaptureFixture) -> None:
    node.hand_in("hello")
    other = node.folder / "other"
    other.write_bytes(secrets.token_bytes(32))
    stranger = SupernodeClient(node.folder / "port", other)
    assert stranger.acquire() is None and stranger.acquire() is None
    (said,) = [record.message for record in caplog.records if record.name == supernode_client.__name__]
    assert "gives out no messages: Client error '401 Unauthorized'" in said
    with pytest.raises(httpx.HTTPStatusError, match="401"):  # and no signal to this process
        client_of(node.door.address, patient=True).AcquireTask(_request())
    assert node.door.acquire() is not None


def _request() -> Any:
    from flwr.proto.runtime_pb2 import AcquireTaskRequest

    return AcquireTaskRequest(supported_task_types={TaskType.CLIENT_APP})


def test_a_supernode_that_is_started_again_in_the_middle_of_a_task_is_served_at_once(node: SuperNode) -> None:
    begun, over = threading.Event(), threading.Event()

    def slow(message: Message, context: Context) -> Message:
        begun.set()
        over.wait()
        return echo(message, context)

    def restart() -> None:
        begun.wait()
        node.stop()
        node.start()
        node.hand_in("second")

    node.hand_in("first")
    first = node.door.acquire()
    assert first is not None
    meanwhile = threading.Thread(target=restart)
    meanwhile.start()
    second = run_task(node.door, first, apps(slow))
    meanwhile.join()
    assert not over.is_set(), "nobody waited for the first"
    second = second or node.door.acquire()
    assert second is not None and second.address != first.address
    over.set()
    run_task(node.door, second, apps(echo))
    assert [answer.has_error() for answer in node.answers()] == [False]


def test_a_token_from_before_costs_the_answer_and_not_the_process(node: SuperNode) -> None:
    lost = PendingTask(node.door.address, secrets.token_hex())
    assert run_task(node.door, lost, apps(echo)) is None
    assert node.answers() == []
    node.hand_in("hello")
    task = node.door.acquire()
    assert task is not None and run_task(node.door, task, apps(echo)) is None
    assert len(node.answers()) == 1


def test_while_no_supernode_is_there_nobody_is_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    nobody = SupernodeClient(tmp_path / "port", tmp_path / "secret")
    assert nobody.address == "" and nobody.acquire() is None
    (port,) = free_ports(1)
    (tmp_path / "port").write_text(str(port))
    assert nobody.address == f"127.0.0.1:{port}" and nobody.acquire() is None
    assert caplog.messages == []


# Waiting.


def never() -> str:
    threading.Event().wait()
    return "unreachable"


def test_a_message_that_comes_is_taken() -> None:
    assert _unless_given_up(lambda: "message", lambda: True, lambda: PendingTask("", "other")) == "message"


def test_a_message_that_takes_its_time_is_waited_for() -> None:
    asked = threading.Event()

    def slow() -> str:
        asked.wait()
        return "message"

    def acquire() -> None:
        asked.set()

    assert _unless_given_up(slow, lambda: True, acquire) == "message"


def test_what_prevents_it_is_said() -> None:
    def broken() -> str:
        raise OSError("no route")

    with pytest.raises(OSError, match="no route"):
        _unless_given_up(broken, lambda: True, lambda: None)


def test_the_next_task_takes_the_place_of_one_whose_rest_never_comes() -> None:
    other = PendingTask("127.0.0.1:1", "other")
    tasks = iter([None, None, other])
    with pytest.raises(_GivenUp) as caught:
        _unless_given_up(never, lambda: True, lambda: next(tasks))
    assert caught.value.following is other


def test_a_task_that_is_not_wanted_any_more_is_left() -> None:
    with pytest.raises(_GivenUp) as caught:
        _unless_given_up(never, lambda: False, lambda: None)
    assert caught.value.following is None
