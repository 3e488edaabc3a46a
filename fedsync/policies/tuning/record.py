"""What a tuner remembers of the recent past, and the machines that it makes of it for rehearsals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from fedsync.core.curve import Curve
from fedsync.core.machines import RecordedMachine
from fedsync.core.tuning import OrderSeen
from fedsync.core.views import SiloView

KEPT = 8
"""Orders of each silo that are remembered."""

PIECES = 4
"""Pieces of an order that are remembered of its windows."""


@dataclass(frozen=True, slots=True)
class Lap:
    """One order of a silo.

    Args:
        begin_s: when it was given.
        end_s: when its update was in.
        batch_size: samples a step.
        steps_s: mean seconds of a step in each piece of it, pieces of as many steps.
        overhead_s: seconds that it cost besides training; of one that was queued behind another, which costs them while
            the other trains, what the other cost.
    """

    begin_s: float
    end_s: float
    batch_size: float
    steps_s: tuple[float, ...]
    overhead_s: float

    @classmethod
    def of(cls, seen: OrderSeen, before: Sequence[Lap] = ()) -> Lap:
        """What there is to remember; a silo's training takes no longer than the server waited for it.

        Args:
            seen: the order.
            before: its silo's lap before, if there is one.
        """
        report, queued = seen.report, bool(seen.order.behind and before)
        # One that was queued was given while the order before it was in work, and may have begun long before that came.
        given_s = before[0].begin_s if queued else seen.begin_s
        train_s = min(report.compute_s, max(seen.end_s - given_s, 1e-9))
        overhead_s = before[0].overhead_s if queued else seen.end_s - seen.begin_s - train_s
        batch = report.samples / report.steps
        times = [1.0 / window.speed for window in report.windows] or [1.0]
        size = -(-len(times) // PIECES)
        pieces = [sum(times[at : at + size]) / len(times[at : at + size]) for at in range(0, len(times), size)]
        mean = sum(pieces) / len(pieces)
        return cls(
            seen.begin_s,
            seen.end_s,
            batch,
            tuple(train_s / report.steps * piece / mean for piece in pieces),
            max(overhead_s, 0.0),
        )


Laps = Mapping[str, tuple[Lap, ...]]


def machines(silos: Mapping[str, SiloView], laps: Laps) -> dict[str, RecordedMachine]:
    """Machines as silos were of late, in order of joining; of a silo that has not finished an order there is none."""
    return {name: _machine(silo.forecast, laps[name]) for name, silo in silos.items() if name in laps and silo.forecast}


def _machine(forecast: Curve, laps: tuple[Lap, ...]) -> RecordedMachine:
    """The curve that is forecast, with the overhead that the server saw, and the course of the last orders.

    Between two orders the machine counts as being as it was in the order before.
    """
    overhead_s = median(lap.overhead_s for lap in laps[-3:])
    curve = Curve(forecast.speed, forecast.launch_s, forecast.saturation, overhead_s)
    lengths: list[float] = []
    factors: list[float] = []
    for lap, following in zip(laps, [*laps[1:], None], strict=True):
        whole_s = (lap.end_s if following is None else following.begin_s) - lap.begin_s
        if whole_s <= 0:
            continue
        expected_s, total_s = curve.step_s(lap.batch_size), sum(lap.steps_s)
        lengths.extend(whole_s * step_s / total_s for step_s in lap.steps_s)
        factors.extend(expected_s / step_s for step_s in lap.steps_s)
    return RecordedMachine(curve, lengths, factors)
