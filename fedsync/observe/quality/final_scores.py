"""Final evaluations of a run's models on the test splits of the silos."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedsync.core.actions import Evaluate
from fedsync.core.events import Evaluated
from fedsync.core.orders import Evaluation, Score, Split, Subject
from fedsync.core.report_checks import usable
from fedsync.evaluation.metrics.metric_types import AnyMetric
from fedsync.evaluation.version_scores import Scores, Settled


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
