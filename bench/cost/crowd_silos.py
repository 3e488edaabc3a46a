"""Load generator of `bench/cost/crowd.py`: many silos, or relays with silos behind them, in one process.

Each has a session at the hub and two connections, like an agent: one held open for orders, and one for answers. The
session of a real silo (`fedsync.silo.session.session`) makes the answers, with its model and keys. Only the training is
missing: an update is noise of the size of a small step. Under encryption silos share equal results, which the server
cannot notice (`bench/cost/crowd_shared.py`). A relay is a real relay's engine. Its silos answer at once, in this
process.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import ssl
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import yaml

from bench.cost.crowd_answers import Silo
from bench.cost.crowd_lines import Asked, CrowdLine, trusting
from bench.cost.crowd_relays import HELD, Relay
from bench.cost.crowd_server import joins
from bench.cost.crowd_shared import share_sealers
from fedsync.common.processes import exit_with_owner, raise_file_limit
from fedsync.model.transfer import Payload
from fedsync.transport.join import Join, new_secret

LOOK_S = 0.2


class Answers(Protocol):
    """A silo, or a relay."""

    name: str

    def answer(self, spec: str, text: str, payload: Payload | None) -> tuple[str, Payload | None]: ...


class Crowd:
    """All of this process.

    Args:
        folder: where their joins are.
        members: all of them.
        held: questions of one that are in work at a time.
        work_s: how long an order takes beside what its answer takes to make.
        worker: makes answers.
    """

    def __init__(self, folder: Path, members: Sequence[Answers], held: int, work_s: float, worker: Executor) -> None:
        self._folder, self._members, self._held, self._work_s = folder, members, held, work_s
        self._worker = worker
        self._starting = asyncio.Semaphore(16)
        self._trust: ssl.SSLContext | None = None

    async def run(self) -> None:
        """Serve until all is over."""
        await asyncio.gather(*(self._serve(member) for member in self._members))

    async def _serve(self, member: Answers) -> None:
        line, lines = await self._joined(member.name)
        number, tasks = 0, set[asyncio.Task[None]]()
        try:
            while True:
                asked = await line.asked(number)
                if asked is not None:
                    number = asked.head.number
                    tasks.add(task := asyncio.create_task(self._answer(member, asked, lines)))
                    task.add_done_callback(tasks.discard)
        except (EOFError, OSError, asyncio.IncompleteReadError):
            return

    async def _joined(self, name: str) -> tuple[CrowdLine, asyncio.Queue[CrowdLine]]:
        """A line for questions, and those for answers, once the silo is invited."""
        file, secret = joins(self._folder) / name, new_secret()
        while True:
            while not file.exists():
                await asyncio.sleep(LOOK_S * random.uniform(0.5, 1.5))
            join = Join.parse(file.read_text())
            self._trust = self._trust or trusting(join.authority)
            line, lines = CrowdLine(join, secret, self._trust), asyncio.Queue[CrowdLine]()
            async with self._starting:
                if await line.join():
                    for _ in range(self._held):
                        lines.put_nowait(CrowdLine(join, secret, self._trust))
                    return line, lines

    async def _answer(self, member: Answers, asked: Asked, lines: asyncio.Queue[CrowdLine]) -> None:
        line = await lines.get()
        if self._work_s:
            await asyncio.sleep(self._work_s * random.uniform(0.9, 1.1))
        loop = asyncio.get_running_loop()
        told = await loop.run_in_executor(self._worker, member.answer, asked.spec, asked.text, asked.payload)
        await line.answer(asked.head, *told, relay=isinstance(member, Relay))
        lines.put_nowait(line)


def main() -> None:
    """Serve as the arguments of this process say, until its parent ends it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--silos", type=int, required=True)
    parser.add_argument("--region", type=int, default=0)
    parser.add_argument("--work", type=float, default=0.0)
    options = parser.parse_args()
    exit_with_owner()
    raise_file_limit()
    share_sealers()
    silos = [Silo(f"silo-{index}", index, options.folder) for index in range(options.silos)]
    members: list[Answers] = [*silos]
    if options.region:
        keys = yaml.safe_load((options.folder / "told.yaml").read_text())["keys"]
        parts = [silos[first : first + options.region] for first in range(0, len(silos), options.region)]
        members = [Relay(f"relay-{index}", part, keys) for index, part in enumerate(parts)]
    held = HELD if options.region else 1
    worker = ThreadPoolExecutor(held * len(members) if options.region else 1)

    async def serve() -> None:
        await Crowd(options.folder, members, held, options.work, worker).run()

    asyncio.run(serve())
