"""The folder of a silo with a table."""

from pathlib import Path

import numpy as np
import pytest

from tests.privacy.guards import ROWS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    drawn = np.random.default_rng(5)
    rows = [f"{x:.3f},{y:.3f},{row // 2},{int(x + y > 0)}" for row, (x, y) in enumerate(drawn.normal(size=(ROWS, 2)))]
    (tmp_path / "a.csv").write_text("\n".join(["x,y,person,ill", *rows]) + "\n")
    return tmp_path
