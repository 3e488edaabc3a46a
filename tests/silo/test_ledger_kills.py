"""A privacy ledger under kill -9: all that left is in it, and no order more often than it was begun."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench.faults.ledger_kills import STEPS, Found, look

pytest.importorskip("dp_accounting")
pytest.importorskip("opacus")

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_few_kills(tmp_path: Path) -> None:
    """In a process of its own, which has no threads and may fork."""
    out = tmp_path / "found.json"
    command = [sys.executable, "-m", "bench.faults.ledger_kills", "--kills", "5", "--seed", "3", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=240, stdout=subprocess.DEVNULL)
    found = json.loads(out.read_text())
    assert found["kills"] == 5 and found["left"] > 0
    assert found["entered"] >= found["left"]


def trainer(left: set[str], begun: dict[str, int]) -> Any:
    return cast(Any, SimpleNamespace(number=0, left=left, begun=Counter(begun)))


@pytest.mark.parametrize(
    ("times", "missing", "too_often"),
    [(0, 1, 0), (STEPS - 1, 1, 0), (STEPS, 0, 0), (2 * STEPS, 0, 0), (3 * STEPS, 0, 1)],
)
def test_ledgers_of_too_little_or_too_much_are_found(tmp_path: Path, times: int, missing: int, too_often: int) -> None:
    file = tmp_path / "state" / "privacy" / "data.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"kind": "spent", "run": "run-0 ab", "of": "silo-a/1", "times": times}) + "\n")
    found = Found(seed=0)
    look(tmp_path, [trainer({"silo-a/1"}, {"silo-a/1": 2})], found)
    assert (len(found.missing), len(found.too_often)) == (missing, too_often)
    assert found.holds == (not missing and not too_often)
