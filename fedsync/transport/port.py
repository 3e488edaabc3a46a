"""Interface of transports, which carry the server's requests to silos: by a hub, or by Flower's messages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from fedsync.transport.questions import SiloAnswer, SiloQuestion


@dataclass(frozen=True, slots=True)
class Peer:
    """Connected node; its ``node_id`` is negative behind a relay. ``name`` is the name of its registered key, empty for
    none. ``since`` changes when the node was away and came back, and so has lost its questions.
    """

    node_id: int
    name: str = ""
    since: str = ""


class Transport(Protocol):
    """Carrier of questions to silos and of their answers. Call it from one thread only."""

    def peers(self) -> Sequence[Peer]:
        """Return the connected nodes."""

    def send(self, questions: Sequence[tuple[int, SiloQuestion]]) -> list[str | None]:
        """Send each question to a node; return the questions' names, None for an unknown node."""

    def receive(self) -> list[SiloAnswer]:
        """Return new answers, each once."""

    def wait(self, seconds: float) -> None:
        """Wait for answers, at most ``seconds``."""

    def waiting(self, names: Collection[str]) -> set[str]:
        """Return the questions among ``names`` that cannot be lost, so that the driver need not repeat them."""

    def keep(self, names: Collection[str]) -> None:
        """Drop all other questions, whose answers are no longer expected."""
