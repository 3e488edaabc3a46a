"""A lying silo for `bench/faults/soak.py`: its owner has changed the installed client.

This file replaces `fedsync.silo.agent.agent` as the silo's agent. It answers orders with the lie that the federation's
file `LIE` names at that moment, and is honest without such a file. It also sends uploads that the server does not want.

`COMMAND` starts it, with the arguments of ``fedsync silo start``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedsync import cli
from fedsync.core.orders import WorkReport
from fedsync.model.transfer import MAX_SEALED_BYTES, Payload
from fedsync.ops import programs
from fedsync.silo.agent import agent, answers
from fedsync.silo.protocol import Ask, Identity, read_reply
from fedsync.transport.hub_line import HubLine, ReceivedQuestion
from fedsync.transport.port import HEAD, FrameHead

LIE, FILE = "lie", "FEDSYNC_SOAK_LIE"
"""Name of the file, and the variable of the environment that says where it is."""

COMMAND = (sys.executable, "-c", "from bench.faults.soak_lies import main; main()")

Lie = Callable[[list[Payload]], Payload]
"""From all updates of the silo in a run, the last one the true answer, to what it says instead; bytes, uint8."""

LIES: dict[str, Lie] = {
    "garbage": lambda made: np.frombuffer(np.random.default_rng().bytes(made[-1].nbytes), np.uint8),
    "twice": lambda made: made[0],
    "other_round": lambda made: made[-2] if len(made) > 1 else made[-1],
    "flood": lambda made: np.tile(made[-1], 50),
}


def lying(connect: Callable[[Identity], Ask]) -> Callable[[Identity], Ask]:
    """The way to a trainer whose updates arrive as something else."""
    made: dict[str, list[Payload]] = {}
    file = Path(os.environ[FILE])

    def connect_and_lie(identity: Identity) -> Ask:
        ask = connect(identity)

        def answer(text: str, payload: Payload | None) -> tuple[str, Payload | None]:
            reply, update = ask(text, payload)
            if update is None or not file.exists() or not isinstance(read_reply(reply, identity.name), WorkReport):
                return reply, update
            made.setdefault(identity.spec, []).append(np.array(update).view(np.uint8))
            return reply, LIES[file.read_text()](made[identity.spec])

        return answer

    return connect_and_lie


class UnboundedLine(HubLine):
    """A line that sends more than the server wants, also where the server expects no upload."""

    def answer(
        self, asked: ReceivedQuestion, text: str, payload: Payload | None = None, *, relay: bool = False
    ) -> None:
        if payload is None or asked.ticket or payload.nbytes <= asked.most:
            super().answer(replace(asked, most=MAX_SEALED_BYTES), text, payload, relay=relay)
            return
        head = FrameHead(len(text.encode()), asked.number)
        self._checked(
            self._said("POST", "/answers", {**self._known(), HEAD: head.dump()}, text.encode() + payload.tobytes())
        )


def main() -> None:
    """Be the silo's supervisor, or the agent that it starts."""
    if sys.argv[1] == "silo":
        vars(programs)["INTERPRETER"] = COMMAND
        cli.main()
    else:
        vars(answers)["connect"] = lying(answers.connect)
        vars(agent)["HubLine"] = UnboundedLine
        agent.main(sys.argv[2:])
