"""Stale synchronous parallel, its extreme without a bound, and the clocks that both count by."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from fedsync.core.views import ClusterView, SiloView, Verdict
from fedsync.policies.barrier.barrier_base import BarrierPolicy
from fedsync.policies.schema import Count, register


@dataclass(frozen=True, slots=True)
class Tick:
    """How far one silo has come.

    Args:
        ticks: orders that ended, with or without an update, on top of where it began to count.
        clock: `SiloView.clock` as last seen.
        failures: `SiloView.failures` as last seen.
    """

    ticks: int
    clock: int
    failures: int


class Clocks(Mapping[str, Tick]):
    """Name -> tick of every silo that is here, and who is slowest.

    A value: `after` returns others and leaves these as they are. It takes O(changes) nevertheless, for the new clocks
    take over the table of the old ones, which only keep what to undo, and make a table of their own should they be
    asked again.

    Args:
        ticks: by name.
        away: likewise, of silos that are not shown any more: because their orders are late, or for good.
        least: `slowest` if ``ticks`` is empty.

    Attributes:
        slowest: the least number of ticks; if nobody is here what it was before, so that who comes back is not ahead of
            newcomers by all that was counted until then.
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
        """The clocks once these ticks have taken the place of the old ones; None is of a silo that is gone."""
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
    """The clocks after whatever happened since ``clocks``; O(changes), or O(n) if ``changed`` is None.

    - A silo that is new, or has joined again, counts from the slowest: nobody waits until it has made
      up for a past in which it was not there.
    - One that was not shown for a while, because its order was late, counts on from where it was, or from the slowest
      if that is further. Else two silos that are late in turn would each count from the other for ever, and all others
      would wait for them.
    - A failed order is a tick without an update, as in BSP: nobody waits for a silo that keeps failing.
    - A silo that is gone has no clock: nobody waits for it.
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
    """The tick of a silo that had none before."""
    was, ticks = clocks.away.get(name), clocks.slowest
    if was is not None and was.clock <= silo.clock:  # it did not join anew, or its clock would have begun anew
        ticks = max(ticks, _after(was, silo).ticks)
    return Tick(ticks, silo.clock, silo.failures)


def _after(seen: Tick, silo: SiloView) -> Tick:
    if silo.clock > seen.clock or silo.failures > seen.failures:
        return Tick(seen.ticks + 1, silo.clock, silo.failures)
    return seen if silo.failures == seen.failures else replace(seen, failures=silo.failures)


@dataclass(frozen=True, slots=True)
class Failure:
    """That a silo's last order failed.

    Args:
        count: `SiloView.failures`.
        version: of the model when that was seen first.
    """

    count: int
    version: int


Failures = Mapping[str, Failure]
"""Name -> failure of the idle silos whose last order failed."""


def failed(before: Failures, names: Iterable[str], view: ClusterView) -> Failures:
    """Those of the idle silos ``names`` whose last order failed; ``before`` says who had failed already."""
    found: dict[str, Failure] = {}
    for name in names:
        count = view.silos[name].failures
        if count > 0:
            known = before.get(name)
            found[name] = known if known is not None and known.count == count else Failure(count, view.version)
    return before if found == before else found


def ready(failures: Failures, names: tuple[str, ...], view: ClusterView) -> tuple[str, ...]:
    """Those of the idle silos ``names`` that want to go on.

    One that failed its order sits out until the next commit, or until nobody is at work: without
    that, a silo that fails at once would be asked again at once, for ever.
    """
    if not failures or not view.anyone_busy:
        return names
    return tuple(name for name in names if name not in failures or failures[name].version != view.version)


def commit_next(view: ClusterView) -> Verdict:
    """Commit the oldest pending update alone."""
    update_id, meta = next(iter(view.pending.items()))
    return Verdict(commit=(update_id,), reason=f"{meta.silo}'s update is in")


@dataclass(frozen=True, slots=True)
class SspState:
    """Of `Ssp`.

    Args:
        clocks: of all silos.
        failures: of idle silos.
        news: `Index.news` when they were looked at, None if there was no index.
    """

    clocks: Clocks = field(default_factory=Clocks)
    failures: Failures = field(default_factory=dict)
    news: int | None = None


@register("ssp")
@dataclass(frozen=True, slots=True)
class Ssp(BarrierPolicy[SspState]):
    """Wait only when ``staleness`` orders ahead of the slowest; commit each update as it arrives.

    An idle silo goes on while ``its clock - slowest clock <= staleness``. The slowest is never held, so
    somebody always works. Of simultaneous arrivals all are committed before anybody goes on.

    Source: "ZipLine", section 2.2; PSP, section 10.3.
    """

    staleness: Count = 3
    """Orders that a silo may be ahead of the slowest; s in the papers. 0 keeps the silos in lockstep, as ``bsp`` does,
    but commits one by one."""

    @property
    def most_ahead(self) -> int:
        return self.staleness

    @property
    def most_updates(self) -> int:
        return 1

    def init(self) -> SspState:
        return SspState()

    def decide(self, state: SspState, view: ClusterView) -> tuple[SspState, Verdict]:
        """Commit what is there, one by one; then release whoever is not too far ahead.

        O(changes), and O(n) when the slowest has come on, which takes an order of each that is as slow.
        """
        if view.pending:
            return state, commit_next(view)
        changed = view.changed_since(state.news)
        clocks = advance(state.clocks, view, changed)
        if changed is None or clocks.slowest != state.clocks.slowest:
            names = view.idle
        else:  # who was held is held still
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
    """Wait for nobody.

    Each update is committed as it arrives, its silo goes on at once, and nothing bounds how stale an update may be.

    Source: PSP, section 10.3; "ZipLine", section 2.2, equation 5.
    """

    @property
    def most_ahead(self) -> float:
        return inf

    @property
    def most_updates(self) -> int:
        return 1

    def init(self) -> Failures:
        return {}

    def decide(self, state: Failures, view: ClusterView) -> tuple[Failures, Verdict]:
        """Commit what is there, one by one; then release whoever is idle; O(idle), which here are the changed."""
        if view.pending:
            return state, commit_next(view)
        idle = view.idle
        failures = failed(state, idle, view)
        release = ready(failures, idle, view)
        return failures, Verdict(release=release, reason=told(release, 0, 0))


def told(release: tuple[str, ...], held: int, staleness: int) -> str:
    """The reason of a verdict that releases some silos and holds others, for people."""
    goes = f"{release[0]} goes on" if len(release) == 1 else f"{len(release)} silos go on" if release else ""
    if held == 0:
        return goes or "nobody wants to go on"
    waits = f"{held} of the idle would run more than {staleness} ahead"
    return f"{goes}; {waits}" if goes else waits
