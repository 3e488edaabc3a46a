"""Result of a comparison, and runs whose decisions are compared."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.journal import JournalEntry, read_journal
from fedsync.simulation.timing_only import run_timing


@dataclass(frozen=True, slots=True)
class Finding:
    """Comparison of FedSync with one algorithm.

    Args:
        source: section, algorithm or equation.
        differences: of each compared decision or value, in ``unit``.
        allowed: largest difference that counts as agreement.
        cases: compared decisions, if ``differences`` has statistics of them.
    """

    algorithm: str
    source: str
    differences: Sequence[float]
    allowed: float
    unit: str
    cases: int = 0

    def dump(self) -> dict[str, Any]:
        """Columns of the table; a difference that is not a number does not agree."""
        largest = float(np.max(self.differences))
        cases = self.cases or len(self.differences)
        verdict = "agrees" if largest <= self.allowed else "DIFFERS"
        found = {"algorithm": self.algorithm, "source": self.source, "cases": cases, "largest difference": largest}
        return {**found, "allowed": self.allowed, "unit": self.unit, "verdict": verdict}


def decisions(strategy: str, sets: Sequence[str], silos: Sequence[dict[str, Any]]) -> list[JournalEntry]:
    """Journal of a run in virtual time without training: what the server learned, and what it decided."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        run_timing(StrategyConfig.load(strategy, list(sets)), ClusterConfig.model_validate({"silos": silos}), out)
        return list(read_journal(out / "journal.jsonl")[1])


def random_silos(rng: np.random.Generator, least: int = 2, most: int = 8, **more: Any) -> list[dict[str, Any]]:
    """Machines whose speeds differ up to fivefold [samples/s] and vary from order to order."""
    silos = [{"name": f"s{index}", "jitter": 0.2} for index in range(int(rng.integers(least, most + 1)))]
    return [{**silo, "speed": float(rng.uniform(40, 200)), **more} for silo in silos]
