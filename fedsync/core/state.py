"""Policies and state of a run's coordinator, with the names of the state's parts in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import isfinite
from operator import attrgetter, index
from typing import TYPE_CHECKING, Any

from fedsync.common.errors import PolicyError
from fedsync.common.rng import Stream, derive_seed, draw, part_of
from fedsync.core.actions import Action, Commit, Note, WakeAt
from fedsync.core.extension import Extension, Extensions
from fedsync.core.orders import Evaluation, LocalWork, PooledFigures, Split, Subject, UpdateMeta, WorkOrder
from fedsync.core.protocols import AnyBarrier, AnyPredictor, Weigher
from fedsync.core.speed.forecasts import Forecasts
from fedsync.core.speed.sizing import Adaptation, Sizing
from fedsync.core.stopping import Leaders, StopRules
from fedsync.core.views import Roster, SiloView, Verdict
from fedsync.evaluation.metric_votes import Claims
from fedsync.evaluation.metrics.metric_types import AnyMetric
from fedsync.evaluation.version_scores import Leader, Scores, Selection, Settled

if TYPE_CHECKING:
    from fedsync.evaluation.local_baselines import CrossSite

MAX_FAILURES = 3
"""Number of consecutive failed orders of every silo after which the run is given up."""

MOST_FAILURES = 1000
"""The same limit while proven silos are away: with the pauses between orders, about a week of real time."""


@dataclass(frozen=True, slots=True)
class Policies:
    """All policies of a run, as values.

    Args:
        tally: largest number of silos in one sum of evaluations under sealed figures; 0 if each silo reports its own.
        evaluate: share of silos, drawn anew for each version, that evaluates the version; 0 for no evaluation.
        cross_site: models that each silo trains alone after the run, for comparison.
        controls: silos keep control variates, so commits have ``steps`` and ``stands_for``.
        least: smallest number of silos for a version; an operator cannot drop silos below this number.
        predicts: a policy uses forecasts; if False, speed reports are ignored unless a silo has an availability window.
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
        return () if self.cross_site is None else self.cross_site.subjects

    def evaluators(self, silos: Collection[str], version: int) -> Collection[str]:
        if self.evaluate == 1:
            return silos
        count = part_of(len(silos), self.evaluate, least=2) if self.evaluate else 0
        return draw(silos, count, self.seed, Stream.EVALUATION, version)

    def weighed(self, metas: Sequence[UpdateMeta], version: int, recent: Sequence[object]) -> Commit:
        coefficients = tuple(map(float, self.weigher.coefficients(metas, version)))
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
        stands_for = sum(weighting.weight(meta.examples, meta.samples, meta.precision) for meta in metas)
        return replace(commit, steps=steps, stands_for=stands_for)


@dataclass(slots=True)
class FailurePolicy:
    """Rule that ends a run whose silos keep failing. ``proven`` silos have delivered an update, and may return."""

    proven: set[str] = field(default_factory=set)
    last_failure: str = ""

    def able(self, silos: Mapping[str, SiloView], least: int) -> bool:
        """Whether the connected silos can make a version: ``least`` of them do not fail, or none fails."""
        working = sum(1 for _ in islice((silo for silo in silos.values() if silo.failures < MAX_FAILURES), least))
        return working >= least or 0 < working == len(silos)

    def hopeless(self, silos: Mapping[str, SiloView], least: int) -> str | None:
        """Return the reason to give up the run, or None: too many connected silos fail, and no others are expected."""
        if not silos or self.able(silos, least) or any(silo.busy for silo in silos.values()):
            return None
        failing = [silo.failures for silo in silos.values() if silo.failures >= MAX_FAILURES]
        if min(failing) < MOST_FAILURES and not self.proven <= silos.keys():
            return None
        who = "every silo" if len(failing) == len(silos) else f"{len(failing)} of {len(silos)} silos"
        why = "" if len(failing) == len(silos) else f", and an encrypted sum needs {least} silos"
        return f"{who} failed {MAX_FAILURES} orders in a row{why}; the last: {self.last_failure}"


