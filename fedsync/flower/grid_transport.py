"""Transport over Flower's own messages and public API: slow, but available in every version of Flower.

Flower starts a process for each message, and polls every few seconds. Flower's simulation engine, and silos that reach
only the SuperLink, need this transport. Other runs use a hub, the server's own HTTPS port.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

from fedsync.common.errors import ProtocolError
from fedsync.flower import flower_messages as messages
from fedsync.transport.port import Peer, SiloAnswer, SiloQuestion


class GridTransport:
    """Transport over Flower's grid."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._sent: dict[str, SiloQuestion] = {}

    def peers(self) -> list[Peer]:
        return [Peer(each.node_id, each.name, str(each.last_activated_at)) for each in self._grid.get_nodes()]

    def send(self, questions: Sequence[tuple[int, SiloQuestion]]) -> list[str | None]:
        named: list[str | None] = []
        posted = list(questions)
        while posted:
            count = messages.together([question for _, question in posted])
            pushed, posted = posted[:count], posted[count:]
            # Each message copies its payload, so messages are made one request at a time.
            found = iter(self._grid.push_messages([messages.request(node, question) for node, question in pushed]))
            for _, question in pushed:
                identifier = next(found, "")  # Flower returns no identifiers if a message is too large
                named.append(identifier or None)
                if identifier:
                    self._sent[identifier] = question
        return named

    def receive(self) -> list[SiloAnswer]:
        replies = list(self._grid.pull_messages(list(self._sent))) if self._sent else []
        named = [(reply.metadata.reply_to_message_id, reply) for reply in replies]
        return [answer_in(reply, name, self._sent.pop(name).most) for name, reply in named if name in self._sent]

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def waiting(self, names: Collection[str]) -> set[str]:
        """Return none: a message on a broken connection is lost, although Flower counts it as delivered."""
        return set()

    def keep(self, names: Collection[str]) -> None:
        self._sent = {name: question for name, question in self._sent.items() if name in names}


def answer_in(reply: Message, name: str, most: int) -> SiloAnswer:
    """Return the answer in a Flower message to the question ``name``, with a payload of at most ``most`` bytes."""
    if reply.has_error():
        code, reason = reply.error.code, messages.shortened(reply.error.reason)
        return SiloAnswer(name, problem=f"error {code}: {reason}", code=code)
    try:
        text, payload = messages.read_answer(reply, "", most)
    except ProtocolError as error:
        return SiloAnswer(name, problem=error.detail, check=error.check)
    return SiloAnswer(name, text, payload, relay=messages.is_relay(reply))
