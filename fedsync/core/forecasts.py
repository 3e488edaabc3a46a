"""How fast each silo will be, kept up to date from its reports."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from fedsync.core.curve import Curve
from fedsync.core.errors import ConfigError, PolicyError
from fedsync.core.orders import SiloFacts, WorkReport
from fedsync.core.protocols import AnyPredictor, SpeedSample


@dataclass(slots=True)
class Forecasts:
    """One predictor state a silo, which outlives the silo's comings and goings.

    Args:
        predictor: forecasts a silo's speed.
        declared: take speeds from what silos declare instead.
    """

    predictor: AnyPredictor
    declared: bool = False
    _states: dict[str, Any] = field(default_factory=dict)
    _declared: dict[str, Curve] = field(default_factory=dict)

    def first(self, name: str, facts: SiloFacts) -> Curve | None:
        """Forecast for a silo that has joined, or None if nothing is known of it.

        Raises:
            ConfigError: the silo was to declare its speed, and does not.
        """
        if not self.declared:
            return self._forecast(name)
        if facts.declared_speed is None:
            raise ConfigError(
                "balancer.speeds",
                f"'declared', but silo {name!r} declares no speed",
                "Give the silo a speed in the silo file, or write `speeds: measured`",
            )
        self._declared[name] = Curve(facts.declared_speed)
        return self._declared[name]

    def observe(self, name: str, report: WorkReport) -> Curve | None:
        """Forecast after one more report, which has been checked."""
        if self.declared:
            return self._declared[name]
        count = len(report.windows)
        sample = SpeedSample(
            speed=report.samples / report.compute_s,
            cpu=sum(window.cpu for window in report.windows) / count if count else None,
            memory=sum(window.memory for window in report.windows) / count if count else None,
        )
        before = self._states.get(name)
        self._states[name] = self.predictor.observe(self.predictor.init() if before is None else before, sample)
        return self._forecast(name)

    def _forecast(self, name: str) -> Curve | None:
        if name not in self._states:
            return None
        speed = self.predictor.forecast(self._states[name])
        if speed is None:
            return None
        if not (math.isfinite(speed) and speed > 0):
            raise PolicyError(f"the predictor forecasts a speed of {speed} samples/s for {name!r}")
        return Curve(speed)
