"""Runs whose figures can be worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.sim.fake import Result, machines, simulate, strategy


def two_silos(out: Path, **sections: Any) -> Result:
    """FedAvg, three rounds. An order is 4 steps of 25 samples: a takes 1 s, b 2 s and 0.5 s of overhead.

    So a round takes 2.5 s, the run 7.5 s; a waits 1.5 s a round.
    """
    plain: dict[str, Any] = {"local": {"steps": 4, "batch_size": 25}, "balancer": {"kind": "fixed"}}
    silos = machines({"speed": 100.0}, {"speed": 50.0, "overhead_s": 0.5})
    return simulate(out, silos, strategy(**{**plain, **sections}))
