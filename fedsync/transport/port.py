"""The port between those who ask silos and the way that questions take: over a hub, or in Flower's messages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from fedsync.transport.questions import SiloAnswer, SiloQuestion


@dataclass(frozen=True, slots=True)
class Peer:
    """A node that is there.

    Args:
        node_id: its number; negative behind a relay.
        name: that its key is registered under; empty for none.
        since: another text where it went and came back, and so has lost what it was asked.
    """

    node_id: int
    name: str = ""
    since: str = ""


class Transport(Protocol):
    """Carries questions to silos and their answers back. One thread calls it."""

    def peers(self) -> Sequence[Peer]:
        """Nodes that are there."""

    def send(self, questions: Sequence[tuple[int, SiloQuestion]]) -> list[str | None]:
        """Send questions, each to a node; returns what names each, None where its node is not known."""

    def receive(self) -> list[SiloAnswer]:
        """Answers that have come since, each once."""

    def wait(self, seconds: float) -> None:
        """Wait for answers, so long at most."""

    def waiting(self, names: Collection[str]) -> set[str]:
        """Those of these questions that cannot be lost, so nobody has to ask again."""

    def keep(self, names: Collection[str]) -> None:
        """Forget all other questions: nobody waits for their answers any more."""
