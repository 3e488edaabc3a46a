"""The best model on disk is the stated version when all processes of a run were killed, and at its end."""

import random
from pathlib import Path

import pytest

from bench.faults.best import campaign


@pytest.mark.full
def test_best_pt_is_the_stated_version_after_everything_was_killed(tmp_path: Path) -> None:
    rows = campaign("asp", 1, tmp_path, random.Random(1))
    assert [row["equal"] for row in rows] == ["yes", "yes"], rows
