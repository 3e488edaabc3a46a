"""Cross-site matrix, the scores of each model at each silo: ``cross_site.json`` in the run's folder.

Rows are models, columns are silos; a cell is the score of one model on one silo's test samples:

```json
{"split": "test",
 "silos": ["basel", "bern"],
 "models": [{"subject": "last", "silo": null, "version": 12},
            {"subject": "best", "silo": null, "version": 9},
            {"subject": "local", "silo": "basel", "samples": 7680},
            {"subject": "tuned", "silo": "basel", "samples": 640}, ...],
 "metrics": {"auroc": {"higher_is_better": true,
                       "matrix": [[CELL, CELL], ...],
                       "pooled": {"last": CELL, "best": CELL, "local": CELL, "tuned": CELL},
                       "gain": {"last": {"basel": GAIN, "bern": GAIN}, "best": {...}, "tuned": {...}}}},
 "missing": [{"subject": "local", "silo": "bern", "reason": "training diverged"}]}
```

- ``models`` are the rows of every ``matrix``, ``silos`` the columns. A model of the federation has ``version``. A
  model that a silo trained has the silo's name and the number of its training ``samples``.
- CELL is ``{"value", "low", "high", "support"}``, or null without an evaluation. Local models leave their silo only
  with the owner's ``share_local``. Models in ``missing`` were not trained, for the given reason.
  ``value`` is null if the silo has no test samples, or if the metric is not estimable from them. ``low`` and ``high``
  are null without a 95 % interval. ``support`` has the number of test samples by class, or else as ``samples``.
- ``pooled``: over all silos' test samples together. For ``local`` and ``tuned``, each silo's own model is evaluated on
  the silo's own samples. Subjects without evaluations are omitted.
- GAIN is ``{"value", "low", "high"}`` or null: the improvement over the silo's own local model. Positive is better,
  also for metrics whose lower values are better. The interval compares the two models on the same samples. Only the
  silo can compute this interval; ``low`` and ``high`` are null without it (`fedsync.evaluation.metrics.gain`).
- With sealed metrics, ``silos``, every ``matrix`` and ``gain`` are empty, and ``models`` name no silos. The file then
  has ``pooled`` and ``pooled_gain``, ``{"last": GAIN, "best": GAIN, "tuned": GAIN}``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedsync.config.sections.evaluation import higher_is_better
from fedsync.core.actions import Attested, Dispatch, Evaluate, KeepBest
from fedsync.core.events import Evaluated, SiloJoined, SiloLost, UpdateArrived, WorkFailed
from fedsync.core.journal import JournalEntry
from fedsync.core.orders import Evaluation, Score, Split, Subject
from fedsync.core.report_checks import usable
from fedsync.evaluation.metrics.metric_types import AnyMetric, Interval, statistics_of
from fedsync.observe.quality.evaluations import cells

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A row of the matrix.

    Args:
        subject: kind of model, or ``file`` for a model from another source.
        silo: owner of the model; None for models of the federation.
    """

    subject: str
    silo: str | None = None
    about: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False)


