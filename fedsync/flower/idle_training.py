"""The time between two looks at the grid, for predictors to train in."""

from __future__ import annotations

from collections.abc import Sequence

from fedsync.core.events import Event, Spare

_SLOWEST_GROWTH, _FASTEST_GROWTH, _MOST = 0.1, 2.0, 10_000


class IdleTraining:
    """How many epochs fit into a pause, found out by doing.

    It begins with one epoch. After each pause the number follows what it took: at most twice as many, at least a
    tenth, and one in any case. So what never fits (the fit of an ARIMA model, the first import of PyTorch) delays one
    look at the grid by its own length.

    Args:
        cap_s: longest training in a pause [s]; 0 for none.
    """

    def __init__(self, cap_s: float) -> None:
        self._cap_s = cap_s
        self._epochs = 1

    def events(self, now_s: float) -> list[Event]:
        """What to tell the coordinator when a predictor wants to train and silos are at work."""
        return [Spare(now_s, self._epochs)] if self._cap_s > 0 else []

    def measure(self, events: Sequence[Event], seconds: float) -> None:
        """The coordinator took so long for a batch; counts if the batch was a pause's."""
        if len(events) == 1 and isinstance(events[0], Spare):
            growth = min(max(self._cap_s / max(seconds, 1e-9), _SLOWEST_GROWTH), _FASTEST_GROWTH)
            self._epochs = min(max(int(events[0].epochs * growth), 1), _MOST)
