"""Evaluation results in ``rounds.jsonl``, ``summary.json`` and ``evaluation.json``.

A line of ``rounds.jsonl`` has the numbers of one version: pooled over all silos, and of each silo that evaluated it:

```json
{"evaluation": {"pooled": {"accuracy": 0.91, "loss": 0.3, "auroc": 0.95}, "silos": {"basel": {...}}}}
```

``summary.json`` has estimates by split and by model (last or best). Rounds are evaluated on the validation split, or on
the test split where no silo has a validation split:

```json
{"evaluation": {"higher_is_better": {"auroc": true, ...},
                "test": {"last": {"version": 12, "pooled": {"auroc": CELL}, "silos": {"basel": {"auroc": CELL}}},
                         "best": {...}}}}
```

CELL is ``{"value", "low", "high", "support"}``. ``value`` is null where it is undefined, such as the AUROC of a single
class. ``low`` and ``high`` are the ends of a 95 % interval; they are null below five samples of a class. ``support`` is
the number of samples by class, or under ``samples``. Sealed metrics have neither ``silos`` nor intervals.

``evaluation.json`` has the curves that reports draw, pooled over all silos, also by split and model. ``roc`` lists
false and true positive rates; ``calibration`` lists, for each span of scores, the mean score, the share of the class
and the number of samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from fedsync.common.errors import ConfigError
from fedsync.config.sections.evaluation import EvaluationConfig, higher_is_better
from fedsync.core.actions import Evaluate, KeepBest
from fedsync.core.events import Evaluated
from fedsync.core.orders import Evaluation, Score, Split, Subject
from fedsync.core.report_checks import usable
from fedsync.evaluation.metrics.metric_types import AnyMetric, SumsPool, number, statistics_of
from fedsync.evaluation.metrics.score_histograms import ScoreCounts
from fedsync.evaluation.version_scores import Scores, Settled

FILE, CROSS_SITE = "evaluation.json", "cross_site.json"
"""Files in a run's folder; for the second see `fedsync.extras.cross_site.cross_site_matrix`."""

Cell = dict[str, Any]

MOST_ESTIMATED = 100
"""Maximum number of silos with intervals of their own: an interval takes tens of milliseconds a silo."""

_SEED = 0


def metrics_of(config: Mapping[str, Any]) -> tuple[AnyMetric, ...] | None:
    """Return a run's metrics from the configuration in its journal; None if a metric is unknown here."""
    try:
        wanted = EvaluationConfig.model_validate(config.get("evaluation") or {}).wanted
        return wanted.metrics(lambda: ())
    except (ConfigError, ValidationError):
        return None


def cells(
    evaluations: Sequence[Evaluation], metrics: Sequence[AnyMetric], *, intervals: bool = True
) -> dict[str, Cell]:
    evaluations = _counted_once(evaluations)
    samples = sum(each.samples for each in evaluations)
    found: dict[str, Cell] = {}
    for name, told in (
        ("accuracy", [(each.correct, each.samples) for each in evaluations if each.correct is not None]),
        ("loss", [(each.loss, each.samples) for each in evaluations if each.loss is not None]),
    ):
        if told:
            total, count = sum(value for value, _ in told), sum(count for _, count in told)
            found[name] = _cell(total / count if count else None, {"samples": samples})
    pool = _pooled(evaluations, metrics)
    for metric in metrics:
        sums = pool.sums(metric.statistic.key)
        if sums is not None:
            low, high = (metric.interval(sums, _SEED) if intervals else None) or (None, None)
            support = dict(metric.support(sums)) or {"samples": samples}
            found[metric.name] = {"value": number(metric, sums), "low": low, "high": high, "support": support}
    return found


def _estimates(settled: Settled, metrics: Sequence[AnyMetric]) -> dict[str, Any]:
    score, found = settled.score, settled.found
    pooled = cells(list(found.values()), metrics) if found else {}
    # The accepted score is authoritative; sealed metrics have no other source.
    for name, value in score.numbers.items():
        pooled.setdefault(name, _cell(value, {}))
    estimated = len(found) <= MOST_ESTIMATED
    silos = {name: cells([each], metrics, intervals=estimated) for name, each in sorted(found.items())}
    return {"version": score.version, "pooled": pooled, "silos": silos}


@dataclass(slots=True)
class JudgedModels:
    """Evaluations of the last and the best version, on the split that rounds are evaluated on."""

    validates: bool = False
    _recent: dict[int, Settled] = field(default_factory=dict)
    _last: Settled | None = None
    _best: Settled | None = None

    def settle(self, versions: Sequence[Settled]) -> None:
        self._recent = {each.score.version: each for each in versions}
        self._last = versions[-1]

    def keep(self, best: KeepBest) -> None:
        found = self._recent.get(best.score.version)
        # A copy: later evaluations of the silos replace the entries of `found`.
        self._best = Settled(best.score, dict(found.found) if found is not None else {})

    def models(self) -> dict[tuple[Split, Subject], Settled]:
        split = Split.VALIDATION if self.validates else Split.TEST
        both = {Subject.LAST: self._last, Subject.BEST: self._best}
        return {(split, subject): settled for subject, settled in both.items() if settled is not None}


