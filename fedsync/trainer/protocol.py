"""What a silo's trainer is told and answers: shared by the trainer's process and by those who ask it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from fedsync.common.files import OWNER_FILE, write_atomically
from fedsync.core.errors import RunError
from fedsync.core.layout import Layout, Vector
from fedsync.core.orders import Evaluation, SiloFacts, WorkOrder, WorkReport
from fedsync.core.transfer import Payload

SOCKET, IDENTITY, LOG = "trainer.sock", "identity.json", "trainer.log"
ANSWER, COPY = "answer.bin", "copy.bin"
"""Files in a resident trainer's folder."""

RESOURCES = "FEDSYNC_RESOURCES"
"""Environment variable: ``off`` where a silo's owner does not want to tell of its machine."""

STATE = "FEDSYNC_STATE"
"""Environment variable: folder in which resident trainers keep their folders."""

STATE_FOLDER = "state"
"""Folder of resident trainers in a home folder."""


class StillLoading(RunError):
    """The trainer is not ready yet. It goes on."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Which silo of which run this is.

    Args:
        spec: the run's specification as JSON.
        index: the silo's share of the data.
        name: its name, unless it emulates a machine that has one.
        declared_speed: samples per second, if its owner declares it.
        device: where its owner wants to train, or None for what the run's specification says.
        resources: whether its owner allows to tell how much of the machine is left to the trainer; the
            run's specification has to want it too.
    """

    spec: str
    index: int
    name: str
    declared_speed: float | None = None
    device: str | None = None
    resources: bool = True

    @classmethod
    def load(cls, folder: Path) -> Identity:
        """What is written in a trainer's folder.

        Raises:
            OSError: nothing is.
            ValueError: it was torn, or is another FedSync's.
        """
        try:
            return cls(**json.loads((folder / IDENTITY).read_text(encoding="utf-8")))
        except TypeError as error:
            raise ValueError(f"{folder / IDENTITY}: {error}") from None

    def dump(self) -> str:
        """As text, the same for the same silo of the same run."""
        return json.dumps(asdict(self))

    def save(self, folder: Path) -> None:
        """Write it into a trainer's folder, unless it is there: a full disk takes nothing, not even the same again.

        Raises:
            ConfigError: the disk does not take it.
        """
        path, data = folder / IDENTITY, self.dump().encode()
        try:
            there = path.read_bytes()
        except FileNotFoundError:
            there = b""
        if there != data:
            write_atomically(path, data, OWNER_FILE)


@dataclass(frozen=True, slots=True)
class InProgress:
    """An order is in work: local steps and samples done so far."""

    steps: int
    samples: int


@dataclass(frozen=True, slots=True)
class Completed:
    """An order is done: its report, and its update as it travels."""

    report: WorkReport
    update: Payload


@dataclass(frozen=True, slots=True)
class VersionMismatch:
    """What came with an order continues another version of the model than the silo holds, or did not come at all."""

    holds: int


Answer = InProgress | Completed | VersionMismatch


class TrainerLink(Protocol):
    """A silo's trainer, in this process or in another."""

    @property
    def name(self) -> str:
        """The silo's name."""
        ...

    @property
    def facts(self) -> SiloFacts:
        """What the silo says when it joins."""
        ...

    @property
    def layout(self) -> Layout:
        """Of the model."""
        ...

    def initial_model(self) -> Vector:
        """The model before any training, float32 [layout.size]."""
        ...

    @property
    def sealed(self) -> bool:
        """Whether what travels is sealed, so that its size is not the model's."""
        ...

    @property
    def holds(self) -> int:
        """Version of the model that the silo keeps; 0 in the clear."""
        ...

    def greeting(self) -> Payload | None:
        """What the server is to have from the silo before its first order, or None."""
        ...

    def train(self, order: WorkOrder, received: Payload, wait_s: float | None) -> Answer:
        """Begin an order, unless it has been begun before; answer after ``wait_s`` seconds at the latest."""
        ...

    def collect(self, update_id: str, wait_s: float | None, *, halt: bool) -> Answer:
        """Ask for an order that was begun; ``halt`` ends it after its current step."""
        ...

    def evaluate(self, received: Payload, version: int) -> Evaluation | VersionMismatch:
        """Evaluate the model ``version``."""
        ...

    def answer(self, question: Payload) -> Payload:
        """Answer what the server's store asks."""
        ...

    def snapshot(self) -> tuple[int, Payload]:
        """Version of the model that the silo keeps, and the model, sealed for other silos."""
        ...
