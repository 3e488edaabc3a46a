"""A SuperNode's client and an app's grid that bundle, and what they ask for."""

import time
from typing import Any

from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from flwr.superlink.grid.http_grid import HttpGrid

from fedsync.flower.internals.bundle_client import BundlingClient, bundle_messages, node_client
from fedsync.flower.internals.bundles import parts_of
from fedsync.flower.internals.pull import Arrivals
from tests.flower.internals.superlink import Silo, SuperLink

MOST = 2**21


class Counting:
    """One of Flower's clients, whose requests are counted by their path."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.paths: list[str] = []
        send = client._unary_unary

        def counted(*, path: str, **options: Any) -> Any:
            self.paths.append(path)
            return send(path=path, **options)

        vars(client)["_unary_unary"] = counted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def supernode(silo: Silo) -> tuple[BundlingClient, list[str]]:
    """A silo's client, and what it asks for."""
    counting = Counting(silo.client)
    return node_client(counting), counting.paths


def server_app(link: SuperLink) -> tuple[HttpGrid, list[str]]:
    grid = HttpGrid(f"127.0.0.1:{link.port}", insecure=True, token=link.token)
    grid.set_run(Run.create_empty(link.run))
    counting = Counting(grid._runtime_client)
    vars(grid)["_client"] = counting
    bundle_messages(grid)
    return grid, counting.paths


def look(silo: Silo, client: BundlingClient) -> list[Any]:
    return list(client.PullMessages(PullMessagesRequest(node=silo.node)).messages_list)


def ask(link: SuperLink, silo: Silo, grid: HttpGrid) -> str:
    (name,) = grid.push_messages([link.message(SUPERLINK_NODE_ID, silo.number, "")])
    return name


def parts(silo: Silo, client: BundlingClient, name: str, tree: Any) -> list[bytes]:
    run, names = silo.link.run, parts_of(tree)
    found = [client.PullObject(PullObjectRequest(node=silo.node, run_id=run, object_id=each)) for each in names]
    client.ConfirmMessageReceived(ConfirmMessageReceivedRequest(node=silo.node, run_id=run, message_object_id=name))
    assert all(each.object_available for each in found)
    return [each.object_content for each in found]


def push(silo: Silo, client: BundlingClient, answer: Message) -> list[str]:
    client.outgoing = {name: part.deflate() for name, part in get_all_nested_objects(answer).items()}
    request = PushMessagesRequest(
        node=silo.node,
        messages_list=[message_to_proto(remove_content_from_message(answer))],
        message_object_trees=[get_object_tree(answer)],
        clientapp_runtime_list=[0.1],
    )
    return list(client.PushMessages(request).objects_to_push)


def pulled(arrivals: Arrivals, name: str) -> list[Any]:
    ends_s = time.monotonic() + 30
    while time.monotonic() < ends_s:
        found = arrivals.pull({name: MOST})
        if found:
            return found
        time.sleep(0.02)  # its parts may be on their way
    raise AssertionError("no answer comes")
