"""Pooling of metrics that silos report.

A silo may report any `WorkReport.metrics`. The name of a metric ends in its unit. The name decides how values of
several orders or silos are pooled:

| name | pooled | example |
|---|---|---|
| begins with ``peak_`` or ``max_`` | largest | ``peak_memory_bytes`` |
| an amount: ends in ``_s``, ``_j``, ``_wh``, ``_bytes`` or ``_count``, without ``_per_`` (rate) | sum | ``energy_j`` |
| any other | mean, weighted by samples | ``gradient_norm``, ``tokens_per_s`` |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, Protocol

MOST_NAMES = 256
"""Maximum number of names in a pool, because a silo could send new names with every order."""


def pooling(name: str) -> Literal["largest", "sum", "mean"]:
    if name.startswith(("peak_", "max_")):
        return "largest"
    return "sum" if name.endswith(("_s", "_j", "_wh", "_bytes", "_count")) and "_per_" not in name else "mean"


class MetricPool:
    """Pooled metrics of several orders."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: dict[str, tuple[float, int]] = {}

    def add(self, metrics: Mapping[str, float], samples: int) -> None:
        for name, value in metrics.items():
            total, weight = self._parts.get(name, (0.0, 0))
            if not weight and len(self._parts) == MOST_NAMES:
                continue
            match pooling(name):
                case "largest":
                    self._parts[name] = (max(value, total) if weight else value, 1)
                case "sum":
                    self._parts[name] = (total + value, 1)
                case "mean":
                    self._parts[name] = (total + value * samples, weight + samples)

    def values(self) -> dict[str, float]:
        """Return the pooled metrics by name; safe to call while another thread adds."""
        return {name: total / weight for name, (total, weight) in sorted(self._parts.copy().items())}


class _Reported(Protocol):
    @property
    def metrics(self) -> Mapping[str, float]: ...

    @property
    def samples(self) -> int: ...


def with_tested(
    metrics: Mapping[str, float], tested: dict[str, int], evaluation: Mapping[str, tuple[float, int]]
) -> dict[str, float]:
    """Add an evaluation to a version's metrics; evaluation metrics are always means over test samples.

    Args:
        metrics: metrics before the evaluation; not changed.
        tested: number of samples behind each metric, by name; updated in place.
    """
    means = dict(metrics)
    for name, (mean, samples) in evaluation.items():
        before = tested.get(name, 0)
        tested[name] = before + samples
        means[name] = mean if not before else means[name] + (mean - means[name]) * samples / tested[name]
    return means


def pooled(parts: Iterable[_Reported]) -> dict[str, float]:
    pool = MetricPool()
    for part in parts:
        if part.metrics:
            pool.add(part.metrics, part.samples)
    return pool.values()
