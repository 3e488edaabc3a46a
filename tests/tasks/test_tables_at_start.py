"""Tables are looked at before a run on emulated silos begins, and data are found by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsync.cli import app
from fedsync.common.errors import ConfigError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.run_spec import RunSpec
from fedsync.config.sections.survey import survey_of
from fedsync.config.strategy import StrategyConfig

GOOD = "age,town,t\n" + "".join(f"{20 + i},{'?' if i == 3 else 'Rome'},{i % 2}\n" for i in range(24))


def silos(folder: Path, *tables: str) -> Path:
    """A silo file whose silos have these tables under the name ``train``."""
    entries = []
    for name, text in zip("abc", tables, strict=False):
        (folder / f"{name}.csv").write_text(text)
        entries.append({"name": name, "speed": 100, "data": {"train": f"{name}.csv"}})
    file = folder / "silos.yaml"
    file.write_text(json.dumps({"silos": entries}))
    return file


def config(**task: Any) -> StrategyConfig:
    made = {"kind": "csv", "file": "data:train", "target": "t", **task}
    return StrategyConfig.load("bsp", ["stop.rounds=1", "local.steps=1", f"task={json.dumps(made)}"])


def look(file: Path, **task: Any) -> list[str]:
    cluster = ClusterConfig.load(file)
    return config(**task).task.look({silo.name: silo.data for silo in cluster.silos}, seed=7)


def test_what_columns_were_taken_for_is_said_unless_the_run_says_it(tmp_path: Path) -> None:
    file = silos(tmp_path, GOOD, GOOD)
    (line,) = look(file)
    assert "age number, town text (2 gaps). State them in task.columns" in line
    assert look(file, columns={"age": {"kind": "number"}, "town": {"kind": "text"}}) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace("21,", "12%,"), r"silo 'b', .*b\.csv, line 3, column 1: .*task\.columns"),
        (GOOD.replace("age", "years"), r"silo 'b': it has no column 'age', and a has; it has a column 'years', and a"),
        (GOOD.replace("Rome", "1").replace("?", "2"), r"silo 'b': column 'town' \(row 2\) is number, and text at a"),
        (GOOD.replace("Rome", "").replace("?", ""), r"column 'town' \(no known cell\) is number, and text at a"),
    ],
)
def test_a_table_that_does_not_fit_ends_a_run_before_it_begins(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        look(silos(tmp_path, GOOD, text))
    if "no known cell" in message:
        with pytest.raises(ConfigError, match=r"'town' \(row 2\) is text, and number \(no known cell\) at a"):
            look(silos(tmp_path, text, GOOD))


def test_emulated_silos_have_data_by_the_name_that_the_task_asks_for(tmp_path: Path) -> None:
    file = silos(tmp_path, GOOD, GOOD)
    spec = RunSpec.of(config(), ClusterConfig.load(file), 2)
    assert spec.task.files == [str(tmp_path / "a.csv"), str(tmp_path / "b.csv")]  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"task\.file: .*data:test, and silo 'a' has no data by that name"):
        RunSpec.of(config(file="data:test"), ClusterConfig.load(file), 2)
    task = 'task={"kind": "linear", "data": {"kind": "table", "file": "data:train"}, "partition": {"kind": "own"}}'
    with pytest.raises(ConfigError, match=r"task: emulated silos cannot .* kind 'linear': data:train\. .*kind: csv"):
        RunSpec.of(StrategyConfig.load("bsp", [task]), ClusterConfig.load(file), 2)


@pytest.mark.parametrize("more", [{}, {"statistics": {"bins": 4}}], ids=["run", "survey"])
def test_a_real_run_asks_silos_for_data_by_their_name(more: dict[str, Any]) -> None:
    """Without a silo file: each owner's silo.yaml has the path."""
    for given in (config(**more), survey_of(config(**more), 3)):
        if given is not None:
            spec = RunSpec.parse(RunSpec.of(given, None, 3).dump())
            assert '"data:train"' in spec.dump() and '"files":null' in spec.dump()


def test_a_run_by_name_says_what_it_took_columns_for(tmp_path: Path) -> None:
    made = {"kind": "csv", "file": "data:train", "target": "t"}
    words = ["run", "bsp", "--silos", str(silos(tmp_path, GOOD, GOOD)), "--runtime", "virtual", "--out"]
    words += [str(tmp_path / "run"), "--set", f"task={json.dumps(made)}", "--set", "stop.rounds=1"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    said = "kinds of columns, guessed from their cells: age number, town text (2 gaps)"
    assert said in " ".join(shown.output.split())
