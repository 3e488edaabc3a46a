"""Silos whose tables do not mean the same: matched by name, or refused with silo, column and row."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsync.common.errors import ConfigError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.silo.protocol import Identity
from fedsync.silo.session.session import SiloSession
from fedsync.simulation.run import run_virtual

SILOS = ClusterConfig.model_validate({"silos": [{"name": "a", "speed": 100.0}, {"name": "b", "speed": 100.0}]})
ROWS = [{"age": 20 + i, "dose": (7 * i) % 11, "sick": i % 2} for i in range(24)]


def table(path: Path, columns: list[str], rows: list[dict[str, Any]] = ROWS) -> str:
    path.write_text("\n".join([",".join(columns), *(",".join(str(row[name]) for name in columns) for row in rows)]))
    return str(path)


def config(files: list[str], **task: Any) -> StrategyConfig:
    made = {"kind": "csv", "files": files, "target": "sick", **task}
    return StrategyConfig.load("bsp", ["stop.rounds=2", "local.steps=2", f"task={json.dumps(made)}"])


def model(files: list[str], out: Path, **task: Any) -> dict[str, torch.Tensor]:
    run_virtual(config(files, **task), SILOS, out)
    return dict(torch.load(out / "model.pt", weights_only=True))


def test_columns_in_another_order_are_matched_by_name(tmp_path: Path) -> None:
    files = [table(tmp_path / "a.csv", ["age", "dose", "sick"]), table(tmp_path / "b.csv", ["age", "dose", "sick"])]
    expected = model(files, tmp_path / "same")
    table(tmp_path / "b.csv", ["sick", "dose", "age"])
    found = model(files, tmp_path / "other")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


OTHER = [{**row, "years": row["age"], "word": "many"} for row in ROWS]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["years", "dose", "sick"], r"'b'.*no column 'age', and a has.*has a column 'years', and a has none"),
        (["age", "dose", "word", "sick"], r"'b'.*has a column 'word', and a has none"),
        (["age", "sick"], r"'b'.*no column 'dose', and a has"),
    ],
)
def test_other_columns_are_refused_with_silo_and_column(columns: list[str], message: str, tmp_path: Path) -> None:
    files = [table(tmp_path / "a.csv", ["age", "dose", "sick"]), table(tmp_path / "b.csv", columns, OTHER)]
    with pytest.raises(ConfigError, match=message):
        run_virtual(config(files), SILOS, tmp_path / "run")


def test_columns_of_other_kinds_are_refused_with_silo_column_and_row(tmp_path: Path) -> None:
    words = [{**row, "dose": "?" if i == 0 else "high"} for i, row in enumerate(ROWS)]
    files = [
        table(tmp_path / "a.csv", ["age", "dose", "sick"]),
        table(tmp_path / "b.csv", ["age", "dose", "sick"], words),
    ]
    with pytest.raises(
        ConfigError, match=r"'b'.*column 'dose' \(row 3\) is text, and number at a.*task\.columns"
    ) as caught:
        run_virtual(config(files), SILOS, tmp_path / "run")
    assert "high" not in str(caught.value)


def test_a_table_of_numbers_is_matched_by_name_as_well(tmp_path: Path) -> None:
    made = {"kind": "linear", "partition": {"kind": "own"}}

    def session(name: str, columns: list[str]) -> SiloSession:
        data = {
            "kind": "table",
            "file": table(tmp_path / f"{name}.csv", columns, OTHER),
            "target": "sick",
            "ignore": ["word"],
        }
        task = json.dumps({**made, "data": data})
        spec = RunSpec.of(StrategyConfig.load("bsp", [f"task={task}"]), None, 1)
        return SiloSession(Identity(spec.dump(), 0, "a", resources=False), spec)

    one, two = session("a", ["age", "dose", "sick", "word"]), session("b", ["dose", "word", "sick", "age"])
    first, second = (
        each._trainer._trainer._task.data(each._trainer._trainer._slot).train.tensors[0] for each in (one, two)
    )  # type: ignore[attr-defined]
    assert one.form == two.form and one.form.frozen and torch.equal(first, second)
    assert session("c", ["years", "dose", "sick", "word"]).form.frozen != one.form.frozen
