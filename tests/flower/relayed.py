"""Relays in this process: nodes of a `DirectGrid` that have one of their own behind them."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flwr.app import Context, Message

from fedsync.cipher.keys.keywrap import ServerKeys
from fedsync.common.errors import ProtocolError
from fedsync.extras.relays.relay import RelayService
from fedsync.extras.relays.relay_line import RelayLine
from fedsync.extras.relays.relay_messages import RegionReply, RegionRequest, read_region_reply, read_region_request
from fedsync.flower import flower_messages as messages
from fedsync.flower.grid_transport import GridTransport
from fedsync.silo.owner.refusals import refuse
from fedsync.silo.protocol import write_reply
from tests.flower.grid import Answer, DirectGrid, honest


class Stepping(RelayService):
    """Looks for answers as soon as it has asked, for here nobody else does."""

    def _send(self, *arguments: Any) -> None:
        super()._send(*arguments)
        self.turn()


class RelayNode:
    """A relay's node, and the silos behind it.

    Args:
        silos: their shares of the data.
        keys: what a server may know.
        folder: for updates that wait.
        answers: what a silo says instead, by share.
    """

    def __init__(
        self,
        silos: Sequence[int],
        keys: ServerKeys | None = None,
        folder: Path | None = None,
        answers: dict[int, Answer] | None = None,
    ) -> None:
        self.below = DirectGrid(len(silos))
        for node, share in enumerate(silos, 1):
            context: Any = self.below._contexts[node]
            context.node_config["partition-id"] = share
            self.below.answers[node] = (answers or {}).get(share, honest)
        self._keys, self._folder = keys, folder
        self.told: list[RegionReply] = []
        self.asked: list[RegionRequest] = []
        self.start()

    def start(self) -> None:
        """A new process: it knows nothing of what was before."""
        self.service = Stepping(RelayLine(GridTransport(self.below), look_s=0.0), self._keys, self._folder)

    def __call__(self, message: Message, context: Context) -> Message | None:
        """What the relay answers; its silos have answered by then."""
        spec, text, payload = messages.read_request(message)
        self.asked += [request] if (request := read_region_request(text)) is not None else []
        self.service.turn()
        try:
            said, answer = self.service.ask(spec, text, payload)
        except Exception as error:
            return messages.answer(message, write_reply(refuse(error)))
        with suppress(ProtocolError):
            self.told.append(read_region_reply(said, "relay"))
        return messages.answer(message, said, answer, relay=True)
