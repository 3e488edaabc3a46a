"""What a coordinator is made of: the policies that decide, and the state that they decide on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import isfinite
from typing import TYPE_CHECKING, Any

from fedsync.common.errors import PolicyError
from fedsync.common.rng import Stream, derive_seed, draw, part_of
from fedsync.core.actions import Action, Commit, WakeAt
from fedsync.core.extension import Extension, Extensions
from fedsync.core.orders import Evaluation, LocalWork, PooledFigures, Split, Subject, UpdateMeta, WorkOrder
from fedsync.core.protocols import AnyBarrier, AnyPredictor, Weigher
from fedsync.core.roster import Roster
from fedsync.core.speed.forecasts import Forecasts
from fedsync.core.speed.sizing import Adaptation, Sizing
from fedsync.core.stopping import Leaders, Passes, StopRules
from fedsync.core.views import SiloView, Verdict
from fedsync.evaluation.best_version import Leader, Selection
from fedsync.evaluation.metric_votes import Claims
from fedsync.evaluation.metrics.metric_types import AnyMetric
from fedsync.evaluation.version_scores import Scores, Settled

if TYPE_CHECKING:
    from fedsync.evaluation.local_baselines import CrossSite

MAX_FAILURES = 3
"""Orders that every silo must fail in a row before the run is given up."""

MOST_FAILURES = 1000
"""The same while silos are away that have worked: with the rests between them, a week of real time."""


@dataclass(frozen=True, slots=True)
class Policies:
    """Everything that decides, as values.

    Args:
        seed: of the run.
        predictor: forecasts a silo's speed.
        sizing: turns forecasts into batch sizes, steps and learning rates.
        barrier: decides commits and releases.
        weigher: gives the updates of a commit their coefficients.
        stop: when the run has done enough.
        declared_speeds: take speeds from what silos declare instead of measuring them.
        tally: most silos whose evaluations one sum takes, where figures are sealed; 0 where each silo tells its own.
        evaluate: part of the silos that evaluates a version, drawn for each; 0 has nobody evaluate anything.
        metrics: numbers that are worked out of what silos sum at an evaluation.
        selection: which version is the best.
        cross_site: what silos train apart when training is over; None for nothing.
        controls: silos keep control variates, so that commits say what is behind them.
        least: silos that a version needs; an operator has to leave so many in the run.
        extensions: what builds each optional feature of the run.
        predicts: something goes by forecasts; off, reports of speed are not looked at unless a silo has a window.
    """

    seed: int
    predictor: AnyPredictor
    sizing: Sizing
    barrier: AnyBarrier
    weigher: Weigher
    stop: StopRules
    declared_speeds: bool = False
    tally: int = 0
    evaluate: float = 1.0
    metrics: tuple[AnyMetric, ...] = ()
    selection: Selection = field(default_factory=Selection)
    cross_site: CrossSite | None = None
    controls: bool = False
    least: int = 1
    extensions: tuple[Callable[[], Extension | None], ...] = ()
    predicts: bool = True

    @property
    def apart(self) -> tuple[Subject, ...]:
        """What silos train apart when training is over, one after the other."""
        return () if self.cross_site is None else self.cross_site.subjects

    def evaluators(self, silos: Collection[str], version: int) -> Collection[str]:
        """Those of the silos that evaluate a version if they get it: their part rounded down, and two at least."""
        if self.evaluate == 1:
            return silos
        count = part_of(len(silos), self.evaluate, least=2) if self.evaluate else 0
        return draw(silos, count, self.seed, Stream.EVALUATION, round=version)

    def weighed(self, metas: Sequence[UpdateMeta], version: int, recent: Sequence[object]) -> Commit:
        """The commit of these updates, which makes ``version``.

        Raises:
            PolicyError: the weigher broke its contract; shows the ``recent`` entries of the journal.
        """
        coefficients = tuple(self.weigher.coefficients(metas, version))
        if len(coefficients) != len(metas):
            raise PolicyError(f"the weigher gives {len(metas)} updates {len(coefficients)} coefficients", recent)
        weights = {meta.update_id: weight for meta, weight in zip(metas, coefficients, strict=True)}
        for update_id, weight in weights.items():
            if not (isfinite(weight) and weight > 0):
                raise PolicyError(f"the weigher gives {update_id!r} the coefficient {weight}", recent)
        commit = Commit(version, weights, self.weigher.toward)
        weighting = self.weigher.weighting if self.controls else None
        if weighting is None:
            return commit
        steps = sum(weights[meta.update_id] * meta.steps for meta in metas)
        return replace(
            commit, steps=steps, stands_for=sum(weighting.weight(meta.examples, meta.samples) for meta in metas)
        )


@dataclass(slots=True)
class FailurePolicy:
    """Who has worked, and what went wrong last.

    Args:
        proven: silos that have delivered an update; those that are away may come back.
        last_failure: of an order, or of what a silo said of itself.
    """

    proven: set[str] = field(default_factory=set)
    last_failure: str = ""

    def able(self, silos: Mapping[str, SiloView], least: int) -> bool:
        """Whether a version can come of the silos here: ``least`` do not fail, or none of them does.

        It is asked at every decision, so it looks no further than it must.
        """
        working = sum(1 for _ in islice((silo for silo in silos.values() if silo.failures < MAX_FAILURES), least))
        return working >= least or 0 < working == len(silos)

    def hopeless(self, silos: Mapping[str, SiloView], least: int) -> str | None:
        """The reason to give the run up, or None: too many of the silos here fail, and no others are expected."""
        if not silos or self.able(silos, least) or any(silo.busy for silo in silos.values()):
            return None
        failing = _failing(silos)
        if min(failing) < MOST_FAILURES and not self.proven <= silos.keys():
            return None
        who = "every silo" if len(failing) == len(silos) else f"{len(failing)} of {len(silos)} silos"
        why = "" if len(failing) == len(silos) else f", and an encrypted sum needs {least} silos"
        return f"{who} failed {MAX_FAILURES} orders in a row{why}; the last: {self.last_failure}"


def _failing(silos: Mapping[str, SiloView]) -> list[int]:
    """Failures in a row of the silos that fail all that they are asked."""
    return [silo.failures for silo in silos.values() if silo.failures >= MAX_FAILURES]


@dataclass(slots=True)
class CoordinatorState:
    """All that a run has come to; it pickles.

    Args:
        forecasts: of all silos that were ever here.
        adaptation: how sizes have adapted.
        version: of the model; raised by commits and rollbacks.
        commits: made.
        silos: that are here.
        pending: updates that wait for a commit, by id.
        barrier: the barrier's own.
        found_caps: largest batch that a silo ran with after one did not fit, by name.
        issued: orders given to each silo.
        scores: of model versions.
        leaders: best versions by what the run goes by.
        passes: of the silos over their data.
        claims: of silos, where figures are sealed.
        failures: what may be expected of the silos.
        extensions: optional features, by name.
        closing: why the run is about to end.
        owing: silos whose update that only scores is still to come; see `fedsync.evaluation.final_evaluation`.
        asked: questions of the end that silos were asked, or were not worth asking.
        summed: those of them for whose sums orders went out, where figures are sealed.
        final: version that training ended with.
        awaiting: silos that are still to answer the last of them.
        halted: the order of each silo that was told to stop last.
        alarms: when the barrier is to be asked again, the earliest last: each one set was earlier than those before.
        timed: the end by time is on the clock.
        stopped: `Stop` was given.
    """

    forecasts: Forecasts
    adaptation: Adaptation
    version: int = 0
    commits: int = 0
    silos: Roster = field(default_factory=Roster)
    pending: dict[str, UpdateMeta] = field(default_factory=dict)
    barrier: Any = None
    found_caps: dict[str, int] = field(default_factory=dict)
    issued: dict[str, int] = field(default_factory=dict)
    scores: Scores = field(default_factory=Scores)
    leaders: Leaders = field(default_factory=Leaders)
    passes: Passes = field(default_factory=Passes)
    claims: Claims = field(default_factory=Claims)
    failures: FailurePolicy = field(default_factory=FailurePolicy)
    extensions: Extensions = field(default_factory=Extensions)
    closing: str | None = None
    owing: set[str] = field(default_factory=set)
    asked: int = 0
    summed: int = 0
    final: int = -1
    awaiting: set[str] = field(default_factory=set)
    halted: dict[str, str] = field(default_factory=dict)
    alarms: list[float] = field(default_factory=list)
    timed: bool = False
    stopped: bool = False

    @property
    def best(self) -> Leader:
        """The version that is kept."""
        return self.leaders.best

    def order_of(self, name: str, update_id: str) -> WorkOrder | None:
        """The order in work at the silo ``name``, if it is the one that ``update_id`` answers."""
        silo = self.silos.get(name)
        order = silo.order if silo is not None else None
        return order if order is not None and order.update_id == update_id else None

    def answered(self, name: str, update_id: str) -> WorkOrder | None:
        """As `order_of`, of a silo that has answered: the queued order, where it answers that first, is in work now."""
        silo = self.silos.get(name)
        if silo is not None and silo.queued is not None and silo.queued.update_id == update_id:
            self.silos[name] = replace(silo, order=silo.queued, queued=silo.order, progress_steps=0)
        return self.order_of(name, update_id)

    def wake_by(self, at_s: float | None, now_s: float, actions: list[Action]) -> None:
        """Have the barrier asked again then, unless it will be anyway: an alarm is set that goes off no later."""
        alarms = self.alarms
        while alarms and alarms[-1] <= now_s:
            alarms.pop()
        if at_s is not None and not (alarms and alarms[-1] <= at_s):
            alarms.append(at_s)
            actions.append(WakeAt(at_s))

    def attest(self, name: str, claims: Sequence[PooledFigures], policies: Policies, actions: list[Action]) -> None:
        """A silo tells what silos found together; what is believed now counts for scores and stop rules."""
        if not claims:
            return
        newest = max(self.claims.believed, default=-1)
        for figures in self.claims.hear(name, claims, len(self.silos), self.version, actions):
            if figures.loss is not None:
                self.passes.attest(figures.loss)
            judged = figures.score if figures.split is Split.VALIDATION else None
            if judged is not None and self.scores.attest(judged):
                self.judge(policies, [Settled(judged, {})])
            if figures.best is not None and figures.version > newest:
                # Silos choose: of a score that is of several versions, they may have none of the models.
                best = self.leaders.best.told(policies.selection, figures.best)
                self.leaders = replace(self.leaders, best=best)

    def judge(self, policies: Policies, settled: Iterable[Settled]) -> None:
        """See whether one of these versions is the best."""
        stop = policies.stop
        rules = policies.selection, None if stop.target is None else stop.target.rule, stop.steady
        for each in settled:
            self.leaders = self.leaders.after(rules, each.score, each.found, policies.metrics)

    def next_order(
        self, name: str, work: LocalWork, verdict: Verdict, seed: int, *, evaluate: bool = True
    ) -> WorkOrder:
        """A new order for a silo, behind the one that it has in work; from the newest version.

        ``seed`` is that of the run.
        """
        serial = self.issued[name] = self.issued.get(name, 0) + 1
        silo = self.silos[name]
        first, least = silo.order, -(-silo.facts.least_samples // work.batch_size)
        return WorkOrder(
            f"{name}/{serial}",
            self.version,
            serial,
            work.batch_size,
            max(verdict.steps.get(name, work.steps), min(least, work.steps)),
            work.learning_rate,
            derive_seed(seed, Stream.ORDER, name, serial),
            verdict.budget_s.get(name),
            verdict.overrun,
            evaluate=evaluate,
            behind="" if first is None else first.update_id,
            carry=verdict.carry,
        )

    @property
    def evaluated(self) -> bool:
        """Whether silos have evaluated the newest version for an update that is in work or waits for its commit."""
        waiting = any(meta.base_version == self.version for meta in self.pending.values())
        return waiting or self.scores.under_way(self.version)

    def due(self, policies: Policies, now_s: float) -> str | None:
        """Why the run should end now; None if it should go on."""
        rules, waits = policies.stop, policies.tally and self.evaluated
        if waits:
            rules = StopRules(seconds=rules.seconds)
        ends = rules.decide(self.commits, now_s, self.scores, self.passes, self.leaders)
        return self.extensions.stops(now_s) if ends is None and not waits else ends

    def end_evaluation(self, version: int, name: str, evaluation: Evaluation | None) -> None:
        """An order's evaluation of its base is in; at the end of a run every silo is asked anyway."""
        if self.closing is None:
            self.scores.end(version, name, evaluation)
