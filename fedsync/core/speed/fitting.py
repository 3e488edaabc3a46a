"""Online fit of each silo's step time as a function of batch size: a lasting shape, times a level that varies.

A silo's step takes ``shape(x) / level`` seconds for x samples. The *shape*, ``max(c, a + b x)``, belongs to the machine
and the model and seldom changes. The *level*, about 1, is the effect of load on all sizes alike, and changes all the
time. One order cannot separate shape and level. Two consecutive orders of different sizes can: the level hardly changes
between them, so a significant difference in time shows the shape. Hence
- consecutive orders of about the same size are a *stay*; its first `CurveFitter.recent` orders are points of the shape,
  at the level of the previous stay; later orders only update the level;
- the predictor sees and forecasts the speed at the silo's *reference* size, its first batch size: a series without
  jumps when only the batch size changes;
- the forecast curve is the shape, scaled to the forecast speed at the reference size.

Load that comes or goes in the first orders of a stay is mistaken for shape, until other sizes correct it. While all
sizes are about the same, the shape is a line through the origin, and the predictor sees the measured speed.

Source: LB-BSP, section 3.3.1 (the shape). The paper does not fit it: it is "hard to profile at runtime" (3.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from fedsync.core.orders import WorkReport
from fedsync.core.speed.curve import Curve


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One order at level 1: ``step_s`` seconds a step of ``batch`` samples, with a weight in the fit."""

    batch: float
    step_s: float
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted curve of one silo.

    Args:
        reference: batch size at which the predictor sees speeds [samples].
        groups: key -> newest points of about one size, the group in use last.
        shape: seconds of a step at level 1.
        level: level at the start of the current stay.
        stay: number of orders in the current stay.
        ratios: newest levels in the current stay, newest last.
    """

    reference: float
    groups: Mapping[int, tuple[CurvePoint, ...]]
    shape: Curve
    level: float = 1.0
    stay: int = 1
    ratios: tuple[float, ...] = (1.0,)

    @property
    def speed(self) -> float:
        """Speed of the last order, converted to the reference size [samples/s]."""
        return self.ratios[-1] * self.reference / self.shape.step_s(self.reference)

    def at(self, speed: float) -> Curve:
        """Return the curve of a silo that has ``speed`` [samples/s] at the reference size."""
        return self.shape.scaled(self.reference / (speed * self.shape.step_s(self.reference)))


@dataclass(frozen=True, slots=True)
class CurveFitter:
    """Fitter of the shape of one silo's curve.

    Args:
        recent: number of points kept for a group of sizes, and of levels in the median.
        sizes: groups of sizes kept; the least recently used group is dropped.
        width: sizes within this relative distance are about the same.
        fading: weight of a group relative to the group used next.
    """

    recent: int = 3
    sizes: int = 8
    width: float = 0.1
    fading: float = 0.8

    def observe(self, fit: Fit | None, batch: float, step_s: float) -> Fit:
        """Return the fit after one more order; ``batch`` and ``step_s`` are means over its steps."""
        key = round(math.log(batch) / math.log1p(self.width))
        if fit is None:
            return Fit(batch, {key: (CurvePoint(batch, step_s),)}, Curve(batch / step_s))
        level, stay, ratios, shape, groups = fit.level, fit.stay + 1, fit.ratios, fit.shape, fit.groups
        if key != next(reversed(list(groups))):
            level, stay, ratios = median(ratios), 1, ()
        if stay <= self.recent:
            groups = self._with(groups, key, CurvePoint(batch, step_s * level))
            shape = self._shape(groups)
        ratios = (*ratios, shape.step_s(batch) / step_s)[-self.recent :]
        return Fit(fit.reference, groups, shape, level, stay, ratios)

    def _with(
        self, groups: Mapping[int, tuple[CurvePoint, ...]], key: int, point: CurvePoint
    ) -> dict[int, tuple[CurvePoint, ...]]:
        kept = {other: points for other, points in groups.items() if other != key}
        while len(kept) >= self.sizes:
            del kept[next(iter(kept))]
        kept[key] = (*groups.get(key, ()), point)[-self.recent :]
        return kept

    def _shape(self, groups: Mapping[int, tuple[CurvePoint, ...]]) -> Curve:
        if len(groups) == 1:
            (points,) = groups.values()
            return Curve(median(point.batch / point.step_s for point in points))
        weighted = {
            key: [replace(point, weight=self.fading**age) for point in points]
            for age, (key, points) in enumerate(reversed(list(groups.items())))
        }
        return fit_curve([weighted[key] for key in sorted(weighted)])


@dataclass(slots=True)
class CurveBook:
    """Curve shapes and overheads by silo. Without ``fitter``, shapes are lines through the origin."""

    fitter: CurveFitter | None = None
    _fits: dict[str, Fit] = field(default_factory=dict)
    _overheads: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def observe(self, name: str, report: WorkReport, order_s: float) -> float:
        """Learn from a checked report; return the factor from its speeds to speeds at the reference size."""
        overhead_s = max(order_s - report.compute_s, 0.0)
        self._overheads[name] = (*self._overheads.get(name, ())[-2:], overhead_s)
        if self.fitter is None:
            return 1.0
        batch, step_s = report.samples / report.steps, report.compute_s / report.steps
        fit = self._fits[name] = self.fitter.observe(self._fits.get(name), batch, step_s)
        return fit.speed * step_s / batch if len(fit.groups) > 1 else 1.0

    def curve(self, name: str, speed: float) -> Curve:
        """Return the curve of a silo with this forecast speed [samples/s]. The overhead is the median of the last three
        orders; of two the newer, because the first order includes loading.
        """
        overheads = self._overheads.get(name)
        overhead_s = 0.0 if overheads is None else sorted(overheads)[1] if len(overheads) == 3 else overheads[-1]
        fit = self._fits.get(name)
        if fit is None:
            return Curve(speed, 0.0, 0, overhead_s)
        curve = fit.at(speed)
        return Curve(curve.speed, curve.launch_s, curve.saturation, overhead_s)


HUBER = 1.345
"""Residuals beyond this many standard deviations count linearly, not squared."""

NOISE = 0.01
"""Relative residuals below this are never outliers."""

MISFIT = 0.02
"""Mean relative residual of a straight line above which a bend is tried."""

FLATTEST = 0.01
"""Slopes below this share of the mean seconds a sample count as zero, or any size would seem to take no time."""


def fit_curve(groups: Sequence[Sequence[CurvePoint]]) -> Curve:
    """Fit the curve ``max(c, a + b x)``, ``a >= 0``, ``b > 0``, to groups of points of about one size, sizes ascending.

    The fit minimises relative errors under Huber's loss. A bend between two groups replaces the straight line only if
    the line misses the points and the bend reduces the loss to a quarter. If times do not grow with the size, the curve
    is flat up to the largest size seen and proportional beyond: the most cautious curve that agrees with the data.
    """
    points = [point for group in groups for point in group]
    line = _robust(points)
    if line is None:
        return _flat(points)
    best, loss = line, _loss(line, points)
    if loss <= MISFIT**2 * sum(point.weight for point in points):
        return line
    for split in range(1, len(groups) - 1):
        level = _constant([point for group in groups[:split] for point in group])
        rising = _robust([point for group in groups[split:] for point in group])
        if rising is None:
            continue
        bend = max((level - rising.launch_s) * rising.speed, 0.0)
        bent = Curve(rising.speed, rising.launch_s, bend)
        bent_loss = _loss(bent, points)
        if bent_loss < loss / 4:
            best, loss = bent, 4 * bent_loss
    return best


def _flat(points: Sequence[CurvePoint]) -> Curve:
    largest = max(point.batch for point in points)
    return Curve(largest / _constant(points), saturation=largest)


def _constant(points: Sequence[CurvePoint]) -> float:
    inverse = sum(point.weight / point.step_s for point in points)
    return inverse / sum(point.weight / point.step_s**2 for point in points)


def _robust(points: Sequence[CurvePoint]) -> Curve | None:
    """Fit a straight line by iteratively reweighted least squares; None if it does not rise."""
    line = _line(points, [point.weight for point in points])
    for _ in range(3):
        if line is None:
            return None
        residuals = [abs(line.step_s(point.batch) / point.step_s - 1) for point in points]
        limit = HUBER * max(1.4826 * median(residuals), NOISE)
        if max(residuals) <= limit:
            break
        weights = [p.weight * min(1.0, limit / max(r, NOISE)) for p, r in zip(points, residuals, strict=True)]
        line = _line(points, weights)
    return line


def _line(points: Sequence[CurvePoint], weights: Sequence[float]) -> Curve | None:
    """Fit ``a + b x``, ``a >= 0``, with the least squared relative error; None if b is not positive."""
    # With u = 1 / t and v = x / t the error of a point is a u + b v - 1.
    uu = uv = vv = su = sv = 0.0
    for point, weight in zip(points, weights, strict=True):
        u, v = 1.0 / point.step_s, point.batch / point.step_s
        uu += weight * u * u
        uv += weight * u * v
        vv += weight * v * v
        su += weight * u
        sv += weight * v
    determinant = uu * vv - uv * uv
    launch_s = (su * vv - sv * uv) / determinant if determinant > 1e-12 * uu * vv else -1.0
    if launch_s <= 0:
        return Curve(vv / sv)
    slope = (sv * uu - su * uv) / determinant
    if slope < FLATTEST * sum(weights) / sv:
        return None
    return Curve(1.0 / slope, launch_s)


def _loss(curve: Curve, points: Sequence[CurvePoint]) -> float:
    return sum(point.weight * min((curve.step_s(point.batch) / point.step_s - 1) ** 2, 1.0) for point in points)
