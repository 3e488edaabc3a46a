"""The examples of docs/your-task.md work as they stand."""

import re
import runpy
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "your-task.md"


def test_the_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, trial = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "waves.py").write_text(task, encoding="utf-8")
    (tmp_path / "trial.py").write_text(trial, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path("trial.py")
    before = names["outcome"].report.evaluation
    after = names["trainer"].evaluate(names["base"] + names["outcome"].update)
    assert after.samples == before.samples == 100
    assert after.loss < before.loss / 4
    assert after.correct > before.correct