@dataclass(slots=True)
class CoordinatorState:
    """Whole state of a run. Picklable.

    Args:
        forecasts: forecasts of all silos that ever joined.
        version: model version; raised by commits and rollbacks.
        found_caps: largest batch that worked after running out of memory, by silo.
        leaders: best versions by each rule of the run.
        claims: pooled figures by silo under sealed figures; see `fedsync.evaluation.metric_votes`.
        pending_evaluations: silos whose evaluation-only update is pending; see `fedsync.evaluation.final_evaluation`.
        scoring_ids: update id of each silo's evaluation-only order of the present question. A repeated order has the
            same id, because a silo sends the evaluation of a model in one update only.
        questions_asked: number of questions of the final evaluation that were asked or skipped.
        sums_ordered: number of these questions whose encrypted sums were ordered or skipped, under sealed figures.
        final_version: version at the end of training.
        awaiting: silos that have not answered the newest question of the final evaluation.
        halted: update id of the last halted order, by silo.
        alarms: times at which the barrier is called again, earliest last.
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
    claims: Claims = field(default_factory=Claims)
    failures: FailurePolicy = field(default_factory=FailurePolicy)
    extensions: Extensions = field(default_factory=Extensions)
    closing: str | None = None
    pending_evaluations: set[str] = field(default_factory=set)
    scoring_ids: dict[str, str] = field(default_factory=dict)
    questions_asked: int = 0
    sums_ordered: int = 0
    final_version: int = -1
    awaiting: set[str] = field(default_factory=set)
    halted: dict[str, str] = field(default_factory=dict)
    alarms: list[float] = field(default_factory=list)
    alarm_set: bool = False
    begun_s: float | None = None
    stopped: bool = False

    @property
    def best(self) -> Leader:
        return self.leaders.best

    def order_of(self, name: str, update_id: str) -> WorkOrder | None:
        silo = self.silos.get(name)
        order = silo.order if silo is not None else None
        return order if order is not None and order.update_id == update_id else None

    def wake_by(self, at_s: float | None, now_s: float, actions: list[Action]) -> None:
        alarms = self.alarms
        while alarms and alarms[-1] <= now_s:
            alarms.pop()
        if at_s is not None and not (alarms and alarms[-1] <= at_s):
            alarms.append(at_s)
            actions.append(WakeAt(at_s))

    def attest(self, name: str, claims: Sequence[PooledFigures], policies: Policies, actions: list[Action]) -> None:
        if not claims:
            return
        newest = max(self.claims.believed, default=-1)
        for figures in self.claims.hear(name, claims, len(self.silos), self.version, actions):
            judged = figures.score if figures.split is Split.VALIDATION else None
            if judged is not None and self.scores.attest(judged):
                self.judge(policies, [Settled(judged, {})], actions)
            if figures.best is not None and figures.version > newest:
                # Silos choose the best version: the server may have a score of a version whose model they lack.
                best = self.leaders.best.told(policies.selection, figures.best)
                self.leaders = replace(self.leaders, best=best)

    def judge(self, policies: Policies, settled: Iterable[Settled], actions: list[Action]) -> None:
        stop, known = policies.stop, self.best.problem
        rules = policies.selection, None if stop.target is None else stop.target.rule, stop.steady
        for each in settled:
            if each.counts:
                self.leaders = self.leaders.after(rules, each.score, each.found, policies.metrics)
        if self.best.problem != known:
            actions.append(Note(self.best.problem))

    def next_order(
        self, name: str, work: LocalWork, verdict: Verdict, seed: int, *, evaluate: bool = True
    ) -> WorkOrder:
        serial = self.issued[name] = self.issued.get(name, 0) + 1
        least = -(-self.silos[name].facts.least_samples // work.batch_size)
        return WorkOrder(
            f"{name}/{serial}",
            self.version,
            serial,
            work.batch_size,
            max(index(verdict.steps.get(name, work.steps)), min(least, work.steps)),
            work.learning_rate,
            derive_seed(seed, Stream.ORDER, name, serial),
            verdict.budget_s.get(name),
            verdict.overrun,
            evaluate=evaluate,
        )

    @property
    def evaluated(self) -> bool:
        waiting = any(meta.base_version == self.version for meta in self.pending.values())
        return waiting or self.scores.under_way(self.version)

    def due(self, policies: Policies, now_s: float) -> str | None:
        rules, waits = policies.stop, policies.tally and self.evaluated
        if waits:
            rules = StopRules(seconds=rules.seconds)
        passed_s = 0.0 if self.begun_s is None else now_s - self.begun_s
        ends = rules.decide(self.commits, passed_s, self.scores, self.leaders)
        return self.extensions.stops(now_s) if ends is None and not waits else ends

    def end_evaluation(self, version: int, name: str, evaluation: Evaluation | None) -> None:
        if self.closing is None:
            self.scores.end(version, name, evaluation)


Names = Mapping[str, str]
"""Name -> attribute path, with dots for nested attributes."""


def named(value: object, names: Names) -> dict[str, Any]:
    """Return the attributes of ``value`` by name. Not copied, so serialise them at once."""
    return {name: attrgetter(path)(value) for name, path in names.items()}


def fill(value: object, names: Names, saved: Mapping[str, Any]) -> None:
    for name, path in names.items():
        owner, _, attribute = path.rpartition(".")
        setattr(attrgetter(owner)(value) if owner else value, attribute, saved[name])


# After renaming an attribute, change the right-hand side; old checkpoints stay readable. State of policies is stored
# unchanged.
COORDINATOR: Names = {
    **{
        name: name
        for name in (
            *("version", "commits", "pending", "barrier", "found_caps", "issued", "leaders"),
            *("closing", "pending_evaluations", "scoring_ids", "questions_asked", "sums_ordered", "final_version"),
            *("awaiting", "halted", "alarms", "alarm_set", "begun_s", "stopped"),
            *("adaptation.state", "adaptation.version", "silos.views", "silos.idle", "silos.revision"),
            *("scores.best", "scores.since_best", "scores.settled"),
            *("claims.said", "claims.believed", "claims.disputed", "failures.proven"),
        )
    },
    "forecasts.predictors": "forecasts._states",
    "forecasts.declared": "forecasts._declared",
    "forecasts.drivers": "forecasts._drivers",
    "forecasts.samples": "forecasts._samples",
    "forecasts.last": "forecasts._last",
    "forecasts.fits": "forecasts._curves._fits",
    "forecasts.overheads": "forecasts._curves._overheads",
    "adaptation.seconds": "adaptation._seconds",
    "adaptation.memory": "adaptation._memory",
    "silos.ranks": "silos._ranks",
    "silos.joined": "silos._joined",
    "scores.open": "scores._open",
    "scores.done": "scores._done",
    "scores.newest": "scores._newest",
    "scores.rolling": "scores._rolling",
    "failures.last": "failures.last_failure",
}
"""Checkpointed attributes of `fedsync.core.state.CoordinatorState`."""
