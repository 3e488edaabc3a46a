"""Silos with another table, through the Flower driver: named with the reason, and never waited for without end."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedsync.common.errors import RunError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.flower.flower_strategy import FedSync
from fedsync.server.timeouts import Timeouts
from fedsync.silo.owner.key_lookup import KEYS, emulated_rings
from tests.flower.grid import DirectGrid
from tests.simulation.test_columns import OTHER, ROWS, table

pytestmark = pytest.mark.usefixtures("silos_here")

GOOD = ["age", "dose", "sick"]
TIMING = Timeouts(poll_s=0.001, order_timeout_s=20, join_timeout_s=20, look_s=0.05)


def started(files: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str, **task: Any) -> FedSync:
    """A run that has been, of as many silos as files."""
    named = zip("abc", files, strict=False)
    entries = [{"name": name, "speed": 1e6, "data": {"train": file}} for name, file in named]
    cluster = ClusterConfig.model_validate({"silos": entries})
    made = json.dumps({"kind": "csv", "file": "data:train", "target": "sick", **task})
    quick = ["local.steps=1", "local.batch_size=8", "stop.rounds=1", f"task={made}"]
    config = StrategyConfig.load("fedavg", [*quick, *overrides])
    rings = emulated_rings(config, cluster, folder)
    if rings is not None:
        monkeypatch.setenv(KEYS, str(rings[0]))
    run = FedSync(config, cluster, out=folder / "run", timing=TIMING, keys=None if rings is None else rings[1])
    run.start(DirectGrid(len(files)))
    return run


BAD = [{**row, "dose": "5%" if row["age"] == 30 else row["dose"]} for row in ROWS]


@pytest.mark.parametrize("more", [[], ["cipher={kind: pad}"]], ids=["plain", "sealed"])
@pytest.mark.parametrize(
    ("columns", "rows", "message"),
    [
        (GOOD, BAD, r"answers CONFIG: .*b\.csv, line 12, column 2: .*looks like a number"),
        (["years", "dose", "sick"], OTHER, r"answers CONFIG: .*'b' failed the check 'columns': .*column 'age'"),
    ],
)
def test_a_run_of_two_does_not_wait_for_one_whose_table_does_not_fit(
    columns: list[str],
    rows: list[dict[str, Any]],
    message: str,
    more: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = [table(tmp_path / "a.csv", GOOD), table(tmp_path / "b.csv", columns, rows)]
    with pytest.raises(RunError, match=rf"needs 2 silos, and at most 1 of those .* can take part\. node 2 {message}"):
        started(files, tmp_path, monkeypatch, *more)


def test_where_enough_are_left_the_others_train_and_the_silo_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tables = {"a": (GOOD, ROWS), "b": (GOOD, ROWS), "c": (["years", "dose", "sick"], OTHER)}
    files = [table(tmp_path / f"{name}.csv", *one) for name, one in tables.items()]
    run = started(files, tmp_path, monkeypatch, "min_silos=2")
    assert run.run_summary is not None and {silo["name"] for silo in run.run_summary["silos"]} == {"a", "b"}
    assert "'c' failed the check 'columns': it has no column 'age'" in caplog.text


def test_columns_in_another_order_and_another_way_of_writing_are_the_same_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [table(tmp_path / "a.csv", GOOD), table(tmp_path / "b.csv", ["sick", "dose", "age"])]
    (tmp_path / "b.csv").write_text((tmp_path / "b.csv").read_text().replace(",", ";"))
    run = started(files, tmp_path, monkeypatch, standardise="federated")
    assert run.run_summary is not None and run.run_summary["rounds"] == 1
