"""Barriers without rounds: stale synchronous parallel (SSP), asynchronous parallel (ASP), and FedBuff."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf

from fedsync.core.views import ClusterView, SiloView, Verdict
from fedsync.policies.barrier.barrier_base import BarrierPolicy
from fedsync.policies.schema import Count, PositiveInt, register


@dataclass(frozen=True, slots=True)
class Tick:
    """Finished orders of one silo, failed ones included, plus the count at which the silo started. ``clock`` and
    ``failures`` are the last seen values of `SiloView`.
    """

    ticks: int
    clock: int
    failures: int


@dataclass(frozen=True, slots=True)
class Clocks:
    """Ticks of all present silos, and the slowest tick.

    Args:
        present: ticks of the present silos, by name.
        away: ticks of hidden silos, by name: silos with late orders and silos that have left.
        slowest: least number of ticks. It stays when no silo is present, so that returning silos are not far ahead of
            newcomers.
    """

    present: Mapping[str, Tick] = field(default_factory=dict)
    away: Mapping[str, Tick] = field(default_factory=dict)
    slowest: int = 0


def advance(clocks: Clocks, view: ClusterView) -> Clocks:
    """Return the clocks after the events since ``clocks``, in O(n).

    - A silo that is new, or has joined again, starts with the slowest tick, so other silos do not wait for it to catch
      up on orders from before it joined.
    - A silo that was hidden because its order was late counts on from its old tick, or from the slowest if that is
      further. Otherwise two silos that are late in turn would each restart from the other for ever, and all other silos
      would wait for them.
    - A failed order is a tick without an update, as in BSP: other silos do not wait for a silo that keeps failing.
    - A silo that has left has no clock, so other silos do not wait for it.
    """
    known = {
        name: _after(seen, view.silos[name])
        for name, seen in clocks.present.items()
        if name in view.silos and view.silos[name].clock >= seen.clock
    }
    slowest = _slowest(known, clocks.slowest)
    newcomers = {
        name: _first(slowest, clocks.away.get(name), silo) for name, silo in view.silos.items() if name not in known
    }
    present = {**known, **newcomers}
    away = {name: tick for name, tick in {**clocks.away, **clocks.present}.items() if name not in present}
    return Clocks(present, away, _slowest(present, slowest))


def _slowest(present: Mapping[str, Tick], without: int) -> int:
    return min((tick.ticks for tick in present.values()), default=without)


def _first(slowest: int, was: Tick | None, silo: SiloView) -> Tick:
    if was is not None and was.clock <= silo.clock:  # a silo that joined again would have restarted its clock
        slowest = max(slowest, _after(was, silo).ticks)
    return Tick(slowest, silo.clock, silo.failures)


def _after(seen: Tick, silo: SiloView) -> Tick:
    if silo.clock > seen.clock or silo.failures > seen.failures:
        return Tick(seen.ticks + 1, silo.clock, silo.failures)
    return seen if silo.failures == seen.failures else replace(seen, failures=silo.failures)


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure of a silo's last order, by `SiloView.failures` and the model version at which it was first seen."""

    count: int
    version: int


Failures = Mapping[str, Failure]


def failed(before: Failures, names: Iterable[str], view: ClusterView) -> Failures:
    found: dict[str, Failure] = {}
    for name in names:
        count = view.silos[name].failures
        if count > 0:
            known = before.get(name)
            found[name] = known if known is not None and known.count == count else Failure(count, view.version)
    return before if found == before else found


def ready(failures: Failures, names: tuple[str, ...], view: ClusterView) -> tuple[str, ...]:
    """Return those of the idle silos ``names`` that may get an order. A silo that failed its order waits until the next
    commit, or until no silo is busy: a silo that fails at once would get orders in an endless loop.
    """
    if not failures or not view.anyone_busy:
        return names
    return tuple(name for name in names if name not in failures or failures[name].version != view.version)


