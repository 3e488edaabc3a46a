"""What a silo's trainer is told and answers: shared by the trainer's process and by those who ask it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fedsync.core.layout import Layout, Vector
from fedsync.core.orders import Evaluation, SiloFacts, WorkOrder, WorkReport

SOCKET, IDENTITY, ERROR, LOG = "trainer.sock", "identity.json", "error.json", "trainer.log"
"""Files in a resident trainer's folder."""

OWNER = "FEDSYNC_OWNER_PID"
"""Environment variable: process with which all resident trainers end, if it is set."""

STATE = "FEDSYNC_STATE"
"""Environment variable: folder in which resident trainers keep their folders."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Which silo of which run this is.

    Args:
        spec: the run's specification as JSON.
        index: the silo's share of the data.
        name: its name, unless it emulates a machine that has one.
        declared_speed: samples per second, if its owner declares it.
    """

    spec: str
    index: int
    name: str
    declared_speed: float | None = None


@dataclass(frozen=True, slots=True)
class Working:
    """An order is in work: local steps and samples done so far."""

    steps: int
    samples: int


@dataclass(frozen=True, slots=True)
class Finished:
    """An order is done: its report and update, float32 [values]."""

    report: WorkReport
    update: Vector


Answer = Working | Finished


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

    def train(self, order: WorkOrder, base: Vector, wait_s: float | None) -> Answer:
        """Begin an order, unless it has been begun before; answer after ``wait_s`` seconds at the latest."""
        ...

    def collect(self, update_id: str, wait_s: float | None, *, halt: bool) -> Answer:
        """Ask for an order that was begun; ``halt`` ends it after its current step."""
        ...

    def evaluate(self, model: Vector) -> Evaluation:
        """Evaluate a model."""
        ...
