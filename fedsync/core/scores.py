"""How good each model version is, pooled from what silos evaluate on the way."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedsync.core.orders import Evaluation


@dataclass(frozen=True, slots=True)
class Score:
    """A settled version: accuracy (share of correct predictions) and mean loss over all silos' test samples."""

    version: int
    accuracy: float
    loss: float


@dataclass(slots=True)
class _Pool:
    """Sums over the silos that evaluated one version, and how many are still at it."""

    under_way: int = 0
    loss: float = 0.0
    correct: float = 0.0
    samples: int = 0


@dataclass(slots=True)
class Scores:
    """Pools evaluations by version and keeps the best.

    Silos evaluate the model that an order brings before they train on it, so version v is scored by
    the orders based on v, and is settled once none of those is in work.

    Args:
        best: best accuracy of a settled version, -1 before there is one.
        since_best: settled versions since then.
        settled: newest settled version, -1 before there is one.
    """

    best: float = -1.0
    since_best: int = 0
    settled: int = -1
    _open: dict[int, _Pool] = field(default_factory=dict)

    def begin(self, version: int) -> None:
        """An evaluation of ``version`` is under way."""
        self._open.setdefault(version, _Pool()).under_way += 1

    def end(self, version: int, evaluation: Evaluation | None) -> None:
        """One evaluation of ``version`` came back, or is given up (None)."""
        pool = self._open[version]
        pool.under_way -= 1
        if evaluation is not None:
            pool.loss += evaluation.loss
            pool.correct += evaluation.correct
            pool.samples += evaluation.samples

    def settle(self) -> list[Score]:
        """Settle every version on which no evaluation is under way; returns them, oldest first."""
        scores = []
        for version in sorted(version for version, pool in self._open.items() if pool.under_way == 0):
            pool = self._open.pop(version)
            if pool.samples == 0:
                continue
            score = Score(version, pool.correct / pool.samples, pool.loss / pool.samples)
            self.settled = max(self.settled, version)
            self.since_best = 0 if score.accuracy > self.best else self.since_best + 1
            self.best = max(self.best, score.accuracy)
            scores.append(score)
        return scores
