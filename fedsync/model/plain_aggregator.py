"""Server's aggregator without encryption: the model, and updates that wait for a commit (a new model version)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import numpy as np

from fedsync.common.errors import PolicyError, ProtocolError
from fedsync.core.actions import Commit
from fedsync.core.orders import Subject, WorkOrder
from fedsync.core.state import Names, fill, named
from fedsync.model.broadcast_compression import PublicModel
from fedsync.model.chunked_arrays import ArrayKeeper, give_back
from fedsync.model.commit_updates import Combiner, Combining, CommitUpdates, Taken, WaitingUpdates
from fedsync.model.control_variates import ControlledModel, backed, key_of
from fedsync.model.layout import Vector
from fedsync.model.plain_wire import FP32, Wire, check_values
from fedsync.model.running_statistics import Ranges, within
from fedsync.model.server_optimizer import Moments, Part, ServerOptimizer
from fedsync.model.transfer import NO_PAYLOAD, InTheClear, Payload

_NAMES: Names = {
    "model": "_exact",
    "public": "_public.model",
    "version": "_public.version",
    "savepoint": "_remembered",
    "moments": "_moments",
    "counted": "_counted",
    "pending": "_waiting.payloads",
    "sums": "_waiting.sums",
    "bases": "_bases",
    "best": "_best",
    "first": "_first",
    "own": "_own",
    "combined": "_combined",
}


class PlainAggregator(InTheClear):
    """Current model and payloads of pending updates, by update id, in the clear.

    The model of each version is a new read-only array, so references to older versions stay valid. If silos get less
    than 32 bits a value, there are two models: the public model of the silos, and the exact model, which takes the
    updates; see `fedsync.model.broadcast_compression`.

    Args:
        model: version 0, float32 [values].
        wire: formats of models and updates in transfer.
        keeper: store of models and updates; by default in memory. Large arrays are read in spans.
        optimizer: turns the sum of a commit into a step; None adds the sum to the model.
        combiner: derives the change from single updates; None adds them up.
        statistics: running statistics. They follow a mean of the silos, also where coefficients divide updates by
            steps (FedNova) and so sum to more than 1: a variance would fall below 0.
    """

    def __init__(
        self,
        model: Vector,
        *,
        wire: Wire | None = None,
        keeper: ArrayKeeper | None = None,
        optimizer: ServerOptimizer | None = None,
        combiner: Combiner | None = None,
        statistics: Ranges = (),
    ) -> None:
        self._keeper = keeper or ArrayKeeper()
        self._wire = wire or Wire()
        self._exact: Vector = self._keeper.keep(model)
        self._public = PublicModel(self._exact, self._wire.down, self._keeper)
        self._held, self._confirmed, self._restored = dict[str, int](), dict[str, int](), inf
        self._waiting = WaitingUpdates(self._wire.up)
        self._optimizer = optimizer
        self._moments = Moments() if optimizer is None else optimizer.begin(model.size, self._keeper)
        self._counted: dict[str, int] = {}
        self._controlled: tuple[int, Payload] | None = None
        self._remembered = self._exact, self._exact, self._moments
        self._bases: dict[str, tuple[int, Vector]] = {}
        self._best = self._first = 0, self.model
        self._own: dict[str, Payload] = {}
        self._combiner, self._combined = combiner, dict[str, Any]()
        self._statistics = statistics

    @property
    def model(self) -> Vector:
        """Model that silos have and evaluate, float32 [values]."""
        return self._public.model

    @property
    def upload_bytes(self) -> int:
        return self._wire.up.payload_bytes(self.model.size)

    def greet(self, silo: str, version: int, greeting: Payload | None) -> None:
        # After a death of the machine, versions are made again from other updates: a silo may have one of before.
        known = version <= self._restored or version == self._confirmed.get(silo)
        self._held[silo] = version if known else -1

    def holds(self, silo: str, version: int) -> None:
        self._held[silo] = self._confirmed[silo] = version

    def leave(self, silo: str) -> None:
        self._held.pop(silo, None)

    def outgoing(self, silo: str, subject: Subject = Subject.LAST) -> Payload:
        if subject is Subject.BEST:
            return self._public.whole(*self._best)
        if self._optimizer is not None and self._optimizer.controls:
            return self._with_control()
        return self._public.payload(self._held.get(silo, -1))

    def _with_control(self) -> Payload:
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
        check_values(FP32, self.model.size, silo, model)
        self._own[silo] = self._keeper.keep(model)

    def own(self, silo: str) -> Payload:
        return self._own[silo]

    def begin(self, update_id: str) -> None:
        """Keep the current model, from which an order starts, until its update is committed or discarded. The silo
        evaluates this model on the way, so it may become the best.
        """
        self._bases[update_id] = self._public.version, self.model

    def keep_best(self, version: int) -> None:
        models = {self._public.version: self.model, **dict(self._bases.values())}
        if version not in models:
            raise PolicyError(f"version {version} is the best, and its model is gone")
        self._best = version, models[version]

    @property
    def best(self) -> Vector:
        """Best model, float32 [values]; version 0 until there is another."""
        return self._best[1]

    def put(self, silo: str, update_id: str, update: Payload) -> None:
        """Check and keep an update; raises `ProtocolError` as `check_values`, and for an update id that is in use."""
        check_values(self._wire.up, self.model.size, silo, update)
        self._waiting.add(silo, (update_id,), self._keeper.keep(update))

    def sum_bytes(self, members: int) -> int:
        return FP32.payload_bytes(self.model.size)

    def put_sum(self, relay: str, update_ids: Sequence[str], payload: Payload) -> None:
        """Check and keep the mean of a region's updates; `ProtocolError` as `put`, and if members began with different
        versions or a member was not ordered.
        """
        if len({self._bases[update_id][0] if update_id in self._bases else -1 for update_id in update_ids}) != 1:
            raise ProtocolError(relay, "members", "updates that began with different versions are in one sum")
        if not self._bases.keys() >= set(update_ids):
            raise ProtocolError(relay, "update id", f"one of {', '.join(update_ids)} was not ordered")
        check_values(FP32, self.model.size, relay, payload)
        self._waiting.add(relay, update_ids, self._keeper.keep(payload))

    def commit(self, commit: Commit) -> None:
        """Fold updates into the model, in the order of ``commit.weights``; spans give the bits of whole vectors."""
        taken = self._waiting.take(commit.weights)
        bases = self._begun(commit)
        if self._optimizer is None:
            folded = self._folded(self._exact, commit, taken, bases)
            self._exact = self._keeper.make(np.float32, self._exact.size, folded)
        else:
            self._step(self._optimizer, commit, taken, bases)
        self._public.advance(self._exact)

    def _begun(self, commit: Commit) -> dict[str, tuple[int, Vector]]:
        unknown = commit.weights.keys() - self._bases.keys()
        if unknown and commit.toward:
            raise PolicyError(f"version {commit.version} moves towards {min(unknown)!r}, which no order began")
        return {update_id: self._bases.pop(update_id) for update_id in commit.weights if update_id not in unknown}

    def _folded(
        self, before: Vector | None, commit: Commit, taken: Taken, bases: Mapping[str, tuple[int, Vector]]
    ) -> Part:
        """Return a function of (start, stop): parts of ``before`` plus the updates, or of the sum alone if None."""
        if self._combiner is not None:
            updates = CommitUpdates(taken, self._exact.size, self._statistics)
            change = Combining(self._combiner, self._combined).change(updates)
            return change if before is None else _moved(before, change)

        share = np.float32(1 / max(sum(taken.weights.values()), 1.0))
        now, exact = self._public.version, self._exact

        def fold(start: int, stop: int) -> Vector:
            new = np.zeros(stop - start, np.float32) if before is None else before[start:stop].copy()
            scaled = np.empty_like(new)
            for update_id, weight in taken.weights.items():
                update = taken.formats[update_id].decode(taken.payloads[update_id], start, stop)
                if commit.toward and before is not None:
                    # The two models are close, so the subtraction rounds little.
                    np.subtract(bases[update_id][1][start:stop], before[start:stop], out=scaled)
                    scaled += update
                    scaled *= np.float32(weight)
                else:
                    np.multiply(update, np.float32(weight), out=scaled)
                version, base = bases.get(update_id, (now, exact))
                for part in within(self._statistics, start, stop) if self._statistics else ():
                    if version < now and not commit.toward:  # a mean: stale changes could make a variance negative
                        scaled[part] += np.float32(weight) * (base[start:stop][part] - exact[start:stop][part])
                    scaled[part] *= share
                new += scaled
            give_back(*taken.payloads.values(), *(base for _, base in bases.values()))
            if before is not None:
                give_back(before)
            return new

        return fold

    def notes(self) -> list[str]:
        return [] if self._combiner is None else Combining(self._combiner, self._combined).notes()

    def _step(
        self, optimizer: ServerOptimizer, commit: Commit, taken: Taken, bases: Mapping[str, tuple[int, Vector]]
    ) -> None:
        if commit.toward:
            raise PolicyError(f"version {commit.version} moves towards whole models, which makes no sum for a step")
        before = self._exact
        change = self._keeper.make(np.float32, before.size, self._folded(None, commit, taken, bases))
        staleness = [self._public.version - version for version, _ in bases.values()]
        backing, counted = None, self._counted
        if optimizer.controls:
            if taken.left_out:
                return  # silos count all their updates, so the mean of their variates would differ from the server's
            if any(staleness):
                raise PolicyError(f"version {commit.version} has updates that did not begin with the newest one")
            counted, backing = backed(counted, commit.weights, commit.steps, commit.stands_for)
        advanced = optimizer.advance(self._moments, change, staleness, self._keeper, backing)
        if advanced is None:
            return
        (self._moments, step), self._counted = advanced, counted

        self._exact = self._keeper.make(np.float32, before.size, _moved(before, step))

    def savepoint(self) -> None:
        self._remembered = self._exact, self.model, self._moments

    def rollback(self) -> None:
        self._exact, public, self._moments = self._remembered
        self._public.restart(public)

    def discard(self, update_id: str) -> None:
        self._waiting.discard(update_id)
        self._bases.pop(update_id, None)

    def state(self) -> Mapping[str, Any]:
        return named(self, _NAMES)

    def restore(self, state: Mapping[str, Any]) -> None:
        fill(self, _NAMES, state)
        self._restored = self._public.version

    @property
    def pending(self) -> tuple[str, ...]:
        return self._waiting.ids


def _moved(before: Vector, step: Part) -> Part:
    def moved(start: int, stop: int) -> Vector:
        new = step(start, stop)
        new += before[start:stop]
        give_back(before)
        return new

    return moved
