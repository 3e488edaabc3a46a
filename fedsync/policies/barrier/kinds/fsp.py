"""Flexible synchronous parallel: rounds of so many seconds instead of so many steps.

BSP fixes the work of a round, and the slowest silo says how long it takes. FSP fixes the time: every silo trains until
the interval is over, however far that is, so nobody waits for anybody. Fast silos then do more steps, which the
aggregation has to allow for (FedNova). What is to be chosen is the length: short rounds bring fresh parameters
often, long ones pay for fewer barriers (`fedsync.policies.barrier.intervals`).

A round goes through these states; between two decisions only time and arrivals change anything:

| state | what happened | decision | next |
|---|---|---|---|
| none in work | somebody is idle | all idle silos get an order, with a budget that ends at the deadline | in work |
| in work, before the deadline | all are in | commit | none |
| in work, before the deadline | one is through with its data | the others are told to stop | in work, halted |
| in work, before the deadline | one comes that has time for a step | it joins | in work |
| after the deadline | those of ``wait_for`` are in | commit | none |
| after ``grace`` | those still out are known silos | commit; they are late | none |
| in work | nobody is at work any more, and nothing fits | | none |

What is late comes into the next commit, or is discarded (`Late`). A rollback makes what began before it worthless.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Annotated, Any

from annotated_types import Ge

from fedsync.core.orders import UpdateMeta, mean_loss
from fedsync.core.views import ClusterView, Verdict
from fedsync.policies.barrier.barrier_base import BarrierPolicy
from fedsync.policies.barrier.intervals import IntervalPolicy, IntervalRound
from fedsync.policies.barrier.kinds.sampled import Sampling
from fedsync.policies.schema import Choice, Chosen, Count, PartOfOne, Positive, Settings, Share, register


class Late(Choice):
    """What becomes of an update that started from an older version than the current one.

    - ``drop``: it is discarded by name.
    - ``next``: the next commit takes it in.
    - ``stale``: the same; says that the aggregation is expected to weigh it by its staleness.
    """

    DROP = "drop"
    NEXT = "next"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class WaitFor(Settings):
    """After the deadline wait only for ``sample_size`` silos."""

    sample_size: Count
    """Silos that the round waits for after the deadline; 0 commits on the dot."""

    sampling: Sampling = Sampling.DYNAMIC
    """How they are drawn, round by round: ``basic`` the same, ``dynamic`` anew, ``grouped`` half fast and half slow."""

    symmetric = False


@dataclass(frozen=True, slots=True)
class Overhead:
    """What an order of one silo costs besides training.

    Args:
        clock: of the silo, when this was learned.
        seconds: smoothed over its orders, but for the first.
        orders: how many there were.
    """

    clock: int
    seconds: float
    orders: int = 1


@dataclass(frozen=True, slots=True)
class FspRound:
    """A round in work.

    Args:
        begin_s: when its orders went out.
        deadline_s: when the updates should be in.
        patience_s: when those that are still out, of silos that are known, are late.
        members: silos that were given an order in it.
        awaited: of these, the ones to wait for after the deadline.
        halted: whether the others were told to stop.
    """

    begin_s: float
    deadline_s: float
    patience_s: float
    members: frozenset[str]
    awaited: frozenset[str]
    halted: bool = False


@dataclass(frozen=True, slots=True)
class FspState:
    """Of `Fsp`.

    Args:
        interval: state of the interval policy.
        round: in work, or None between two.
        overheads: by silo, of those that have finished an order.
        rounds: how many rounds there were.
        fresh: updates that began before this version are from before a rollback.
    """

    interval: Any
    round: FspRound | None = None
    overheads: Mapping[str, Overhead] = field(default_factory=dict)
    rounds: int = 0
    fresh: int = 0


@register("fsp")
@dataclass(frozen=True, slots=True)
class Fsp(BarrierPolicy[FspState]):
    """Rounds of so many seconds for everybody; how much a silo gets done in them is its own affair.

    Coordination is semi-centralised: a silo stops by itself after ``interval - delta_i``, where delta_i is
    its own overhead (start, transfer, evaluation...), learned from order to order by an exponential moving
    average, so that all updates come in together at ``interval``. (The first order starts processes and
    loads data: its overhead is forgotten once there is a second.) The last step may run over the budget by
    ``overrun`` of its length; at 0.5 too long and too short balance out.

    An interval that overhead would fill is stretched to twice the median of those who begin, so that half
    of them train for half of the round at least. Without that every order would be one step, and late.

    A round is committed

    - once all are in, or else
    - at the deadline, once those of ``wait_for`` are in, or else
    - when ``grace`` is over, with what is there. A silo that never finished an order has no known delta;
      it is waited for.

    Nobody gets an order of more than ``passes`` over its data: with an interval that long, more steps from
    the same parameters are of little use. Who is through before the deadline tells so by being there, and
    the others are told to stop where they are. (The paper computes gradients at fixed parameters, so a
    second pass is redundant; local steps move on, so here it need not be 1.)

    A silo that comes late joins the round in work if there is time for a step, else the next one. One that
    failed, or that nobody knows yet, joins the next one. An update that began with an older version is late.

    Source: FSP, sections 3.1, 3.3 and 5.2; ``wait_for`` is PSP's sampling (section 10.4.1) of a commit.
    """

    interval: Annotated[IntervalPolicy[Any], Chosen("interval")]
    """How long each round is."""

    overrun: PartOfOne = 0.5
    """Share of its last step by which a silo may be late."""

    grace: Annotated[float, Ge(0)] = 0.5
    """How long stragglers are waited for, as a share of the interval."""

    passes: Positive = 1.0
    """Most that a silo goes through its data in one round; whoever is through ends the round for all."""

    late: Late = Late.NEXT
    """What becomes of updates that come too late: discarded, part of the next commit, or the same and discounted. What
    began before a rollback is discarded in any case."""

    wait_for: WaitFor | None = None
    """After the deadline wait only for a few; left out, for all."""

    smoothing: Share = 0.5
    """Weight of the newest measurement in what a silo's orders cost besides training."""

    sets_steps = True
    needs_examples = True

    def __post_init__(self) -> None:
        if self.wait_for is not None and self.late is Late.DROP:
            raise ValueError("late 'drop' throws away what wait_for does not wait for; write late: next")

    @property
    def mixes_rounds(self) -> bool:
        return self.late is not Late.DROP

    @property
    def needs_discount(self) -> bool:
        return self.late is Late.STALE

    @property
    def needs_losses(self) -> bool:
        return self.interval.needs_losses

    @property
    def rolls_back(self) -> bool:
        return self.interval.rolls_back

    @property
    def named_silos(self) -> dict[str, int]:
        return {} if self.wait_for is None else {"wait_for.sample_size": self.wait_for.sample_size}

    def init(self) -> FspState:
        return FspState(self.interval.init())

    def decide(self, state: FspState, view: ClusterView) -> tuple[FspState, Verdict]:
        """Begin a round, or see whether the one in work is over; O(n)."""
        state = replace(state, overheads=self._learned(state.overheads, view))
        fit = [meta for meta in view.pending.values() if meta.base_version == view.version]
        refused = tuple(meta.update_id for meta in view.pending.values() if self._refuses(meta, state, view))
        out = _at_work(view)
        if state.round is None or not (fit or out):
            return self._begin(state, view, refused)
        why = self._over(state.round, state.overheads, out, view.now_s) if fit else None
        if why is not None:
            return self._close(state, state.round, view, fit, refused, why)
        return self._go_on(state, state.round, view, fit, refused, out)

    # The four things that can happen.

    def _begin(self, state: FspState, view: ClusterView, refused: tuple[str, ...]) -> tuple[FspState, Verdict]:
        """Give all idle silos an order for a new round."""
        idle = view.idle
        state = replace(state, round=None)
        if not idle:
            return state, Verdict(discard=refused, reason="nobody is idle" if view.silos else "no silo is here")
        attempt = self.interval.attempt(state.interval)
        interval_s = max(attempt.interval_s, 2 * _usual_overhead_s(idle, state.overheads))
        deadline_s = view.now_s + interval_s
        round = FspRound(
            begin_s=view.now_s,
            deadline_s=deadline_s,
            patience_s=deadline_s + self.grace * interval_s,
            members=frozenset(idle),
            awaited=self._awaited(idle, state.rounds + 1, view),
        )
        back = "back to the remembered model; " if attempt.rollback else ""
        verdict = Verdict(
            rollback=attempt.rollback,
            discard=refused,
            savepoint=attempt.savepoint,
            release=idle,
            steps=self._steps(idle, view),
            budget_s=self._budgets(idle, interval_s, state),
            overrun=self.overrun,
            wake_at_s=self._next(view.now_s, round),
            reason=f"{back}{len(idle)} silos begin a round of {interval_s:.3g} s",
        )
        # A rollback makes the version that the round starts from.
        fresh = view.version + 1 if attempt.rollback else state.fresh
        return replace(state, round=round, rounds=state.rounds + 1, fresh=fresh), verdict

    def _close(
        self,
        state: FspState,
        round: FspRound,
        view: ClusterView,
        fit: list[UpdateMeta],
        refused: tuple[str, ...],
        why: str,
    ) -> tuple[FspState, Verdict]:
        """Commit what fits, and the late ones that are not refused; learn from the former."""
        left_out = set(refused)
        commit = tuple(update_id for update_id in view.pending if update_id not in left_out)
        costs = [state.overheads[meta.silo].seconds for meta in fit if meta.silo in state.overheads]
        seen = IntervalRound(
            seconds=max(view.now_s - round.begin_s, 1e-9),
            cost_s=sum(costs) / len(costs) if costs else 0.0,
            loss=mean_loss(fit) or 0.0,  # sealed, they are looked at by no interval that is allowed then
        )
        after = replace(state, round=None, interval=self.interval.observe(state.interval, seen))
        folded = len(commit) - len(fit)
        why = f"{why}, and {folded} late" if folded else why
        return after, Verdict(commit=commit, discard=refused, reason=f"{why} after {seen.seconds:.3g} s")

    def _go_on(
        self,
        state: FspState,
        round: FspRound,
        view: ClusterView,
        fit: list[UpdateMeta],
        refused: tuple[str, ...],
        out: list[str],
    ) -> tuple[FspState, Verdict]:
        """Let stragglers join; tell the others to stop once somebody has gone through its data."""
        done = next((meta.silo for meta in fit if meta.samples >= self.passes * meta.examples), None)
        halt = done is not None and not round.halted
        # One that joined and went, or joined again, sits the round out.
        joins = () if done is not None else tuple(n for n in view.idle if self._may_join(n, round, state, view))
        round = replace(round, halted=round.halted or halt, members=round.members.union(joins))
        reason = f"{done} is through with its data: stop" if halt else f"waiting for {len(out)} silos"
        reason = f"{', '.join(joins)} joined in; {reason}" if joins else reason
        left_s = round.deadline_s - view.now_s
        return replace(state, round=round), Verdict(
            discard=refused,
            release=joins,
            steps=self._steps(joins, view),
            budget_s=self._budgets(joins, left_s, state),
            overrun=self.overrun,
            stop_now=tuple(out) if halt else (),
            wake_at_s=self._next(view.now_s, round),
            reason=reason,
        )

    def _over(self, round: FspRound, overheads: Mapping[str, Overhead], out: list[str], now_s: float) -> str | None:
        """Why the round is over, or None. It has an update at least."""
        if not out:
            return "all are in"
        if now_s >= round.deadline_s and self.wait_for is not None and round.awaited.isdisjoint(out):
            return f"those waited for are in, {len(out)} are not"
        if now_s >= round.patience_s and all(name in overheads for name in out if name in round.awaited):
            return f"{len(out)} are late"
        return None

    def _next(self, now_s: float, round: FspRound) -> float | None:
        """The next instant at which time alone may end the round."""
        instants = (round.patience_s,) if self.wait_for is None else (round.deadline_s, round.patience_s)
        return next((at_s for at_s in instants if at_s > now_s), None)

    # Parts of orders.

    def _learned(self, overheads: Mapping[str, Overhead], view: ClusterView) -> dict[str, Overhead]:
        """Overheads of the silos that are here, with whatever orders ended since."""
        learned = {}
        for name, silo in view.silos.items():
            known = overheads.get(name)
            if known is None:
                if silo.clock > 0:
                    learned[name] = Overhead(silo.clock, silo.overhead_s)
            elif silo.clock > known.clock:
                weight = self.smoothing if known.orders > 1 else 1.0
                seconds = known.seconds + weight * (silo.overhead_s - known.seconds)
                learned[name] = Overhead(silo.clock, seconds, known.orders + 1)
            else:
                learned[name] = replace(known, clock=silo.clock) if silo.clock < known.clock else known
        return learned

    def _refuses(self, meta: UpdateMeta, state: FspState, view: ClusterView) -> bool:
        late = meta.base_version < view.version
        return late and (self.late is Late.DROP or meta.base_version < state.fresh)

    def _awaited(self, idle: tuple[str, ...], number: int, view: ClusterView) -> frozenset[str]:
        if self.wait_for is None:
            return frozenset(idle)
        return frozenset(self.wait_for.sampling.choose(idle, self.wait_for.sample_size, view, round=number))

    def _steps(self, names: tuple[str, ...], view: ClusterView) -> dict[str, int]:
        return {
            name: max(math.ceil(self.passes * view.silos[name].facts.examples / view.work[name].batch_size), 1)
            for name in names
        }

    @staticmethod
    def _budgets(names: tuple[str, ...], seconds: float, state: FspState) -> dict[str, float]:
        """What is left of ``seconds`` for training; with nothing left it is still one step."""
        nothing = Overhead(0, 0.0)
        return {name: max(seconds - state.overheads.get(name, nothing).seconds, 0.0) for name in names}

    @staticmethod
    def _may_join(name: str, round: FspRound, state: FspState, view: ClusterView) -> bool:
        """Whether there is time for a step of a silo that has no order in this round."""
        forecast, overhead = view.silos[name].forecast, state.overheads.get(name)
        if name in round.members or forecast is None or overhead is None:
            return False
        left_s = round.deadline_s - view.now_s - overhead.seconds
        return left_s > 0 and left_s >= forecast.step_s(view.work[name].batch_size)


def _usual_overhead_s(names: tuple[str, ...], overheads: Mapping[str, Overhead]) -> float:
    """Median of what is known, 0 if that is nothing."""
    known = [overheads[name].seconds for name in names if name in overheads]
    return median(known) if known else 0.0


def _at_work(view: ClusterView) -> list[str]:
    """Silos that work from the current version."""
    return [name for name, silo in view.silos.items() if silo.order and silo.order.base_version == view.version]