def summary(
    judged: Mapping[tuple[Split, Subject], Settled], metrics: Sequence[AnyMetric]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ``evaluation`` of ``summary.json``, and the content of ``evaluation.json``. ``judged`` has each model on
    each split; without the evaluations of single silos where metrics are sealed.
    """
    estimates: dict[str, Any] = {"higher_is_better": higher_is_better(metrics)}
    drawn: dict[str, Any] = {}
    for (split, subject), settled in judged.items():
        estimates.setdefault(split, {})[subject] = _estimates(settled, metrics)
        if lines := curves(settled.found, metrics):
            drawn.setdefault(split, {})[subject] = {"version": settled.score.version, "curves": lines}
    return estimates, drawn


def curves(found: Mapping[str, Evaluation], metrics: Sequence[AnyMetric]) -> dict[str, Any]:
    """Return ROC and calibration of pooled two-class scores; empty where no silo measured such scores."""
    pool = _pooled(_counted_once(list(found.values())), metrics)
    for metric in metrics:
        statistic = metric.statistic
        sums = pool.sums(statistic.key)
        if sums is not None and isinstance(statistic, ScoreCounts) and statistic.classes == 2:
            counts, own, scores = (part[0] for part in statistic.groups(sums))
            there = counts > 0
            calibration = zip(scores[there] / counts[there], own[there] / counts[there], counts[there], strict=True)
            return {
                "roc": [list(point) for point in statistic.roc(sums)],
                "calibration": [[float(score), float(share), int(count)] for score, share, count in calibration],
            }
    return {}


def _counted_once(evaluations: Sequence[Evaluation]) -> Sequence[Evaluation]:
    """Return a single evaluation if all are identical, to the last bit of the loss: they share one test split. Counting
    it once for each of n silos would make intervals too narrow, by the square root of n.
    """
    shared = len(evaluations) > 1 and evaluations[0].loss and all(each == evaluations[0] for each in evaluations)
    return evaluations[:1] if shared else evaluations


def _pooled(evaluations: Sequence[Evaluation], metrics: Sequence[AnyMetric]) -> SumsPool:
    known, pool = statistics_of(metrics), SumsPool()
    for each in evaluations:
        pool.add(each.sums, known)
    return pool


def _cell(value: float | None, support: Mapping[str, int]) -> Cell:
    return {"value": value, "low": None, "high": None, "support": dict(support)}


@dataclass(slots=True)
class FinalScores:
    """Final evaluations by model; no decision depends on them, see `fedsync.evaluation.final_evaluation`."""

    measured: tuple[AnyMetric, ...] | None = None
    _asked: dict[Subject, Evaluate] = field(default_factory=dict)
    _found: dict[Subject, dict[str, Evaluation | None]] = field(default_factory=dict)
    _attested: dict[Subject, Settled] = field(default_factory=dict)

    def ask(self, question: Evaluate) -> None:
        self._asked[question.subject] = question
        self._found[question.subject] = {}

    def answer(self, event: Evaluated) -> None:
        question = self._asked.get(event.subject)
        if question is not None and event.silo in question.silos and event.version == question.version:
            known = None if self.measured is None else Scores(self.measured).known
            self._found[event.subject].setdefault(event.silo, usable(event.silo, event.evaluation, known))

    def attest(self, subject: Subject, score: Score) -> None:
        self._attested[subject] = Settled(score, {})

    def of(self, subject: Subject) -> Settled | None:
        """Return score and evaluations of a model; None if no silo was asked, or no evaluation is usable."""
        if subject in self._attested:
            return self._attested[subject]
        if subject not in self._asked:
            return None
        scores, version, found = Scores(self.measured or ()), self._asked[subject].version, self._found[subject]
        scores.begin(version, max(len(found), 1))
        for silo, evaluation in found.items():
            scores.end(version, silo, evaluation)
        return next(iter(scores.settle()), None)

    def models(self) -> dict[tuple[Split, Subject], Settled]:
        found = {subject: self.of(subject) for subject in (Subject.LAST, Subject.BEST)}
        return {(Split.TEST, subject): settled for subject, settled in found.items() if settled is not None}

    def numbers(self, subject: Subject) -> Mapping[str, float] | None:
        settled = self.of(subject)
        return None if settled is None else settled.score.numbers

    def kept(self, best: Score | None, last: Score | None) -> dict[str, Any]:
        models: dict[str, Any] = {Subject.BEST: None, Subject.LAST: None}
        for subject, score in ((Subject.BEST, best), (Subject.LAST, last)):
            if score is not None:
                # If the best version is the last version, silos evaluated it only once.
                same = last is not None and score.version == last.version
                tested = self.numbers(Subject.LAST if same else subject)
                models[subject] = {"version": score.version, "metrics": dict(score.numbers), "test": tested}
        return models
