"""Result of a comparison, and runs whose decisions are compared."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
        cases: compared decisions or values.
        difference: largest difference, in ``unit``.
        allowed: largest difference that counts as agreement.
    """

    algorithm: str
    source: str
    cases: int
    difference: float
    allowed: float
    unit: str

    @property
    def agrees(self) -> bool:
        """Whether there were cases, and none differs by more than is allowed; NaN does not agree."""
        return self.cases > 0 and self.difference <= self.allowed

    def row(self) -> Sequence[str]:
        """Cells of the table."""
        difference = f"{self.difference:.3g} {self.unit}"
        verdict = "agrees" if self.agrees else "DIFFERS"
        return self.algorithm, self.source, f"{self.cases:,}", difference, f"{self.allowed:.3g}", verdict

    def dump(self) -> dict[str, Any]:
        """The same for JSON."""
        return {**asdict(self), "agrees": self.agrees}


def decisions(strategy: str, sets: Sequence[str], silos: Sequence[dict[str, Any]]) -> list[JournalEntry]:
    """Journal of a run in virtual time without training: what the server learned, and what it decided."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        run_timing(StrategyConfig.load(strategy, list(sets)), ClusterConfig.model_validate({"silos": silos}), out)
        return list(read_journal(out / "journal.jsonl")[1])


def random_silos(rng: np.random.Generator, least: int = 2, most: int = 8, **more: Any) -> list[dict[str, Any]]:
    """Machines whose speeds differ up to fivefold [samples/s] and vary from order to order."""
    return [
        {
            "name": f"s{index}",
            "speed": float(rng.uniform(40, 200)),
            "jitter": 0.2,
            "examples": int(rng.integers(200, 900)),
        }
        | more
        for index in range(int(rng.integers(least, most + 1)))
    ]
