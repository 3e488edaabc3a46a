"""Rounds of a run, as its books have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedsync.observe.shares import SiloShare


@dataclass(slots=True)
class Round:
    """One commit.

    Args:
        round: model version it made.
        at_s: when, since training began.
        seconds: since the commit before.
        loss: mean training loss a sample over the updates in it. Where losses are sealed, what silos attest of all
            commits since the last that has one; None for those between.
        silos: share of every silo that has an update in it.
        accuracy: of the version, once silos have evaluated it, or attest what they found together.
        test_loss: mean loss on the test splits, likewise.
        metrics: figures that silos reported, pooled over the updates in it, and those of evaluations of the version.
        tested: samples behind the latter.
        numbers: all that the version scored, by name.
        found: what each silo that evaluated it found, likewise.
    """

    round: int
    at_s: float
    seconds: float
    loss: float | None
    silos: dict[str, SiloShare]
    accuracy: float | None = None
    test_loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    tested: dict[str, int] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    found: dict[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def slowest(self) -> str:
        """The silo whose update came last."""
        return min(self.silos, key=lambda name: self.silos[name].wait_s)
