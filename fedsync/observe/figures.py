"""Figures of a round, for exporters and ``rounds.jsonl``.

`ROUND` and `SHARE` name FedSync's own figures. Metrics that silos report come in addition.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fedsync.observe.rounds import Round

ROUND = ("seconds", "loss", "accuracy", "test_loss")

SHARE = ("batch_size", "steps", "samples", "compute_s", "overhead_s", "wait_s")


class Figure(NamedTuple):
    """One number of a silo in a round, or of the whole round if ``silo`` is None."""

    name: str
    value: float
    silo: str | None = None


def figures(row: Round) -> Iterator[Figure]:
    """Yield all known figures of a round, without reported metrics that have the name of a FedSync figure."""
    own = ((name, getattr(row, name)) for name in ROUND)
    yield from (Figure(name, value) for name, value in own if value is not None)
    other = {**row.metrics, **row.numbers}
    yield from (Figure(name, value) for name, value in other.items() if name not in ROUND)
    for silo, share in row.silos.items():
        yield from (Figure(name, getattr(share, name), silo) for name in SHARE)
        yield from (Figure(name, value, silo) for name, value in share.metrics.items() if name not in SHARE)
