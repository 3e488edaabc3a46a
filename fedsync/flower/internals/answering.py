"""A SuperNode that answers its messages itself.

Flower's own starts a process for every message, which costs seconds of imports, and waits for that process to fetch the
message and to bring the answer over an HTTP interface on this machine. Here the SuperNode's main thread calls the
installed client, which is thin: it passes the message on to the silo's trainer. So a silo has one process less, no port
is open, and nobody else can fetch its messages. SIGTERM ends a SuperNode also while it waits for its trainer, and the
trainer outlives it.

Only FedSync's own client may run in the process that holds the node's key. Where a silo's owner allows code that the
server sends, Flower's own way stays.

It uses internals of flwr, for the versions in `fedsync.flower.internals.versions.TESTED` only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fedsync.flower.internals.apps import installed_app
from fedsync.flower.internals.parcel_client import with_identity_of
from fedsync.trainer.protocol import write_reply
from fedsync.trainer.refusals import refuse

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.supercore.object_store import ObjectStore
    from flwr.supernode.nodestate import NodeState


def answer_here() -> None:
    """Have the SuperNode that this process becomes answer its messages itself."""
    import flwr.supernode.start_client_internal as internal

    from fedsync.flower.client_app import use_parcels

    with_identity_of(use_parcels)
    push = internal._push_messages

    def answer_and_push(*, state: NodeState, object_store: ObjectStore, **ways: Callable[..., Any]) -> None:
        answer_messages(state, object_store)
        push(state=state, object_store=object_store, **ways)

    vars(internal)["_push_messages"] = answer_and_push
    # Its package has a function of the same name.
    program = import_module("flwr.supernode.cli.flower_supernode")
    vars(program)["_start_supernode_http_api"] = _no_interface


def answer_messages(state: NodeState, store: ObjectStore) -> None:
    """Answer what has come in from the server: one message, as a SuperNode takes one at a time.

    Args:
        state: of the SuperNode; has the messages without their content.
        store: has the parts of their content.
    """
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

    for head in state.get_messages_legacy(is_reply=False):
        asked = head.metadata.message_id
        state.record_message_processing_start(message_id=asked)
        reply = _answer(head, state, store)
        state.record_message_processing_end(message_id=asked)
        # The parts first: whoever finds the message may ask for them.
        reply.metadata.__dict__["_message_id"] = reply.object_id
        store.preregister(head.metadata.run_id, get_object_tree(reply))
        for identifier, part in get_all_nested_objects(reply).items():
            store.put(identifier, part.deflate())
        state.store_message(reply)


def _answer(head: Message, state: NodeState, store: ObjectStore) -> Message:
    """What the client answers, or that it does not; the server is not told why."""
    from fedsync.flower import messages

    try:
        run = state.get_run(head.metadata.run_id)
        fab = None if run is None else state.get_fab(run.fab_hash)
        context = None if run is None else state.get_run_series_context(run.series_id)
        if run is None or fab is None or context is None:
            raise RuntimeError(f"the SuperNode does not know the run {head.metadata.run_id}")
        return installed_app(run, fab)(message=_whole(head, store), context=context)
    except Exception as error:
        return messages.answer(head, write_reply(refuse(error)))


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
