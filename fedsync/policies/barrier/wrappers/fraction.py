"""A part of the silos in each round, for any barrier: client sampling.

The barrier inside is shown the silos of the round and no others, so it neither waits for the rest nor releases them.

| a silo that | is shown |
|---|---|
| is at work, or has sent what is not committed yet | always: it is part of the round |
| is idle | if it is among the first by lot, as many as the round has room for |

Each silo's lot follows from (seed, version, name), so that it is another for each version of the model, and whoever
comes or goes changes nobody else's. A failed order changes the lot: else a round of one silo would ask the same again.

A barrier commits and releases in one answer, but a commit ends the round: those that are released belong to the next.
So where it commits, it is asked again with the silos of the next round in place of those whose updates it commits.
Should it then not commit the same, its first answer stands, and the silos of the round go on (FedCompass, at times).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from fedsync.common.rng import Stream, derive_seed, part_of
from fedsync.core.views import ClusterView, Verdict
from fedsync.policies.barrier.barrier_base import BarrierPolicy, Inner, check_outermost, within
from fedsync.policies.schema import PositiveInt, Share, register


@register("fraction")
@dataclass(frozen=True, slots=True)
class Fraction(BarrierPolicy[Any]):
    """``inner``, but only a ``share`` of the silos takes part in a round, drawn anew for each version of the model.

    Where each arrival is a version of its own, as in ``asp``, so many silos are at work at a time.

    Source: McMahan et al. 2017, "Communication-efficient learning of deep networks from decentralized data",
    arXiv:1602.05629, algorithm 1, where the share is C; rounded down, as Flower's ``fraction_train`` is.
    """

    inner: Inner
    """Any barrier, a wrapper too."""

    share: Share
    """Part of the silos present that takes part in a round, rounded down."""

    least: PositiveInt = 1
    """Silos that take part at least, or all if fewer are present."""

    def __post_init__(self) -> None:
        check_outermost(self.inner, self.kind)

    @property
    def innermost(self) -> BarrierPolicy[Any]:
        return self.inner.innermost

    @property
    def mixes_rounds(self) -> bool:
        return self.inner.mixes_rounds

    @property
    def draws(self) -> bool:
        return self.share < 1 or self.inner.draws

    @property
    def symmetric(self) -> bool:
        """Whether nobody is drawn; names decide who is."""
        return self.share == 1 and self.inner.symmetric

    def sampled(self, silos: int) -> int:
        return self.inner.sampled(self._round(silos))

    @property
    def named_silos(self) -> dict[str, int]:
        return {"least": self.least, **within(self.inner)}

    def least_updates(self, silos: int) -> int:
        return self.inner.least_updates(self._round(silos))

    def init(self) -> Any:
        return self.inner.init()

    def decide(self, state: Any, view: ClusterView) -> tuple[Any, Verdict]:
        """Ask ``inner`` about the silos of the round; O(n log n)."""
        after, verdict = self.inner.decide(state, self._shown(view, (), view.version))
        if not verdict.commit:
            return after, verdict
        next_version = view.version + 1 + verdict.rollback
        then, other = self.inner.decide(state, self._shown(view, verdict.commit, next_version))
        return (then, other) if other.commit == verdict.commit else (after, verdict)

    def _round(self, silos: int) -> int:
        """Silos of a round, where so many are present."""
        return part_of(silos, self.share, self.least)

    def _shown(self, view: ClusterView, ended: Collection[str], version: int) -> ClusterView:
        """The view with the silos of a round: who is part of it, and by lot as many as there is room for.

        Args:
            view: everything.
            ended: updates that are part of it no more.
            version: of the model that it begins with.
        """
        part = {meta.silo for update_id, meta in view.pending.items() if update_id not in ended}
        part.update(name for name, silo in view.silos.items() if silo.busy)
        idle = [name for name in view.silos if name not in part]
        room = self._round(len(view.silos)) - len(part)
        if room < len(idle):
            drawn = sorted(idle, key=lambda name: _lot(name, view, version))[: max(room, 0)]
            part.update(drawn)
            silos = {name: silo for name, silo in view.silos.items() if name in part}
            return replace(view, silos=silos, index=None)
        return view


def _lot(name: str, view: ClusterView, version: int) -> int:
    failures = view.silos[name].failures
    return derive_seed(view.seed, Stream.ROUND, f"{failures}/{name}", version)