@dataclass(slots=True)
class Matrix:
    """Evaluations by model and silo, from which the document is computed."""

    silos: Sequence[str]
    metrics: Sequence[AnyMetric] = ()
    cells: dict[tuple[ModelRow, str], Evaluation] = field(default_factory=dict)
    missing: list[tuple[ModelRow, str]] = field(default_factory=list)

    def document(self) -> Document:
        models = sorted({model for model, _ in self.cells}, key=self._place)
        found = {key: cells([each], self.metrics) for key, each in self.cells.items()}
        pooled = {subject: cells(each, self.metrics) for subject, each in self._by_subject(models).items()}
        names = higher_is_better(self.metrics)
        metrics = {
            name: {
                "higher_is_better": better,
                "matrix": [[found.get((model, silo), {}).get(name) for silo in self.silos] for model in models],
                "pooled": {subject: figures[name] for subject, figures in pooled.items() if name in figures},
                "gain": {
                    subject: self._gains(found, subject, name, 1 if better else -1)
                    for subject in pooled
                    if subject != Subject.LOCAL and Subject.LOCAL in pooled
                },
            }
            for name, better in names.items()
            if any(name in figures for figures in pooled.values())
        }
        missing = [{"subject": each.subject, "silo": each.silo, "reason": reason} for each, reason in self.missing]
        rows = [{"subject": each.subject, "silo": each.silo, **each.about} for each in models]
        return {"split": "test", "silos": list(self.silos), "models": rows, "metrics": metrics, "missing": missing}

    def _place(self, model: ModelRow) -> tuple[int, int]:
        order = [*Subject, model.subject]
        return order.index(model.subject), 0 if model.silo is None else [*self.silos, model.silo].index(model.silo)

    def _by_subject(self, models: Iterable[ModelRow]) -> dict[str, list[Evaluation]]:
        found: dict[str, list[Evaluation]] = {}
        for model in models:
            for silo in self.silos:
                each = self.cells.get((model, silo))
                if each is not None and model.silo in (None, silo):
                    found.setdefault(model.subject, []).append(each)
        return found

    def _gains(self, found: Mapping[tuple[ModelRow, str], Document], subject: str, name: str, sign: int) -> Document:
        gains: Document = {}
        for silo in self.silos:
            own = silo if subject == Subject.TUNED else None
            pair = [found.get((each, silo)) for each in (ModelRow(subject, own), ModelRow(Subject.LOCAL, silo))]
            values = [None if each is None or name not in each else each[name]["value"] for each in pair]
            gain = None
            if values[0] is not None and values[1] is not None:
                low, high = self._told(subject, silo).get(name, (None, None))
                gain = {"value": sign * (values[0] - values[1]), "low": low, "high": high}
            gains[silo] = gain
        return gains

    def _told(self, subject: str, silo: str) -> Mapping[str, Interval]:
        of = Subject.TUNED if subject == Subject.TUNED else Subject.LOCAL
        one, last = (self.cells.get((ModelRow(each), silo)) for each in (subject, Subject.LAST))
        # If one version is both best and last, silos evaluate it only once.
        asked = Subject.LAST if one is not None and one is last else subject
        return self.cells[ModelRow(of, silo), silo].gains.get(asked, {})


def sealed_document(
    scores: Mapping[Subject, Score],
    metrics: Sequence[AnyMetric],
    about: Mapping[Subject, Mapping[str, Any]],
    missing: Sequence[tuple[ModelRow, str]],
) -> Document:
    told: dict[str, Any] = {}
    for name, better in higher_is_better(metrics).items():
        pooled = {str(each): score.numbers[name] for each, score in scores.items() if name in score.numbers}
        own, sign = pooled.get(Subject.LOCAL), 1 if better else -1
        gains = {} if own is None else {each: sign * (value - own) for each, value in pooled.items()}
        if pooled:
            told[name] = {
                "higher_is_better": better,
                "matrix": [],
                "pooled": {each: {**_estimate(value), "support": {}} for each, value in pooled.items()},
                "gain": {},
                "pooled_gain": {each: _estimate(gain) for each, gain in gains.items() if each != Subject.LOCAL},
            }
    rows = [{"subject": each, "silo": None, **about[each]} for each in scores]
    left = [{"subject": each.subject, "silo": each.silo, "reason": reason} for each, reason in missing]
    return {"split": "test", "silos": [], "models": rows, "metrics": told, "missing": left}


def _estimate(value: float) -> Document:
    return {"value": value, "low": None, "high": None}


