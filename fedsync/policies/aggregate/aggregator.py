"""Where a driver keeps the model and the updates that wait for a commit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedsync.core.actions import Commit
from fedsync.core.array_keeper import ArrayKeeper
from fedsync.core.control_downlink import ControlledModel, key_of, serial_of
from fedsync.core.downlink import PublicModel
from fedsync.core.errors import PolicyError, ProtocolError
from fedsync.core.layout import Vector
from fedsync.core.orders import Subject, WorkOrder
from fedsync.core.saved import Names, fill, named
from fedsync.core.server_optimizer import Backing, Moments, Part, ServerOptimizer
from fedsync.core.spans import give_back, spans
from fedsync.core.transfer import NO_PAYLOAD, InTheClear, Payload
from fedsync.core.wire import FP32, MAX_MAGNITUDE, Wire, WireFormat
from fedsync.policies.aggregate.norms import norms_of

_NAMES: Names = {
    "model": "_exact",
    "public": "_public.model",
    "version": "_public.version",
    "savepoint": "_remembered",
    "moments": "_moments",
    "counted": "_counted",
    "pending": "_pending",
    "bases": "_bases",
    "best": "_best",
    "first": "_first",
    "own": "_own",
}
"""What a checkpoint holds."""


class PlainAggregator(InTheClear):
    """The current model and the payloads of pending updates, by update id.

    The model of each version is a new array that nobody may write to, so references to older versions stay valid. What
    is large lies where ``keeper`` puts it, and is read in spans. There are two models where silos get less than 32
    bits: the public one, which they have, and the exact one, to which updates are added; see `fedsync.core.downlink`.

    Args:
        model: version 0, float32 [values].
        wire: how models and updates travel.
        keeper: keeps models and updates; by default in memory.
        optimizer: makes steps of the commits' sums; None has the model move by the sums.
        measures: tell how large the updates of each commit were.
    """

    def __init__(
        self,
        model: Vector,
        *,
        wire: Wire | None = None,
        keeper: ArrayKeeper | None = None,
        optimizer: ServerOptimizer | None = None,
        measures: bool = False,
    ) -> None:
        self._measures = measures
        self._norms: tuple[float, float] | None = None
        self._keeper = keeper or ArrayKeeper()
        self._wire = wire or Wire()
        self._exact: Vector = self._keeper.keep(model)
        self._public = PublicModel(self._exact, self._wire.down, self._keeper)
        self._held: dict[str, int] = {}
        self._pending: dict[str, Payload] = {}
        self._optimizer = optimizer
        self._moments = Moments() if optimizer is None else optimizer.begin(model.size, self._keeper)
        self._counted: dict[str, int] = {}
        self._controlled: tuple[int, Payload] | None = None
        self._remembered = self._exact, self._exact, self._moments
        self._bases: dict[str, tuple[int, Vector]] = {}
        self._best = self._first = 0, self.model
        self._own: dict[str, Payload] = {}

    @property
    def model(self) -> Vector:
        """The model that silos have and evaluate, float32 [values]."""
        return self._public.model

    @property
    def upload_bytes(self) -> int:
        return self._wire.up.payload_bytes(self.model.size)

    def greet(self, silo: str, version: int, greeting: Payload | None) -> None:
        self._held[silo] = version

    def holds(self, silo: str, version: int) -> None:
        self._held[silo] = version

    def leave(self, silo: str) -> None:
        self._held.pop(silo, None)

    def outgoing(self, silo: str, subject: Subject = Subject.LAST) -> Payload:
        if subject is Subject.BEST:
            return self._public.whole(*self._best)
        if self._optimizer is not None and self._optimizer.controls:
            return self._with_control()
        return self._public.payload(self._held.get(silo, -1))

    def _with_control(self) -> Payload:
        """The model with what silos correct their steps by; the same object for the same version."""
        if self._controlled is None or self._controlled[0] != self._public.version:
            counted = {key_of(silo): serial for silo, serial in self._counted.items()}
            sent = ControlledModel(self.model, self._moments.vectors[0], counted)
            self._controlled = self._public.version, sent.encode(self._keeper)
        return self._controlled[1]

    def apart(self, order: WorkOrder) -> Payload:
        if order.after:
            return NO_PAYLOAD
        return self._public.whole(*(self._first if order.subject is Subject.LOCAL else self._best))

    def put_own(self, silo: str, model: Payload) -> None:
        self._check(FP32, silo, model)
        self._own[silo] = self._keeper.keep(model)

    def own(self, silo: str) -> Payload:
        return self._own[silo]

    def begin(self, update_id: str) -> None:
        """An order starts from the current model, which stays until its update is committed or discarded.

        The silo evaluates it on the way, so it may become the best.
        """
        self._bases[update_id] = self._public.version, self.model

    def keep_best(self, version: int) -> None:
        models = {self._public.version: self.model, **dict(self._bases.values())}
        if version not in models:
            raise PolicyError(f"version {version} is the best, and its model is gone")
        self._best = version, models[version]

    @property
    def best(self) -> Vector:
        """The model that is kept as the best, float32 [values]; that of version 0 before there is one."""
        return self._best[1]

    def put(self, silo: str, update_id: str, update: Payload) -> None:
        """Keep an update, after a check that it can do no harm.

        Raises:
            ProtocolError: wrong type, shape or length, a value that is not finite, or a name that is taken.
        """
        if update_id in self._pending:
            raise ProtocolError(silo, "update id", f"{update_id!r} is here already")
        self._check(self._wire.up, silo, update)
        self._pending[update_id] = self._keeper.keep(update)

    def _check(self, wire: WireFormat, silo: str, update: Payload) -> None:
        size = self.model.size
        wire.check(update, size, silo)
        for start, stop in spans(size, 4):
            span = wire.decode(update, start, stop)
            # NaN fails every comparison, so two passes without a temporary find it and infinity too.
            low, high = np.min(span), np.max(span)
            give_back(update)
            if not (low >= -MAX_MAGNITUDE and high <= MAX_MAGNITUDE):
                told = f"values from {low} to {high}; finite ones of at most {MAX_MAGNITUDE:g} are accepted"
                raise ProtocolError(silo, "finite", told)

    def commit(self, commit: Commit) -> None:
        """Fold updates into the model as `Commit` says, in the order of ``commit.weights``.

        Each value is worked out by itself, so the spans have the bits that whole vectors would have.
        """
        used, bases = self._taken(commit)
        if self._measures:
            self._norms = norms_of(commit.weights, used, self._exact.size, self._wire.up)
        if self._optimizer is None:
            folded = self._folded(self._exact, commit, used, bases)
            self._exact = self._keeper.make(np.float32, self._exact.size, folded)
        else:
            self._step(self._optimizer, commit, used, bases)
        self._public.advance(self._exact)

    def norms(self) -> tuple[float, float] | None:
        norms, self._norms = self._norms, None
        return norms

    def _taken(self, commit: Commit) -> tuple[dict[str, Payload], dict[str, tuple[int, Vector]]]:
        """The commit's updates, and the versions that their orders began with, as far as they are known."""
        used, bases = dict[str, Payload](), dict[str, tuple[int, Vector]]()
        for update_id in commit.weights:
            used[update_id] = self._pending.pop(update_id)
            base = self._bases.pop(update_id, None)
            if base is not None:
                bases[update_id] = base
            elif commit.toward:
                raise PolicyError(f"version {commit.version} moves towards {update_id!r}, which no order began")
        return used, bases

    def _folded(
        self,
        before: Vector | None,
        commit: Commit,
        used: Mapping[str, Payload],
        bases: Mapping[str, tuple[int, Vector]],
    ) -> Part:
        """Makes parts of ``before`` with the updates added, or of their sum where it is None."""

        def fold(start: int, stop: int) -> Vector:
            new = np.zeros(stop - start, np.float32) if before is None else before[start:stop].copy()
            scaled = np.empty_like(new)
            for update_id, weight in commit.weights.items():
                update = self._wire.up.decode(used[update_id], start, stop)
                if commit.toward and before is not None:
                    # Of two models that are close, so what the subtraction rounds is small.
                    np.subtract(bases[update_id][1][start:stop], before[start:stop], out=scaled)
                    scaled += update
                    scaled *= np.float32(weight)
                else:
                    np.multiply(update, np.float32(weight), out=scaled)
                new += scaled
            give_back(*used.values(), *(base for _, base in bases.values()))
            if before is not None:
                give_back(before)
            return new

        return fold

    def _step(
        self,
        optimizer: ServerOptimizer,
        commit: Commit,
        used: Mapping[str, Payload],
        bases: Mapping[str, tuple[int, Vector]],
    ) -> None:
        """Move the exact model by what the optimizer makes of the updates' sum."""
        if commit.toward:
            raise PolicyError(f"version {commit.version} moves towards whole models, which makes no sum for a step")
        before = self._exact
        change = self._keeper.make(np.float32, before.size, self._folded(None, commit, used, bases))
        staleness = [self._public.version - version for version, _ in bases.values()]
        backing, counted = None, self._counted
        if optimizer.controls:
            if any(staleness):
                raise PolicyError(f"version {commit.version} has updates that did not begin with the newest one")
            counted = {**counted, **dict(map(serial_of, commit.weights))}
            newcomers = len(counted) - len(self._counted)
            backing = Backing(commit.steps, commit.stands_for, len(commit.weights), newcomers)
        advanced = optimizer.advance(self._moments, change, optimizer.pace(staleness), self._keeper, backing)
        if advanced is None:
            return
        (self._moments, step), self._counted = advanced, counted

        def moved(start: int, stop: int) -> Vector:
            new = step(start, stop)
            new += before[start:stop]
            give_back(before)
            return new

        self._exact = self._keeper.make(np.float32, before.size, moved)

    def savepoint(self) -> None:
        self._remembered = self._exact, self.model, self._moments

    def rollback(self) -> None:
        """Go back to the model last remembered; at first that is version 0."""
        self._exact, public, self._moments = self._remembered
        self._public.restart(public)

    def discard(self, update_id: str) -> None:
        self._pending.pop(update_id, None)
        self._bases.pop(update_id, None)

    def state(self) -> Mapping[str, Any]:
        """Models and pending updates, for `restore` in another process."""
        return named(self, _NAMES)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what another aggregator's `state` was."""
        fill(self, _NAMES, state)

    @property
    def pending(self) -> tuple[str, ...]:
        return tuple(self._pending)
