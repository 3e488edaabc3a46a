"""Nodes with names for tests, and what they say as they join."""

from collections.abc import Iterable, Mapping

from flwr.proto.node_pb2 import NodeInfo

from fedsync.core.orders import SiloFacts
from fedsync.flower.grid_transport import GridTransport
from fedsync.server.nodes import Nodes
from fedsync.silo.protocol import Hello
from fedsync.transport.port import Peer
from tests.flower.grid import DirectGrid


class NamedGrid(DirectGrid):
    """Nodes that are registered under names; an empty one is none."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__(0)
        self.names = dict(names)
        self.activated: dict[int, str] = {}

    def peers(self) -> list[Peer]:
        return GridTransport(self).peers()

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [
            NodeInfo(node_id=node, name=name, last_activated_at=self.activated.get(node, "09:00"))
            for node, name in self.names.items()
        ]


def hello(name: str, examples: int = 10) -> Hello:
    return Hello(name, SiloFacts(examples=examples))


def join(nodes: Nodes, node: int, name: str) -> None:
    nodes.enrol(node, nodes.check(node, hello(name)), 10)