def commit_next(view: ClusterView) -> Verdict:
    update_id, meta = next(iter(view.pending.items()))
    return Verdict(commit=(update_id,), reason=f"{meta.silo}'s update is in")


@dataclass(frozen=True, slots=True)
class SspState:
    """State of `Ssp`."""

    clocks: Clocks = field(default_factory=Clocks)
    failures: Failures = field(default_factory=dict)


@register("ssp")
@dataclass(frozen=True, slots=True)
class Ssp(BarrierPolicy[SspState]):
    """Barrier in which a silo waits only while more than ``staleness`` orders ahead of the slowest.

    Each update is committed as it arrives; simultaneous arrivals are all committed before any silo continues. The
    slowest silo is never held, so at least one silo always works.

    Source: "ZipLine", section 2.2; PSP, section 10.3.
    """

    staleness: Count = 3
    """Orders that a silo may be ahead of the slowest; s in the papers. 0 keeps the silos in lockstep, as ``bsp`` does,
    but commits updates one by one."""

    most_updates = 1

    @property
    def most_ahead(self) -> int:
        return self.staleness

    def init(self) -> SspState:
        return SspState()

    def decide(self, state: SspState, view: ClusterView) -> tuple[SspState, Verdict]:
        if view.pending:
            return state, commit_next(view)
        clocks, idle = advance(state.clocks, view), view.idle
        failures = failed(state.failures, idle, view)
        wanting = ready(failures, idle, view)
        latest = clocks.slowest + self.staleness
        release = tuple(name for name in wanting if clocks.present[name].ticks <= latest)
        reason = told(release, len(wanting) - len(release), self.staleness)
        return SspState(clocks, failures), Verdict(release=release, reason=reason)


@register("asp")
@dataclass(frozen=True, slots=True)
class Asp(BarrierPolicy[Failures]):
    """Barrier without waiting: each update is committed as it arrives, and its silo continues at once.

    Source: PSP, section 10.3; "ZipLine", section 2.2, equation 5.
    """

    most_ahead = inf
    most_updates = 1

    def init(self) -> Failures:
        return {}

    def decide(self, state: Failures, view: ClusterView) -> tuple[Failures, Verdict]:
        if view.pending:
            return state, commit_next(view)
        idle = view.idle
        failures = failed(state, idle, view)
        release = ready(failures, idle, view)
        return failures, Verdict(release=release, reason=told(release, 0, 0))


def told(release: tuple[str, ...], held: int, staleness: int) -> str:
    goes = f"{release[0]} goes on" if len(release) == 1 else f"{len(release)} silos go on" if release else ""
    if held == 0:
        return goes or "nobody wants to go on"
    waits = f"{held} of the idle would run more than {staleness} ahead"
    return f"{goes}; {waits}" if goes else waits


@register("buffered")
@dataclass(frozen=True, slots=True)
class Buffered(BarrierPolicy[Failures]):
    """FedBuff barrier: every ``size`` updates are committed, the oldest first, and no silo waits.

    A silo takes the newest model as soon as it has uploaded its update. So a fast silo may have several updates in one
    commit, and ``size`` may exceed the number of silos. With size 1 this is ASP.

    Source: FedBuff (Nguyen et al. 2022, arXiv:2106.06639), Algorithm 1.
    """

    size: PositiveInt
    """Updates per commit, from any silos; K in the paper."""

    most_ahead = inf

    @property
    def most_updates(self) -> int:
        return self.size

    def init(self) -> Failures:
        return {}

    def decide(self, state: Failures, view: ClusterView) -> tuple[Failures, Verdict]:
        idle = view.idle
        failures = failed(state, idle, view)
        if len(view.pending) >= self.size:
            commit = tuple(islice(view.pending, self.size))
            return failures, Verdict(commit=commit, reason=f"{self.size} updates are in")
        release = ready(failures, idle, view)
        filled = f"{len(view.pending)} of {self.size} updates are in"
        return failures, Verdict(release=release, reason=f"{filled}; {len(release)} silos go on" if release else filled)
