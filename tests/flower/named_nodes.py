"""Nodes in memory for tests: silent ones, and what they say as they join."""

from collections.abc import Mapping

from fedsync.core.orders import SiloFacts
from fedsync.model.transfer import Payload
from fedsync.server.nodes import Nodes
from fedsync.silo.protocol import Hello, Reply, write_reply
from fedsync.transport.port import SiloAnswer, SiloQuestion
from tests.transport.memory_transport import MemorySilo, MemoryTransport


def silent(asked: SiloQuestion, payload: Payload | None) -> None:
    """A silo that loses what it is asked."""


def saying(reply: Reply, payload: Payload | None = None) -> MemorySilo:
    """A silo that answers every question so."""
    return lambda asked, beside: SiloAnswer("", write_reply(reply), payload)


def silos_of(*answers: MemorySilo) -> MemoryTransport:
    """Nodes from 1 on."""
    silos = MemoryTransport()
    for node, answer in enumerate(answers, 1):
        silos.join(node, answer)
    return silos


def named(names: Mapping[int, str]) -> MemoryTransport:
    """Silent nodes that are registered under names; an empty one is none."""
    silos = MemoryTransport()
    for node, name in names.items():
        silos.join(node, silent, name)
    return silos


def hello(name: str, examples: int = 10) -> Hello:
    return Hello(name, SiloFacts(examples=examples))


def join(nodes: Nodes, node: int, name: str) -> None:
    nodes.enrol(node, nodes.check(node, hello(name)), 10)
