"""Figures of a round, listed in one place: exporters and ``rounds.jsonl`` walk what is here.

FedSync's own figures are the fields that `ROUND` and `SHARE` name. Besides, there are the metrics that silos report.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fedsync.observe.rounds import Round

ROUND = ("seconds", "loss", "accuracy", "test_loss")
"""Fields of a `Round` that are figures."""

SHARE = ("batch_size", "steps", "samples", "compute_s", "overhead_s", "wait_s")
"""Fields of a `SiloShare` that are."""


class Figure(NamedTuple):
    """One number of a round: of the silo, or of the whole round for None."""

    name: str
    value: float
    silo: str | None = None


def figures(row: Round) -> Iterator[Figure]:
    """All figures of a round that are known. A metric that has the name of one of FedSync's own is left out."""
    own = ((name, getattr(row, name)) for name in ROUND)
    yield from (Figure(name, value) for name, value in own if value is not None)
    other = {**row.metrics, **row.numbers}
    yield from (Figure(name, value) for name, value in other.items() if name not in ROUND)
    for silo, share in row.silos.items():
        yield from (Figure(name, getattr(share, name), silo) for name in SHARE)
        yield from (Figure(name, value, silo) for name, value in share.metrics.items() if name not in SHARE)