class CrossSiteBooks:
    """Collector of the matrix, updated entry by entry from a journal."""

    def __init__(self, metrics: Sequence[AnyMetric] = ()) -> None:
        self._metrics = metrics
        self._known = statistics_of(metrics)
        self._silos: dict[str, None] = {}
        self._orders: dict[str, tuple[str, Subject]] = {}
        self._samples: dict[tuple[Subject, str], int] = {}
        self._problems: dict[tuple[Subject, str], str] = {}
        self._found: dict[tuple[Subject, str, str], Evaluation] = {}
        self._attested: dict[Subject, Score] = {}
        self._sealed = False
        self._versions: dict[Subject, int] = {}

    def add(self, entry: JournalEntry) -> None:
        for event in entry.events:
            match event:
                case SiloJoined(_, name):
                    self._silos[name] = None
                case UpdateArrived(_, meta, report) if meta.update_id in self._orders:
                    name, subject = self._orders.pop(meta.update_id)
                    self._samples[subject, name] = self._samples.get((subject, name), 0) + report.samples
                    self._problems.pop((subject, name), None)
                case WorkFailed(_, _, update_id, reason) if update_id in self._orders:
                    name, subject = self._orders.pop(update_id)
                    self._problems[subject, name] = reason
                case SiloLost(_, lost, reason):
                    for name, subject in self._orders.values():
                        if name == lost:
                            self._problems[subject, name] = f"it was lost: {reason}"
                case Evaluated(split=Split.TEST) as told:
                    found = usable(told.silo, told.evaluation, self._known)
                    if found is not None:
                        self._found[told.subject, told.owner, told.silo] = found
        for action in entry.actions:
            match action:
                case Dispatch(name, order) if order.apart:
                    self._orders[order.update_id] = name, order.subject
                case KeepBest(score):
                    self._versions[Subject.BEST] = score.version
                case Attested(figures):
                    self._sealed = True
                    if figures.split is Split.TEST and figures.score is not None:
                        self._attested[figures.subject] = figures.score
                    elif figures.score is not None:
                        # Versions made only to answer questions do not change the model.
                        self._versions[Subject.LAST] = figures.score.version
                case Evaluate(version, _, Split.TEST, subject) if not self._sealed:
                    self._versions[subject] = version

    def document(self) -> Document | None:
        """Return the document; None if no silo trained a local or fine-tuned model."""
        subjects = {subject for subject, _ in (*self._samples, *self._problems)}
        if not subjects:
            return None
        if self._sealed:
            return self._sealed_document(subjects)
        matrix = Matrix(sorted(self._silos), self._metrics)
        for (subject, owner, silo), found in self._found.items():
            for row in self._rows(subject, owner or silo):
                matrix.cells[row, silo] = found
        for subject in Subject:
            for silo in matrix.silos if subject in subjects else ():
                if (subject, "", silo) not in self._found:
                    reason = self._problems.get((subject, silo), "it did not answer")
                    matrix.missing.append((ModelRow(subject, silo), reason))
        return matrix.document()

    @staticmethod
    def without_matrix(document: Document) -> Document:
        metrics = {
            name: {key: each[key] for key in ("pooled", "gain", "pooled_gain") if key in each}
            for name, each in document["metrics"].items()
        }
        return {**document, "metrics": metrics}

    def _sealed_document(self, subjects: Iterable[Subject]) -> Document:
        scores, versions = dict(self._attested), self._versions
        if Subject.LAST in scores and versions.get(Subject.LAST) == versions.get(Subject.BEST):
            scores[Subject.BEST] = scores[Subject.LAST]  # one version, which silos evaluate only once
        about: dict[Subject, Mapping[str, Any]] = {
            each: {"samples": sum(samples for (of, _), samples in self._samples.items() if of is each)}
            if each.own
            else {"version": versions.get(each)}
            for each in scores
        }
        missing = []
        for subject in (each for each in Subject if each in subjects and each not in scores):
            failed = {silo: reason for (of, silo), reason in self._problems.items() if of is subject}
            missing += [(ModelRow(subject, silo), reason) for silo, reason in sorted(failed.items())] or [
                (ModelRow(subject), "not the silos that told of the other models told of it")
            ]
        ordered = {each: scores[each] for each in Subject if each in scores}
        return sealed_document(ordered, self._metrics, about, missing)

    def _rows(self, subject: Subject, owner: str) -> list[ModelRow]:
        """Return the rows of an evaluation: two rows if the last version is also the best."""
        if subject.own:
            return [ModelRow(subject, owner, {"samples": self._samples.get((subject, owner), 0)})]
        version = self._versions.get(subject)
        same = [subject]
        if subject is Subject.LAST and self._versions.get(Subject.BEST) == version:
            same.append(Subject.BEST)
        return [ModelRow(each, None, {"version": version}) for each in same]
