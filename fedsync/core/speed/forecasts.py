"""Forecasts of all silos' training speeds, updated from the silos' reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedsync.common.errors import ConfigError, PolicyError
from fedsync.core.orders import SiloFacts, Window, WorkReport
from fedsync.core.protocols import AnyPredictor, MachineLoad, SpeedSample
from fedsync.core.speed.curve import Curve
from fedsync.core.speed.fitting import CurveBook, CurveFitter

TURN = 10
"""Epochs that one silo's predictor trains before the next silo's turn."""


@dataclass(slots=True)
class Forecasts:
    """Predictor states of all silos, kept while silos come and go. With ``declared``, the speeds that silos declare are
    used instead. ``fitter`` fits step time against batch size; None assumes proportional time.
    """

    predictor: AnyPredictor
    declared: bool = False
    fitter: CurveFitter | None = None
    _states: dict[str, Any] = field(default_factory=dict)
    _declared: dict[str, Curve] = field(default_factory=dict)
    _drivers: dict[str, MachineLoad] = field(default_factory=dict)
    _samples: dict[str, int] = field(default_factory=dict)
    _last: str | None = None
    _curves: CurveBook = field(init=False)

    def __post_init__(self) -> None:
        self._curves = CurveBook(None if self.declared else self.fitter)

    def first(self, name: str, facts: SiloFacts) -> Curve | None:
        """Return the forecast for a silo that has joined, or None; raises `ConfigError` for a missing declaration."""
        if not self.declared:
            return self._curve(name, self._states[name]) if name in self._states else None
        if facts.declared_speed is None:
            raise ConfigError(
                "balancer.speeds",
                f"'declared', but silo {name!r} declares no speed",
                "Give the silo a speed in the silo file, or write `speeds: measured`",
            )
        self._declared[name] = self._curves.curve(name, facts.declared_speed)
        return self._declared[name]

    def observe(self, name: str, report: WorkReport, order_s: float) -> Curve | None:
        factor = self._curves.observe(name, report, order_s)
        if self.declared:
            return self._curves.curve(name, self._declared[name].speed)
        windows, predictor = report.windows, self.predictor
        cpu = _mean([window.cpu for window in windows]) if windows else None
        memory = _mean([window.memory for window in windows]) if windows else None
        sample = SpeedSample(factor * report.samples / report.compute_s, cpu, memory)
        before = self._states.get(name)
        if predictor.learns:
            sample = replace(sample, windows=_scaled(windows, factor), known=self._drivers.get(name))
            self._samples[name] = self._samples.get(name, 0) + max(len(windows), 1)
            self._drivers[name] = _newest(windows)
        state = self._states[name] = predictor.observe(self._begin() if before is None else before, sample)
        return self._curve(name, state)

    @property
    def unlearned(self) -> bool:
        predictor = self.predictor
        return predictor.learns and any(predictor.unlearned(state) for state in self._states.values())

    def learn(self, epochs: int) -> None:
        """Train for ``epochs`` in total; silos take turns, starting after the last trained silo."""
        predictor = self.predictor
        if not predictor.learns:
            return
        names = list(self._states)
        first = names.index(self._last) + 1 if self._last in self._states else 0
        for name in [*names[first:], *names[:first]]:
            if epochs <= 0:
                break
            if predictor.unlearned(self._states[name]):
                turn = min(TURN, epochs)
                self._states[name] = predictor.learn(self._states[name], turn)
                self._last, epochs = name, epochs - turn

    def _begin(self) -> Any:
        state, donor = self.predictor.init(), self._donor()
        return state if donor is None else self.predictor.reuse(state, donor)

    def _donor(self) -> Any:
        known = {name: count for name, count in self._samples.items() if name in self._states}
        return self._states[max(known, key=known.__getitem__)] if known else None

    def _curve(self, name: str, state: Any) -> Curve | None:
        speed = self.predictor.forecast(state, self._drivers.get(name))
        if speed is None:
            return None
        if not 0 < speed < math.inf:
            raise PolicyError(f"the predictor forecasts a speed of {speed} samples/s for {name!r}")
        return self._curves.curve(name, speed)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _newest(windows: Sequence[Window]) -> MachineLoad:
    last = windows[-1] if windows else Window(0.0)
    return MachineLoad(last.cpu or 0.0, last.memory or 0.0)


def _scaled(windows: tuple[Window, ...], factor: float) -> tuple[Window, ...]:
    if factor == 1.0:
        return windows
    return tuple(replace(window, speed=factor * window.speed) for window in windows)
