"""The examples of docs/your-task.md and docs/metrics.md work as they stand."""

import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsync.evaluation.metrics.metric_types import number
from fedsync.evaluation.metrics.named import NAMES, Wanted
from fedsync.tasks.metrics.measurement import Measuring

DOCS = Path(__file__).parents[2] / "docs"
PAGE, METRICS = DOCS / "your-task.md", DOCS / "metrics.md"


def _blocks(page: Path) -> list[str]:
    return re.findall(r"```python[^\n]*\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def test_metrics_of_the_example_are_measured() -> None:
    names: dict[str, Any] = {}
    exec(_blocks(METRICS)[0], names)
    kind = names["Screening"]
    task = type("Whole", (kind,), {"model": lambda _: None, "data": lambda *_: None})()
    metrics = Wanted.of(task.metrics()).metrics(task.metrics)
    assert [metric.name for metric in metrics[-2:]] == ["sensitivity", "cost"]
    measuring = Measuring(metrics, torch.device("cpu"))
    found, labels = measuring.begin(), torch.tensor([1, 1, 0, 0])
    outputs = torch.eye(2)[torch.tensor([0, 1, 1, 0])]  # one missed, one false alarm
    found.add(measuring.of(outputs, labels, torch.arange(4)))
    sums = found.sums(4)
    assert number(metrics[-1], np.array(sums["cost/16"])) == (20 + 1) / 4
    named = set(re.findall(r"`([a-z0-9_]+)`", _table()))
    assert set(NAMES) <= named, "the page has every metric"


def _table() -> str:
    return METRICS.read_text(encoding="utf-8").split("| name | computed from | exact? |")[1].split("`metrics.own(")[0]


def test_the_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, trial = _blocks(PAGE)
    (tmp_path / "waves.py").write_text(task, encoding="utf-8")
    (tmp_path / "trial.py").write_text(trial, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path("trial.py")
    before = names["outcome"].report.evaluation
    after = names["trainer"].evaluate(names["base"] + names["outcome"].update)
    assert after.samples == before.samples == 100
    assert after.loss < before.loss / 4
    assert after.correct > before.correct
