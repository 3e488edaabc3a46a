"""What a strategy exports is written while it runs in virtual time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsync.config.cluster import ClusterConfig
from fedsync.simulation.run import run_virtual
from fedsync.simulation.timing_only import run_timing
from tests.simulation.fake import machines, strategy

SILOS = ClusterConfig(silos=machines({"speed": 100.0}, {"speed": 50.0}))


def rows(path: Path) -> list[str]:
    return path.read_text().splitlines()[1:]


@pytest.mark.parametrize("run", [run_virtual, run_timing])
def test_a_run_writes_its_tables(run: Callable[..., Any], tmp_path: Path) -> None:
    run(strategy(export={"csv": True}, local={"steps": 1, "batch_size": 8}), SILOS, tmp_path)
    assert [row.split(",")[0] for row in rows(tmp_path / "rounds.csv")] == ["1", "2", "3"]
    assert [row.split(",")[:2] for row in rows(tmp_path / "rounds-silos.csv")][:2] == [["1", "a"], ["1", "b"]]
