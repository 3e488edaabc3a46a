"""How figures that silos report become one.

A silo may report any `WorkReport.metrics`. The name of a metric ends in its unit, and it decides how metrics of several
orders or silos are pooled:

| name | pooled | for example |
|---|---|---|
| begins with ``peak_`` or ``max_`` | largest | ``peak_memory_bytes`` |
| an amount: ends in ``_s``, ``_j``, ``_wh``, ``_bytes`` or ``_count``, and no rate (``_per_``) | sum | ``energy_j`` |
| any other | mean, weighted by samples | ``gradient_norm``, ``tokens_per_s`` |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, Protocol

MOST_NAMES = 256
"""Names that a pool keeps; a silo could give others in every order."""


def pooling(name: str) -> Literal["largest", "sum", "mean"]:
    if name.startswith(("peak_", "max_")):
        return "largest"
    return "sum" if name.endswith(("_s", "_j", "_wh", "_bytes", "_count")) and "_per_" not in name else "mean"


class MetricPool:
    """Metrics of several orders, pooled."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: dict[str, tuple[float, int]] = {}

    def add(self, metrics: Mapping[str, float], samples: int) -> None:
        """Count the metrics of an order that processed so many samples."""
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
        """The pooled metrics by name; also for another thread than the one that adds."""
        return {name: total / weight for name, (total, weight) in sorted(self._parts.copy().items())}


class _Reported(Protocol):
    @property
    def metrics(self) -> Mapping[str, float]: ...

    @property
    def samples(self) -> int: ...


def with_tested(
    metrics: Mapping[str, float], tested: dict[str, int], evaluation: Mapping[str, tuple[float, int]]
) -> dict[str, float]:
    """Metrics of a version with one more evaluation of it, whatever their names are: means over test samples.

    Args:
        metrics: before.
        tested: samples that are in them by name, to which those of the evaluation come.
        evaluation: `fedsync.core.orders.Evaluation.metrics`.
    """
    means = dict(metrics)
    for name, (mean, samples) in evaluation.items():
        before = tested.get(name, 0)
        tested[name] = before + samples
        means[name] = mean if not before else means[name] + (mean - means[name]) * samples / tested[name]
    return means


def pooled(parts: Iterable[_Reported]) -> dict[str, float]:
    """Metrics of a few reports."""
    pool = MetricPool()
    for part in parts:
        if part.metrics:
            pool.add(part.metrics, part.samples)
    return pool.values()
