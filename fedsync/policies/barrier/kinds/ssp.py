"""Barriers without rounds: stale synchronous parallel (SSP), asynchronous parallel (ASP), and FedBuff."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf

from fedsync.core.views import ClusterView, SiloView, Verdict
from fedsync.policies.barrier.barrier_base import BarrierPolicy
from fedsync.policies.schema import Count, PositiveInt, register


@dataclass(frozen=True, slots=True)
class Tick:
    """Progress of one silo; ``clock`` and ``failures`` are the last seen values of `SiloView`.

    ``ticks``: finished orders, failed ones included, plus the count at which the silo started.
    """

    ticks: int
    clock: int
    failures: int


class Clocks(Mapping[str, Tick]):
    """Ticks of all present silos by name, and the slowest tick.

    An immutable value: `after` returns new clocks and leaves these unchanged, yet takes O(changes). The new clocks take
    over the table of the old clocks, which keep only an undo log. Old clocks rebuild their table when they are read.

    Args:
        ticks: ticks of the present silos, by name.
        away: ticks of hidden silos, by name: silos with late orders and silos that have left.
        least: `slowest` if ``ticks`` is empty.

    Attributes:
        slowest: least number of ticks. It keeps its value when no silo is present, so that returning silos are not
            ahead of newcomers by all earlier ticks.
    """

    __slots__ = ("_counts", "_heir", "_table", "_undo", "away", "slowest")

    def __init__(
        self, ticks: Mapping[str, Tick] | None = None, away: Mapping[str, Tick] | None = None, least: int = 0
    ) -> None:
        self.away = away or {}
        self.slowest = least
        self._heir: Clocks | None = None
        self._undo: list[tuple[str, Tick | None]] = []
        self._fill(dict(ticks or {}))

    def __getitem__(self, name: str) -> Tick:
        return self._own()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own())

    def __len__(self) -> int:
        return len(self._own())

    def __reduce__(self) -> tuple[type[Clocks], tuple[dict[str, Tick], Mapping[str, Tick], int]]:
        return Clocks, (dict(self._own()), self.away, self.slowest)

    def after(self, changes: Mapping[str, Tick | None]) -> Clocks:
        """Return the clocks with these ticks replaced; None removes a silo."""
        if not changes:
            return self
        table, counts, slowest = self._own(), self._counts, self.slowest
        self._undo = [(name, table.get(name)) for name in changes]
        gone = {name: before for name, before in self._undo if before is not None and changes[name] is None}
        for (name, tick), (_, before) in zip(changes.items(), self._undo, strict=True):
            if before is not None:
                counts[before.ticks] -= 1
                if counts[before.ticks] == 0:
                    del counts[before.ticks]
            if tick is not None:
                counts[tick.ticks] = counts.get(tick.ticks, 0) + 1
                slowest = min(slowest, tick.ticks)
                table[name] = tick
            elif before is not None:
                del table[name]
        heir = self._heir = Clocks.__new__(Clocks)
        heir.away = self.away
        if gone or not heir.away.keys().isdisjoint(changes):
            heir.away = {name: tick for name, tick in {**self.away, **gone}.items() if changes.get(name) is None}
        heir._heir, heir._undo, heir._table, heir._counts = None, [], table, counts
        heir.slowest = slowest if slowest in counts else min(counts, default=self.slowest)
        return heir

    def _own(self) -> dict[str, Tick]:
        if self._heir is not None:
            line = [self]
            while line[-1]._heir is not None:
                line.append(line[-1]._heir)
            table = dict(line.pop()._table)
            for clocks in reversed(line):
                for name, before in clocks._undo:
                    if before is None:
                        table.pop(name, None)
                    else:
                        table[name] = before
            self._heir = None
            self._fill(table)
        return self._table

    def _fill(self, table: dict[str, Tick]) -> None:
        self._table = table
        self._counts: dict[int, int] = {}
        for tick in table.values():
            self._counts[tick.ticks] = self._counts.get(tick.ticks, 0) + 1
        self.slowest = min(self._counts, default=self.slowest)


def advance(clocks: Clocks, view: ClusterView, changed: Collection[str] | None) -> Clocks:
    """Return the clocks after the events since ``clocks``; O(changes), or O(n) if ``changed`` is None.

    - A silo that is new, or has joined again, starts with the slowest tick, so other silos do not wait for it to catch
      up on orders from before it joined.
    - A silo that was hidden because its order was late counts on from its old tick, or from the slowest if that is
      further. Otherwise two silos that are late in turn would each restart from the other for ever, and all other
      silos would wait for them.
    - A failed order is a tick without an update, as in BSP: other silos do not wait for a silo that keeps failing.
    - A silo that has left has no clock, so other silos do not wait for it.
    """
    changes: dict[str, Tick | None] = {}
    newcomers: dict[str, SiloView] = {}
    for name in {**clocks, **view.silos} if changed is None else changed:
        silo, seen = view.silos.get(name), clocks.get(name)
        if silo is None or seen is None or silo.clock < seen.clock:
            if silo is not None:
                newcomers[name] = silo
            if seen is not None:
                changes[name] = None
        else:
            tick = _after(seen, silo)
            if tick is not seen:
                changes[name] = tick
    known = clocks.after(changes)
    return known.after({name: _first(known, name, silo) for name, silo in newcomers.items()})


def _first(clocks: Clocks, name: str, silo: SiloView) -> Tick:
    was, ticks = clocks.away.get(name), clocks.slowest
    if was is not None and was.clock <= silo.clock:  # a silo that joined again would have restarted its clock
        ticks = max(ticks, _after(was, silo).ticks)
    return Tick(ticks, silo.clock, silo.failures)


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
    """Return the failures of the idle silos ``names``; known failures keep the version from ``before``."""
    found: dict[str, Failure] = {}
    for name in names:
        count = view.silos[name].failures
        if count > 0:
            known = before.get(name)
            found[name] = known if known is not None and known.count == count else Failure(count, view.version)
    return before if found == before else found


def ready(failures: Failures, names: tuple[str, ...], view: ClusterView) -> tuple[str, ...]:
    """Return those of the idle silos ``names`` that may get an order.

    A silo that failed its order waits until the next commit, or until no silo is busy. Otherwise a silo that fails at
    once would get orders in an endless loop.
    """
    if not failures or not view.anyone_busy:
        return names
    return tuple(name for name in names if name not in failures or failures[name].version != view.version)


def commit_next(view: ClusterView) -> Verdict:
    update_id, meta = next(iter(view.pending.items()))
    return Verdict(commit=(update_id,), reason=f"{meta.silo}'s update is in")


@dataclass(frozen=True, slots=True)
class SspState:
    """State of `Ssp`; ``news`` is the last seen `Index.news`, None without an index."""

    clocks: Clocks = field(default_factory=Clocks)
    failures: Failures = field(default_factory=dict)
    news: int | None = None


@register("ssp")
@dataclass(frozen=True, slots=True)
class Ssp(BarrierPolicy[SspState]):
    """Barrier in which a silo waits only while more than ``staleness`` orders ahead of the slowest.

    An idle silo continues while ``its clock - slowest clock <= staleness``. Each update is committed as it arrives. The
    slowest silo is never held, so at least one silo always works. Simultaneous arrivals are all committed before any
    silo continues.

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
        """Decide in O(changes), or in O(n) after the slowest tick has advanced.

        The slowest tick advances only after every slowest silo has finished an order.
        """
        if view.pending:
            return state, commit_next(view)
        changed = view.changed_since(state.news)
        clocks = advance(state.clocks, view, changed)
        if changed is None or clocks.slowest != state.clocks.slowest:
            names = view.idle
        else:  # held silos stay held while the slowest tick stands still
            names = view.idle_among([*changed, *state.failures])
        failures = failed(state.failures, names, view)
        wanting = ready(failures, names, view)
        latest = clocks.slowest + self.staleness
        release = tuple(name for name in wanting if clocks[name].ticks <= latest)
        held = view.idle_count - (len(names) - len(wanting)) - len(release)
        return SspState(clocks, failures, view.news), Verdict(
            release=release, reason=told(release, held, self.staleness)
        )


@register("asp")
@dataclass(frozen=True, slots=True)
class Asp(BarrierPolicy[Failures]):
    """Barrier without waiting: each update is committed as it arrives, and its silo continues at once.

    The staleness of an update is unbounded.

    Source: PSP, section 10.3; "ZipLine", section 2.2, equation 5.
    """

    most_ahead = inf
    most_updates = 1

    def init(self) -> Failures:
        return {}

    def decide(self, state: Failures, view: ClusterView) -> tuple[Failures, Verdict]:
        """Decide in O(idle); here the idle silos are the changed silos."""
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

    Source: FedBuff (Nguyen et al. 2022, arXiv:2106.06639), Algorithm 1. The aggregation sets the coefficients,
    eta_g / K * s(staleness).
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
