"""Flexible synchronous parallel (FSP): rounds of a fixed time instead of a fixed number of steps.

BSP fixes the work of a round, and the slowest silo sets its duration. FSP fixes the duration: every silo trains until
the interval ends. Fast silos then do more steps, for which the aggregation must correct (FedNova).

Between two decisions, only time and arrivals change the state of a round:

| state | event | decision | next |
|---|---|---|---|
| no round | a silo is idle | all idle silos get an order, with a budget that ends at the deadline | open |
| open, before the deadline | all updates are in | commit | no round |
| open, before the deadline | a silo has finished its data | the other silos are told to stop | open, halted |
| open, before the deadline | a silo arrives that has time for a step | the silo joins | open |
| after the deadline | the updates of the ``wait_for`` silos are in | commit | no round |
| after ``grace`` | overhead is known of each missing silo | commit; the missing silos are late | no round |
| open | no silo is busy, and no update is from this round | | no round |

A late update joins the next commit or is discarded (`Late`). A rollback discards updates that began before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Annotated, Any

from annotated_types import Ge

from fedsync.common.errors import ConfigError
from fedsync.core.orders import UpdateMeta, mean_loss
from fedsync.core.views import ClusterView, Verdict
from fedsync.policies.barrier.barrier_base import BarrierPolicy
from fedsync.policies.barrier.intervals import IntervalPolicy, IntervalRound
from fedsync.policies.barrier.kinds.sampled import Sampling
from fedsync.policies.schema import Choice, Chosen, Count, PartOfOne, Positive, Settings, Share, register


class Late(Choice):
    """Treatment of an update that started from an older version than the current one.

    ``drop`` discards it, ``next`` adds it to the next commit, ``stale`` does the same and needs a discount by
    staleness.
    """

    DROP = "drop"
    NEXT = "next"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class WaitFor(Settings):
    """Sample of silos that a round waits for after its deadline."""

    sample_size: Count
    """Number of silos that the round waits for after the deadline; 0 commits at the deadline."""

    sampling: Sampling = Sampling.DYNAMIC
    """Method of drawing these silos each round: ``basic`` always draws the same silos, ``dynamic`` draws new ones,
    ``grouped`` draws half from the fast and half from the slow silos."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """Time of one silo's order besides training: moving average over ``orders`` orders, without the first once there is
    a second [s]. ``clock`` is `SiloView.clock` at the last measurement.
    """

    clock: int
    seconds: float
    orders: int = 1


@dataclass(frozen=True, slots=True)
class FspRound:
    """Round in progress; times are on the clock of `ClusterView.now_s`.

    Args:
        patience_s: time at which missing updates of silos with a known overhead are late.
        members: silos that got an order in the round.
        awaited: members to wait for after the deadline.
    """

    begin_s: float
    deadline_s: float
    patience_s: float
    members: frozenset[str]
    awaited: frozenset[str]
    halted: bool = False


@dataclass(frozen=True, slots=True)
class FspState:
    """State of `Fsp`. ``round`` is None between two rounds. ``fresh`` is the least version that an update may start
    from; older updates are from before a rollback.
    """

    interval: Any
    round: FspRound | None = None
    overheads: Mapping[str, Overhead] = field(default_factory=dict)
    rounds: int = 0
    fresh: int = 0


@register("fsp")
@dataclass(frozen=True, slots=True)
class Fsp(BarrierPolicy[FspState]):
    """Barrier with rounds of a fixed time, in which each silo does as many steps as it can.

    Coordination is semi-centralised: a silo stops by itself after ``interval - delta_i``, so that all updates arrive
    together at ``interval``. The silo's overhead delta_i (start, transfer, evaluation...) is an exponential moving
    average over its orders. The first order starts processes and loads data, so the second measurement replaces it. The
    last step may exceed the budget by ``overrun`` of its length; at 0.5, overshoot and undershoot balance.

    An interval that overhead would fill is stretched to twice the median overhead of the idle silos. Otherwise every
    order would be one step, and late.

    A silo that never finished an order has no known delta_i, so the round waits for it, even after ``grace``.

    An order covers at most ``passes`` over the silo's data: more steps from the same parameters are of little use. (The
    paper computes gradients at fixed parameters, so a second pass is redundant; local steps move the parameters, so
    ``passes`` may exceed 1.)

    A silo that arrives late joins the current round if there is time for a step, else the next round. A silo that
    failed, or whose speed is unknown, joins the next round.

    Source: FSP, sections 3.1, 3.3 and 5.2; ``wait_for`` is PSP's sampling (section 10.4.1) of a commit.
    """

    interval: Annotated[IntervalPolicy[Any], Chosen("interval")]
    """Policy that sets the length of each round."""

    overrun: PartOfOne = 0.5
    """Share of its last step by which a silo may exceed its time budget."""

    grace: Annotated[float, Ge(0)] = 0.5
    """Wait for missing silos after the deadline, as a share of the interval."""

    passes: Positive = 1.0
    """Most passes over its data that a silo makes in one round. The first silo to finish them ends the round."""

    late: Late = Late.NEXT
    """Treatment of late updates: ``drop`` discards them, ``next`` adds them to the next commit, ``stale`` does the same
    and requires a discount for staleness. Updates from before a rollback are always discarded."""

    wait_for: WaitFor | None = None
    """Sample of silos to wait for after the deadline. Default: all silos of the round."""

    smoothing: Share = 0.5
    """Weight of the newest measurement in the moving average of a silo's overhead."""

    sets_steps = True
    needs_examples = True

    def __post_init__(self) -> None:
        if self.wait_for is not None and self.late is Late.DROP:
            raise ValueError("late 'drop' discards the updates that wait_for does not wait for; write late: next")

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
        state = replace(state, overheads=self._learned(state.overheads, view))
        fit = [meta for meta in view.pending.values() if meta.base_version == view.version]
        late = [meta for meta in view.pending.values() if meta.base_version < view.version]
        refused = tuple(m.update_id for m in late if self.late is Late.DROP or m.base_version < state.fresh)
        out = _at_work(view)
        if state.round is None or not (fit or out):
            return self._begin(state, view, refused)
        why = self._over(state.round, state.overheads, out, view.now_s) if fit else None
        if why is not None:
            return self._close(state, state.round, view, fit, refused, why)
        return self._go_on(state, state.round, view, fit, refused, out)

    # The decisions.

    def _begin(self, state: FspState, view: ClusterView, refused: tuple[str, ...]) -> tuple[FspState, Verdict]:
        idle = view.idle
        state = replace(state, round=None)
        if not idle:
            return state, Verdict(discard=refused, reason="nobody is idle" if view.silos else "no silo is here")
        attempt = self.interval.attempt(state.interval)
        overheads_s = [state.overheads[name].seconds for name in idle if name in state.overheads]
        interval_s = max(attempt.interval_s, 2 * median(overheads_s or [0.0]))
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
        """Commit the round's updates and accepted late ones; the interval policy learns only from the round's own."""
        left_out = set(refused)
        commit = tuple(update_id for update_id in view.pending if update_id not in left_out)
        costs = [state.overheads[meta.silo].seconds for meta in fit if meta.silo in state.overheads]
        loss = mean_loss(fit)
        if loss is None and self.needs_losses and state.rounds <= 1:
            remedy = "Have training report its loss, as by work.log(loss=loss), or write interval: {kind: fixed}"
            raise ConfigError("barrier.interval", "goes by the loss of each round, which no silo reports", remedy)
        seen = IntervalRound(
            seconds=max(view.now_s - round.begin_s, 1e-9),
            cost_s=sum(costs) / len(costs) if costs else 0.0,
            loss=loss or 0.0,
        )
        learns = loss is not None or not self.needs_losses  # a later round without losses is no reason to fail
        interval = self.interval.observe(state.interval, seen) if learns else state.interval
        after = replace(state, round=None, interval=interval)
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
        done = next((meta.silo for meta in fit if meta.samples >= self.passes * meta.examples), None)
        halt = done is not None and not round.halted
        # A silo that joined and left, or joined again, skips the rest of the round.
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
        if not out:
            return "all are in"
        if now_s >= round.deadline_s and self.wait_for is not None and round.awaited.isdisjoint(out):
            return f"those waited for are in, {len(out)} are not"
        if now_s >= round.patience_s and all(name in overheads for name in out if name in round.awaited):
            return f"{len(out)} are late"
        return None

    def _next(self, now_s: float, round: FspRound) -> float | None:
        instants = (round.patience_s,) if self.wait_for is None else (round.deadline_s, round.patience_s)
        return next((at_s for at_s in instants if at_s > now_s), None)

    # Parts of orders.

    def _learned(self, overheads: Mapping[str, Overhead], view: ClusterView) -> dict[str, Overhead]:
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

    def _awaited(self, idle: tuple[str, ...], number: int, view: ClusterView) -> frozenset[str]:
        if self.wait_for is None:
            return frozenset(idle)
        return frozenset(self.wait_for.sampling.choose(idle, self.wait_for.sample_size, view, number))

    def _steps(self, names: tuple[str, ...], view: ClusterView) -> dict[str, int]:
        return {
            name: max(math.ceil(self.passes * view.silos[name].facts.examples / view.work[name].batch_size), 1)
            for name in names
        }

    @staticmethod
    def _budgets(names: tuple[str, ...], seconds: float, state: FspState) -> dict[str, float]:
        nothing = Overhead(0, 0.0)
        return {name: max(seconds - state.overheads.get(name, nothing).seconds, 0.0) for name in names}

    @staticmethod
    def _may_join(name: str, round: FspRound, state: FspState, view: ClusterView) -> bool:
        forecast, overhead = view.silos[name].forecast, state.overheads.get(name)
        if name in round.members or forecast is None or overhead is None:
            return False
        left_s = round.deadline_s - view.now_s - overhead.seconds
        return left_s > 0 and left_s >= forecast.step_s(view.work[name].batch_size)


def _at_work(view: ClusterView) -> list[str]:
    return [name for name, silo in view.silos.items() if silo.order and silo.order.base_version == view.version]
