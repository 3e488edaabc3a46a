"""When a run has done enough."""

from __future__ import annotations

from dataclasses import dataclass

from fedsync.core.scores import Scores


@dataclass(frozen=True, slots=True)
class StopRules:
    """The run ends at whichever comes first; None switches a rule off.

    Args:
        rounds: model versions committed.
        seconds: virtual or wall seconds since the run began; checked when something happens.
        target_accuracy: share of correct predictions, 0..1, of an evaluated version.
        patience: evaluated versions in a row without a better accuracy.
    """

    rounds: int | None = None
    seconds: float | None = None
    target_accuracy: float | None = None
    patience: int | None = None

    def decide(self, version: int, now_s: float, scores: Scores) -> str | None:
        """The reason to stop, or None to go on."""
        if self.target_accuracy is not None and scores.best >= self.target_accuracy:
            return f"target accuracy {self.target_accuracy:g} reached: {scores.best:.4f}"
        if self.patience is not None and scores.since_best >= self.patience:
            return f"no better accuracy in {self.patience} evaluated versions"
        if self.rounds is not None and version >= self.rounds:
            return f"{self.rounds} rounds done"
        if self.seconds is not None and now_s >= self.seconds:
            return f"{self.seconds:g} s are over"
        return None
