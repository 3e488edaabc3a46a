"""Silos and a server under encryption, without any runtime."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedsync.cipher.encoding.catch_up import CatchUp, decode
from fedsync.cipher.encoding.sealed_wire import Envelope
from fedsync.cipher.keys.authority import emulated_keys
from fedsync.cipher.keys.keyring import open_ring
from fedsync.cipher.plan import EncryptionPlan
from fedsync.cipher.server.sealed_aggregator import EncryptedAggregator
from fedsync.cipher.silo.replica import EncryptedReplica
from fedsync.cipher.suites import open_suite
from fedsync.core.actions import Commit
from fedsync.core.orders import Evaluation, WorkOrder, WorkReport
from fedsync.core.silo_weight import Weighting
from fedsync.model.layout import Layout, Vector
from fedsync.model.transfer import OtherVersion, Payload

LAYOUT = Layout(("body.weight", "body.bias", "head.weight"), ((90, 60), (60,), (10, 60)))
INITIAL = np.random.default_rng(0).normal(size=LAYOUT.size).astype(np.float32)


def order(update_id: str, base: int, number: int = 1) -> WorkOrder:
    return WorkOrder(update_id, base, number, 8, 5, 0.1, seed=number)


def report(base: int, steps: int = 5, samples: int = 40) -> WorkReport:
    return WorkReport(base, steps, samples, compute_s=1.0, loss=1.0)


@dataclass
class Federation:
    """A store and its silos; ``examples`` of each silo by name. The run begins with the model ``first``."""

    plan: EncryptionPlan
    folder: Path
    examples: dict[str, int]
    first: Vector = field(default_factory=lambda: INITIAL)
    aggregator: EncryptedAggregator = field(init=False)
    silos: dict[str, EncryptedReplica] = field(init=False)
    serials: dict[str, int] = field(default_factory=dict)
    bases: dict[str, int] = field(default_factory=dict)
    measured: list[str] = field(default_factory=list)
    """Silos that estimated an update, in order."""

    def __post_init__(self) -> None:
        self.keys = emulated_keys(list(self.examples), self.folder / "keys", seed=1)
        self.aggregator = EncryptedAggregator(self.plan, self.keys.server)
        self.silos = {name: self.copy(name) for name in self.examples}
        for name, silo in self.silos.items():
            self.aggregator.greet(name, silo.holds, silo.greeting())

    def copy(
        self,
        name: str,
        file: Path | None = None,
        plan: EncryptionPlan | None = None,
        *,
        remembers: bool = False,
        **options: Any,
    ) -> EncryptedReplica:
        """A silo that has nothing, or what is in ``file``; it knows which versions another copy came to if it
        ``remembers``."""
        ring = open_ring(self.keys.silos[name])
        if not (remembers or self.plan.masked):
            ring = replace(ring, folder=None)
        return EncryptedReplica(
            plan or self.plan,
            ring,
            open_suite(self.plan.kind, ring.group),
            self.examples[name],
            lambda: self.first,
            lambda: self._estimate(name),
            file,
            **options,
        )

    def _estimate(self, name: str) -> tuple[Vector, int, int, None]:
        self.measured.append(name)
        return np.full(self.first.size, 0.05, dtype=np.float32), 5, 40, None

    def begin(self, name: str, version: int) -> Vector:
        """Send an order's package; returns the model that the silo then has."""
        self.serials[name] = self.serials.get(name, 0) + 1
        update_id = f"{name}/{self.serials[name]}"
        self.aggregator.begin(update_id)
        self.bases[update_id] = version
        try:
            return self.silos[name].receive(self.aggregator.outgoing(name), version)
        except OtherVersion as error:  # it never answered what brought it there
            if error.mismatch.announcement:
                self.aggregator.announce(name, error.mismatch.announcement)
            self.aggregator.holds(name, error.mismatch.holds)
            return self.silos[name].receive(self.aggregator.outgoing(name), version)

    def begin_all(self, names: Iterable[str], version: int) -> None:
        for name in names:
            self.begin(name, version)

    def all_for(self, name: str) -> CatchUp:
        """Message to a silo that has nothing."""
        self.aggregator.holds(name, -1)
        return decode(self.aggregator.outgoing(name))

    def up_to(self, name: str, version: int) -> Payload:
        """Message that brings a silo that has nothing to this version."""
        whole = self.all_for(name)
        return replace(whole, version=version, links=whole.links[:version]).encode()

    def own_grid(self, name: str, *exponents: int) -> None:
        """The silo seals on a grid of its own from now on."""
        silo = self.silos[name]
        silo._state = replace(silo._state, scales=replace(silo._state.scales, exponents=(exponents,)))

    def envelope(self, update_id: str) -> Envelope:
        return self.aggregator._inbox._pending[update_id].envelope

    def seal(
        self, name: str, update: Vector, steps: int = 5, evaluation: Evaluation | None = None
    ) -> tuple[str, Payload]:
        update_id = f"{name}/{self.serials[name]}"
        base = self.bases[update_id]
        done = replace(report(base, steps), evaluation=evaluation)
        return update_id, self.silos[name].send(update, order(update_id, base, self.serials[name]), done)

    def answer(self, name: str, update: Vector, steps: int = 5, evaluation: Evaluation | None = None) -> str:
        """The silo answers its order."""
        update_id, payload = self.seal(name, update, steps, evaluation)
        self.aggregator.put(name, update_id, payload)
        self.aggregator.holds(name, self.bases[update_id])
        return update_id

    def answer_all(self, names: Iterable[str], version: int = 0, size: float = 0.02) -> list[str]:
        """Each answers with an update that follows from its name, of one letter, and the version."""
        return [self.answer(name, change(100 * version + ord(name), size)) for name in names]

    def commit(self, version: int, update_ids: Sequence[str]) -> None:
        self.aggregator.commit(Commit(version, dict.fromkeys(sorted(update_ids), 1 / len(update_ids))))

    def unmask(self, silent: Collection[str] = ()) -> None:
        """Carry questions and answers until the last commit counts; ``silent`` silos are lost."""
        while self.aggregator.blocked:
            for name, question in self.aggregator.questions().items():
                if name in silent:
                    self.aggregator.give_up(name)
                else:
                    self.aggregator.answer(name, self.silos[name].answer(question))

    def run_round(
        self, version: int, names: Iterable[str] = "", silent: Collection[str] = (), size: float = 0.02
    ) -> list[Vector]:
        """``names``, or all, answer orders for ``version``; ``silent`` are lost before they reveal. Returns updates."""
        names = list(names or self.examples)
        self.begin_all(names, version)
        self.commit(version + 1, self.answer_all(names, version, size))
        self.unmask(silent)
        return [change(100 * version + ord(name), size) for name in names]


def plan(
    kind: str = "bfv",
    bits: int = 16,
    quorum: int = 3,
    only: tuple[str, ...] = (),
    members: int = 1,
    **weighting: object,
) -> EncryptionPlan:
    weighs = Weighting(**weighting)  # type: ignore[arg-type]
    return EncryptionPlan(kind, bits, LAYOUT, weighs, quorum, only, members=members)


def change(seed: int, size: float = 0.02) -> Vector:
    return (np.random.default_rng(seed).normal(size=LAYOUT.size) * size).astype(np.float32)


def mean_of(names: Iterable[str]) -> Vector:
    """Of what these silos answer with version 0."""
    mean: Vector = np.mean([change(ord(name)) for name in names], axis=0)
    return mean


STEP = 2.0**-15
"""Rounding at 16 bits of values on a grid with the exponent 0: they need -3 at most, and three bits are to spare."""


def close(found: Vector, expected: Vector, updates: int = 1) -> None:
    """Equal but for rounding."""
    np.testing.assert_allclose(found, expected, atol=2 * updates * STEP)
