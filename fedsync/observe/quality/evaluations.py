"""What evaluations come to, for the books: in ``rounds.jsonl``, in ``summary.json`` and in ``evaluation.json``.

A line of ``rounds.jsonl`` has, of the version, the numbers of all silos together and of each silo that evaluated it:

```json
{"evaluation": {"pooled": {"accuracy": 0.91, "loss": 0.3, "auroc": 0.95}, "silos": {"basel": {...}}}}
```

``summary.json`` has estimates, by split and by which model it is, last or best; rounds are evaluated on the validation
split, or where no silo holds one out, on the test split:

```json
{"evaluation": {"higher_is_better": {"auroc": true, ...},
                "test": {"last": {"version": 12, "pooled": {"auroc": CELL}, "silos": {"basel": {"auroc": CELL}}},
                         "best": {...}}}}
```

CELL is ``{"value", "low", "high", "support"}``. ``value`` is null where there is none, as the AUROC of one class alone;
``low`` and ``high``, the ends of a 95 % interval, are null where it cannot be estimated: below five samples of a class.
``support`` is the number of samples by class, or as ``samples``. Sealed, there are no ``silos``, and no intervals.

``evaluation.json`` has what is drawn, of all silos together, likewise by split and model: in ``curves``, ``roc`` with
false and true positive rates, and ``calibration`` with the mean score of a span, the share of the class, and samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from fedsync.common.errors import ConfigError
from fedsync.config.sections.evaluation import EvaluationConfig
from fedsync.core.actions import KeepBest
from fedsync.core.orders import Evaluation, Split, Subject
from fedsync.evaluation.metrics.metric_types import AnyMetric, number, statistics_of
from fedsync.evaluation.metrics.pool import SumsPool
from fedsync.evaluation.metrics.score_histograms import ScoreCounts
from fedsync.evaluation.version_scores import Settled

FILE = "evaluation.json"

Cell = dict[str, Any]

MOST_ESTIMATED = 100
"""Silos up to which each has intervals: they take tens of milliseconds a silo."""

_SEED = 0
_PLAIN = {"accuracy": True, "loss": False}
"""Figures that every evaluation has, and whether more is better."""


def metrics_of(config: Mapping[str, Any]) -> tuple[AnyMetric, ...] | None:
    """Metrics of a run whose configuration, as plain values, is in its journal; None where they are not known here."""
    try:
        wanted = EvaluationConfig.model_validate(config.get("evaluation") or {}).wanted
        return wanted.metrics(lambda: ())
    except (ConfigError, ValidationError):
        return None


def higher_is_better(metrics: Sequence[AnyMetric]) -> dict[str, bool]:
    """Of every figure that an evaluation has."""
    return {**_PLAIN, **{metric.name: metric.higher_is_better for metric in metrics}}


def cells(
    evaluations: Sequence[Evaluation], metrics: Sequence[AnyMetric], *, intervals: bool = True
) -> dict[str, Cell]:
    """Estimates by name, of all these evaluations together."""
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
    """What there is to say of one model; of a score that silos attest, its numbers."""
    score, found = settled.score, settled.found
    pooled = cells(list(found.values()), metrics) if found else {}
    # What was believed is what counts: sealed there is nothing else.
    for name, value in score.numbers.items():
        pooled.setdefault(name, _cell(value, {}))
    estimated = len(found) <= MOST_ESTIMATED
    silos = {name: cells([each], metrics, intervals=estimated) for name, each in sorted(found.items())}
    return {"version": score.version, "pooled": pooled, "silos": silos}


@dataclass(slots=True)
class JudgedModels:
    """What was found of the last version and of the best, on the split that rounds are evaluated on.

    Args:
        validates: some silo holds out a validation split.
    """

    validates: bool = False
    _recent: dict[int, Settled] = field(default_factory=dict)
    _last: Settled | None = None
    _best: Settled | None = None

    def settle(self, versions: Sequence[Settled]) -> None:
        """These versions have their scores, oldest first."""
        self._recent = {each.score.version: each for each in versions}
        self._last = versions[-1]

    def keep(self, best: KeepBest) -> None:
        """One of those that were settled last is the best."""
        found = self._recent.get(best.score.version)
        # Silos go on evaluating, and what each found last is replaced.
        self._best = Settled(best.score, dict(found.found) if found is not None else {})

    def models(self) -> dict[tuple[Split, Subject], Settled]:
        """By split and subject."""
        split = Split.VALIDATION if self.validates else Split.TEST
        both = {Subject.LAST: self._last, Subject.BEST: self._best}
        return {(split, subject): settled for subject, settled in both.items() if settled is not None}


def summary(
    judged: Mapping[tuple[Split, Subject], Settled], metrics: Sequence[AnyMetric]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """``evaluation`` of ``summary.json``, and what ``evaluation.json`` has.

    Args:
        judged: each model on each split; nothing of what each silo found, where that is sealed.
        metrics: of the run.
    """
    estimates: dict[str, Any] = {"higher_is_better": higher_is_better(metrics)}
    drawn: dict[str, Any] = {}
    for (split, subject), settled in judged.items():
        estimates.setdefault(split, {})[subject] = _estimates(settled, metrics)
        if lines := curves(settled.found, metrics):
            drawn.setdefault(split, {})[subject] = {"version": settled.score.version, "curves": lines}
    return estimates, drawn


def curves(found: Mapping[str, Evaluation], metrics: Sequence[AnyMetric]) -> dict[str, Any]:
    """What is drawn of the pooled scores of two classes; empty where nobody measured them."""
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
    """One of them, if all found the very same, to the last bit of their losses.

    Then they share one test split, as silos do to whom a shipped task deals a data set. Counted for each of n silos it
    would make intervals narrower by the root of n.
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
