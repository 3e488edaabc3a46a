"""A SuperNode that answers its messages itself.

Flower's own starts a process for every message, which costs seconds of imports, and waits for that process to fetch the
message and to bring the answer over an HTTP interface on this machine. Here the SuperNode calls the installed client,
which is thin: it passes the message on to the silo's trainer. So a silo has one process less, no port is open, and
nobody else can fetch its messages. SIGTERM ends a SuperNode also while it waits for its trainer, and the trainer
outlives it.

A SuperNode of Flower takes one message at a time. Where a run queues orders at its silos, this one goes on looking for
messages while earlier ones are answered, each in a thread: an order comes in while the one before it is in work, and
while that one's update goes out. All that Flower keeps is touched by the main thread alone.

Only FedSync's own client may run in the process that holds the node's key. Where a silo's owner allows code that the
server sends, Flower's own way stays.

It uses internals of flwr, for the versions in `fedsync.flower.internals.versions.TESTED` only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fedsync.flower.internals.apps import installed_app
from fedsync.flower.internals.bundle_client import BundlingClient, node_client
from fedsync.flower.internals.leftovers import make_no_tasks
from fedsync.flower.internals.parcel_client import with_identity_of

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.supercore.object_store import ObjectStore
    from flwr.supernode.nodestate import NodeState


MOST_AT_ONCE = 4
"""Messages that are answered at the same time: two orders, and as many other questions."""

LOOK_S = 0.1
"""Pause between two looks for messages while some are answered, unless an answer is ready sooner."""


def answer_here() -> None:
    """Have the SuperNode that this process becomes answer its messages itself."""
    import flwr.supernode.start_client_internal as internal

    from fedsync.flower.client_app import use_parcels

    clients: list[BundlingClient] = []

    def bundling(flowers: Any) -> BundlingClient:
        clients.append(node_client(flowers))
        return clients[-1]

    with_identity_of(use_parcels, bundling)
    pull, push, answers = internal._pull_and_store_message, internal._push_messages, Answers()

    def pull_or_go_on(*, state: Any, **ways: Any) -> int | None:
        make_no_tasks(state)
        for client in clients:
            # Who has answers under way must not be held while one becomes ready.
            client.patient = not answers.under_way
        run = pull(state=state, **ways)
        # Not None has Flower's loop go on to what it calls pushing, at once.
        return run if run is not None or not answers.wait(LOOK_S) else 0

    def answer_and_push(*, state: NodeState, object_store: ObjectStore, **ways: Callable[..., Any]) -> None:
        answers.begin(state, object_store)
        parts = answers.hand_in(state, object_store)
        if parts:
            for client in clients:
                client.outgoing = parts
            push(state=state, object_store=object_store, **ways)

    vars(internal).update(_pull_and_store_message=pull_or_go_on, _push_messages=answer_and_push)
    # Its package has a function of the same name.
    program = import_module("flwr.supernode.cli.flower_supernode")
    vars(program)["_start_supernode_http_api"] = _no_interface


@dataclass(slots=True)
class Answers:
    """Messages that are being answered. Its methods are for the main thread."""

    _under_way: int = 0
    _patient: bool = False
    """Whether others may come in while those under way are answered: the run of the last one queues orders, or this is
    a relay's, which holds a message until it has something to say."""

    _ready: list[Message] = field(default_factory=list)
    _change: threading.Condition = field(default_factory=threading.Condition)

    def begin(self, state: NodeState, store: ObjectStore) -> None:
        """Begin to answer what has come in; returns when another message may, or an answer is ready.

        Args:
            state: of the SuperNode; has the messages without their content.
            store: has the parts of their content.
        """
        from fedsync.flower import messages

        for head in state.get_messages_legacy(is_reply=False):
            state.record_message_processing_start(message_id=head.metadata.message_id)
            self._under_way += 1
            try:
                client, message, context = _taken_in(head, state, store)
                self._patient = "relay" in context.node_config or messages.queues(message)
            except Exception as error:
                self._over(_refused(head, error))
                continue
            call = partial(client, message=message, context=context)
            threading.Thread(target=self._answer, args=(head, call), daemon=True).start()
        with self._change:
            free = self._patient and self._under_way < MOST_AT_ONCE
            self._change.wait_for(lambda: self._ready or free or not self._under_way)

    def wait(self, seconds: float) -> bool:
        """Wait for an answer for so long at most; False at once where there is none to wait for."""
        with self._change:
            if self._under_way:
                self._change.wait_for(lambda: bool(self._ready), seconds)
            return bool(self._under_way)

    @property
    def under_way(self) -> bool:
        return self._under_way > 0

    def hand_in(self, state: NodeState, store: ObjectStore) -> dict[str, bytes]:
        """Give Flower the answers that are ready; returns their parts, by name."""
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

        with self._change:
            ready, self._ready = self._ready, []
            parts: dict[str, bytes] = {}
            self._under_way -= len(ready)
        for reply in ready:
            state.record_message_processing_end(message_id=reply.metadata.reply_to_message_id)
            # The parts first: whoever finds the message may ask for them.
            reply.metadata.__dict__["_message_id"] = reply.object_id
            store.preregister(reply.metadata.run_id, get_object_tree(reply))
            for identifier, part in get_all_nested_objects(reply).items():
                parts[identifier] = part.deflate()
                store.put(identifier, parts[identifier])
            state.store_message(reply)
        return parts

    def _answer(self, head: Message, call: Callable[[], Message]) -> None:
        try:
            self._over(call())
        except Exception as error:
            self._over(_refused(head, error))

    def _over(self, reply: Message) -> None:
        with self._change:
            self._ready.append(reply)
            self._change.notify_all()


def _taken_in(head: Message, state: NodeState, store: ObjectStore) -> tuple[ClientApp, Message, Context]:
    """The client that answers a message, and what it is called with."""
    run = state.get_run(head.metadata.run_id)
    fab = None if run is None else state.get_fab(run.fab_hash)
    context = None if run is None else state.get_run_series_context(run.series_id)
    if run is None or fab is None or context is None:
        raise RuntimeError(f"the SuperNode does not know the run {head.metadata.run_id}")
    return installed_app(run, fab), _whole(head, store), context


def _refused(head: Message, error: Exception) -> Message:
    """That the client does not answer; the server is not told why."""
    from fedsync.flower.client_app import refusal

    return refusal(head, error)


def _whole(head: Message, store: ObjectStore) -> Message:
    """The message with its content; its parts leave the store."""
    from flwr.app import Message
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    root = head.metadata.message_id
    parts = {
        part.object_id: store.get(part.object_id) or b"" for part in iterate_object_tree(store.get_object_tree(root))
    }
    store.delete(root)
    message = inflate_object_from_contents(root, parts)
    if not isinstance(message, Message):
        raise RuntimeError(f"it is no message but a {type(message).__name__}")
    message.metadata.__dict__["_message_id"] = root
    return message


def _no_interface(*configuration: Any) -> tuple[Any, threading.Thread]:
    """In place of the HTTP interface for processes that fetch messages: a server, and the thread that it runs in."""
    thread = threading.Thread(target=lambda: None)
    thread.start()
    return SimpleNamespace(should_exit=False, force_exit=False), thread
