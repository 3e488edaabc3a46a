"""Stale synchronous parallel, its extreme without a bound, and the clocks that both count by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fedsync.core.views import ClusterView, SiloView, Verdict


@dataclass(frozen=True, slots=True)
class Tick:
    """How far one silo has come.

    Args:
        ticks: orders that ended, with or without an update, on top of where it began to count.
        clock: `SiloView.clock` as last seen.
        failures: `SiloView.failures` as last seen.
        failed_at: model version at which its last order failed, -1 if that did not fail.
    """

    ticks: int
    clock: int
    failures: int
    failed_at: int = -1


Clocks = Mapping[str, Tick]
"""Name -> tick of every silo that is here."""


def advance(clocks: Clocks, view: ClusterView) -> dict[str, Tick]:
    """The clocks after whatever happened since ``clocks``; O(n).

    - A silo that is new, or has joined again, counts from the slowest: nobody waits until it has made
      up for a past in which it was not there.
    - A failed order is a tick without an update, as in BSP: nobody waits for a silo that keeps failing.
    - A silo that is gone has no clock: nobody waits for it.
    """
    known = {
        name: _after(clocks[name], silo, view.version)
        for name, silo in view.silos.items()
        if name in clocks and silo.clock >= clocks[name].clock
    }
    slowest = min((tick.ticks for tick in known.values()), default=0)
    return {name: known.get(name) or Tick(slowest, silo.clock, silo.failures) for name, silo in view.silos.items()}


def _after(seen: Tick, silo: SiloView, version: int) -> Tick:
    if silo.clock > seen.clock:
        return Tick(seen.ticks + 1, silo.clock, silo.failures)
    if silo.failures > seen.failures:
        return Tick(seen.ticks + 1, silo.clock, silo.failures, failed_at=version)
    return seen if silo.failures == seen.failures else replace(seen, failures=silo.failures)


def ready(clocks: Clocks, view: ClusterView) -> list[str]:
    """Idle silos that want to go on.

    One that failed its order sits out until the next commit, or until nobody is at work: without
    that, a silo that fails at once would be asked again at once, for ever.
    """
    idle = view.idle
    busy = len(idle) < len(view.silos)
    return [name for name in idle if not (busy and clocks[name].failed_at == view.version)]


def commit_next(view: ClusterView) -> Verdict:
    """Commit the oldest pending update alone."""
    update_id, meta = next(iter(view.pending.items()))
    return Verdict(commit=(update_id,), reason=f"{meta.silo}'s update is in")


@dataclass(frozen=True, slots=True)
class Ssp:
    """Commit each update as it arrives; let nobody run more than ``staleness`` orders ahead of the slowest.

    An idle silo goes on while ``its clock - slowest clock <= staleness``. The slowest is never held, so
    somebody always works. Of simultaneous arrivals all are committed before anybody goes on.

    Args:
        staleness: s, in orders; 0 keeps the silos in lockstep, as BSP does, but commits one by one.

    Source: "ZipLine", section 2.2; PSP, section 10.3.
    """

    staleness: int

    def init(self) -> Clocks:
        """Nobody has been seen."""
        return {}

    def decide(self, state: Clocks, view: ClusterView) -> tuple[Clocks, Verdict]:
        """Commit what is there, one by one; then release whoever is not too far ahead."""
        if view.pending:
            return state, commit_next(view)
        clocks = advance(state, view)
        latest = min((tick.ticks for tick in clocks.values()), default=0) + self.staleness
        wanting = ready(clocks, view)
        release = tuple(name for name in wanting if clocks[name].ticks <= latest)
        return clocks, Verdict(release=release, reason=told(release, len(wanting) - len(release), self.staleness))


@dataclass(frozen=True, slots=True)
class Asp:
    """Commit each update as it arrives and let its silo go on at once.

    Nobody waits for anybody, and nothing bounds how stale an update may be.

    Source: PSP, section 10.3; "ZipLine", section 2.2, equation 5.
    """

    def init(self) -> Clocks:
        """Nobody has been seen."""
        return {}

    def decide(self, state: Clocks, view: ClusterView) -> tuple[Clocks, Verdict]:
        """Commit what is there, one by one; then release whoever is idle."""
        if view.pending:
            return state, commit_next(view)
        clocks = advance(state, view)
        release = tuple(ready(clocks, view))
        return clocks, Verdict(release=release, reason=told(release, 0, 0))


def told(release: tuple[str, ...], held: int, staleness: int) -> str:
    """The reason of a verdict that releases some silos and holds others, for people."""
    goes = {0: "", 1: f"{release[0] if release else ''} goes on"}.get(len(release), f"{len(release)} silos go on")
    waits = f"{held} of the idle would run more than {staleness} ahead" if held else ""
    return "; ".join(part for part in (goes, waits) if part) or "nobody wants to go on"
