"""Client sampling for any barrier: a share of the silos takes part in each round.

The inner barrier sees only the silos of the round, so it neither waits for other silos nor releases them.

| a silo that | is visible |
|---|---|
| is busy, or has an uncommitted update | always: it is part of the round |
| is idle | if its random number is among the lowest, up to the free places of the round |

Each silo's random number follows from (seed, version, name). So each model version draws a new sample, and joining or
leaving silos do not change the numbers of other silos. A failed order also changes the number. Otherwise a round of one
silo would choose the same silo again.

A commit ends the round, and the silos that the same verdict releases belong to the next round. So if the inner barrier
commits, it is asked a second time, and then sees the silos of the next round. If its second verdict commits other
updates, as FedCompass sometimes does, the first verdict is used, and the silos of the old round start again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from fedsync.common.rng import Stream, derive_seed, part_of
from fedsync.core.views import ClusterView, Verdict
from fedsync.policies.barrier.barrier_base import BarrierPolicy, Inner, within
from fedsync.policies.schema import PositiveInt, Share, register


@register("fraction")
@dataclass(frozen=True, slots=True)
class Fraction(BarrierPolicy[Any]):
    """Barrier ``inner`` for a ``share`` of the silos, drawn anew for each version of the model.

    If each arrival makes a version, as in ``asp``, this share of the silos is busy at any time.

    Source: McMahan et al. 2017, "Communication-efficient learning of deep networks from decentralized data",
    arXiv:1602.05629, algorithm 1, where the share is C; rounded down, as Flower's ``fraction_train`` is.
    """

    inner: Inner
    """Any barrier, also a wrapper."""

    share: Share
    """Share of the present silos that takes part in a round, rounded down."""

    least: PositiveInt = 1
    """Fewest silos that take part in a round; all silos if fewer are present."""

    @property
    def innermost(self) -> BarrierPolicy[Any]:
        return self.inner.innermost

    @property
    def mixes_rounds(self) -> bool:
        return self.inner.mixes_rounds

    @property
    def draws(self) -> bool:
        return self.share < 1 or self.inner.draws

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
        after, verdict = self.inner.decide(state, self._shown(view, (), view.version))
        if not verdict.commit:
            return after, verdict
        next_version = view.version + 1 + verdict.rollback
        then, other = self.inner.decide(state, self._shown(view, verdict.commit, next_version))
        return (then, other) if other.commit == verdict.commit else (after, verdict)

    def _round(self, silos: int) -> int:
        return part_of(silos, self.share, self.least)

    def _shown(self, view: ClusterView, ended: Collection[str], version: int) -> ClusterView:
        """Return the view with a round's current members, and random silos in its free places."""
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
