"""Runs whose figures can be worked out by hand."""

from pathlib import Path
from typing import Any

from tests.simulation.fake import Result, machines, simulate, spoil, strategy

METRICS = {
    "a": {"energy_j": 2.0, "gpu_celsius": 40.0, "peak_memory_bytes": 7.0},
    "b": {"energy_j": 6.0, "gpu_celsius": 60.0, "peak_memory_bytes": 5.0},
}
"""What each silo reports of an order of 100 samples."""

A_ROUND = {"energy_j": 8.0, "gpu_celsius": 50.0, "peak_memory_bytes": 7.0}
"""The same of an order of each: the sum, the mean over as many samples, the largest."""


def two_silos(out: Path, **sections: Any) -> Result:
    """FedAvg, three rounds. An order is 4 steps of 25 samples: a takes 1 s, b 2 s and 0.5 s of overhead.

    So a round takes 2.5 s, the run 7.5 s; a waits 1.5 s a round. Each reports what an order cost: a 2 J at 40 degrees
    and 7 bytes, b 6 J at 60 degrees and 5 bytes.
    """
    plain: dict[str, Any] = {"local": {"steps": 4, "batch_size": 25}, "balancer": {"kind": "fixed"}}
    silos = machines({"speed": 100.0}, {"speed": 50.0, "overhead_s": 0.5})
    twists = {name: spoil(metrics=metrics) for name, metrics in METRICS.items()}
    return simulate(out, silos, strategy(**{**plain, **sections}), twists)
