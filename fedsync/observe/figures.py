"""Figures of a round, listed in one place, and how figures that silos report become one.

FedSync's own figures are the fields that `ROUND` and `SHARE` name. Besides, a silo may report any `WorkReport.metrics`.
Exporters, ``rounds.jsonl``, the summary and the report page walk what is there. The name of a figure ends in its unit,
and it decides how figures of several orders or silos are pooled:

| name | pooled | for example |
|---|---|---|
| begins with ``peak_`` or ``max_`` | largest | ``peak_memory_bytes`` |
| an amount: ends in ``_s``, ``_j``, ``_wh``, ``_bytes`` or ``_count``, and no rate (``_per_``) | sum | ``energy_j`` |
| any other | mean, weighted by samples | ``gradient_norm``, ``tokens_per_s`` |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from fedsync.observe.ledger import Round

ROUND = ("seconds", "loss", "accuracy", "test_loss")
"""Fields of a `Round` that are figures."""

SHARE = ("batch_size", "steps", "samples", "compute_s", "overhead_s", "wait_s")
"""Fields of a `SiloShare` that are."""

MOST_NAMES = 256
"""Names that a pool keeps; a silo could give others in every order."""


class Figure(NamedTuple):
    """One number of a round: of the silo, or of the whole round for None."""

    name: str
    value: float
    silo: str | None = None


def figures(row: Round) -> Iterator[Figure]:
    """All figures of a round that are known. A metric that has the name of one of FedSync's own is left out."""
    own = ((name, getattr(row, name)) for name in ROUND)
    yield from (Figure(name, value) for name, value in own if value is not None)
    yield from (Figure(name, value) for name, value in row.metrics.items() if name not in ROUND)
    for silo, share in row.silos.items():
        yield from (Figure(name, getattr(share, name), silo) for name in SHARE)
        yield from (Figure(name, value, silo) for name, value in share.metrics.items() if name not in SHARE)


def pooling(name: str) -> Literal["largest", "sum", "mean"]:
    """How figures of this name are pooled."""
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
