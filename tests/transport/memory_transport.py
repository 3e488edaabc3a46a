"""Transport within one process: each silo is a function that gets and returns bytes of limited size."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np

from fedsync.common.errors import SERVER, ProtocolError
from fedsync.model.transfer import MAX_SEALED_BYTES, Payload
from fedsync.transport.port import MOST_TEXT_BYTES, Blob, Peer, SiloAnswer, SiloQuestion

MemorySilo = Callable[[SiloQuestion, Payload | None], SiloAnswer | None]
"""Answer of a silo to a question, whose payload is uint8; None loses the question. The answer needs no name. Of a
trainer: ``lambda asked, payload: SiloAnswer("", *service.ask(asked.text, payload))``."""


class MemoryTransport:
    """Transport to the silos that `join` it.

    Silos answer within `send`, one question after the other, so a run is repeatable. With ``threads``, each question
    has a thread, as at a silo's agent, and any silo may be slow.
    """

    def __init__(self, *, threads: bool = False) -> None:
        self._threads, self._count = threads, 0
        self._silos: dict[int, tuple[Peer, MemorySilo]] = {}
        self._asked: dict[str, int] = {}
        """Node of each question whose answer is expected."""
        self._came: list[SiloAnswer] = []
        self._changed = threading.Condition()

    def join(self, node: int, silo: MemorySilo, name: str = "") -> None:
        """Connect a node. A node that is connected counts as gone and back."""
        self.leave(node)
        self._silos[node] = Peer(node, name, str(self._next())), silo

    def leave(self, node: int) -> None:
        """Disconnect a node, whose questions are lost."""
        self._silos.pop(node, None)
        with self._changed:
            self._keep({name for name, asked in self._asked.items() if asked != node})

    def peers(self) -> list[Peer]:
        return [peer for peer, _ in self._silos.values()]

    def send(self, questions: Sequence[tuple[int, SiloQuestion]]) -> list[str | None]:
        return [self._send(node, question) for node, question in questions]

    def _send(self, node: int, question: SiloQuestion) -> str | None:
        if node not in self._silos:
            return None
        name, silo = f"question {self._next()}", self._silos[node][1]
        with self._changed:
            self._asked[name] = node
        if self._threads:
            threading.Thread(target=self._ask, args=(silo, name, question), name=name, daemon=True).start()
        else:
            self._ask(silo, name, question)
        return name

    def _ask(self, silo: MemorySilo, name: str, question: SiloQuestion) -> None:
        try:
            if isinstance(question.payload, Blob):
                raise ProtocolError(SERVER, "payload", "a blob, which only a hub can send")
            text, payload = _passed(question.text, question.payload, MOST_TEXT_BYTES, MAX_SEALED_BYTES)
            found = silo(replace(question, text=text, payload=payload), payload)
            if found is not None:
                text, payload = _passed(found.text, found.payload, question.most_text, question.most)
                found = replace(found, name=name, text=text, payload=payload)
        except ProtocolError as error:
            found = SiloAnswer(name, problem=error.detail, check=error.check)
        except Exception as error:  # whatever a silo does, the server goes on
            found = SiloAnswer(name, problem=f"{type(error).__name__}: {error}")
        with self._changed:
            if found is None:
                self._asked.pop(name, None)
            elif name in self._asked:
                self._came.append(found)
                self._changed.notify_all()

    def receive(self) -> list[SiloAnswer]:
        with self._changed:
            came, self._came = self._came, []
            for each in came:
                del self._asked[each.name]
            return came

    def wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._came, seconds)

    def waiting(self, names: Collection[str]) -> set[str]:
        """Return those that a silo has not lost."""
        with self._changed:
            return self._asked.keys() & names

    def keep(self, names: Collection[str]) -> None:
        with self._changed:
            self._keep(names)

    def _keep(self, names: Collection[str]) -> None:
        self._asked = {name: node for name, node in self._asked.items() if name in names}
        self._came = [each for each in self._came if each.name in self._asked]

    def _next(self) -> int:
        self._count += 1
        return self._count


def _passed(text: str, payload: Payload | None, most_text: int, most: int) -> tuple[str, Payload | None]:
    """Return what a receiver reads from the bytes of a text and a payload; `ProtocolError` if they are too large."""
    encoded, data = text.encode(), None if payload is None else payload.tobytes()
    for found, limit in ((encoded, most_text), (data or b"", most)):
        if len(found) > limit:
            raise ProtocolError(SERVER, "length", f"{len(found)} bytes, at most {limit}")
    return encoded.decode(), None if data is None else np.frombuffer(data, np.uint8)
