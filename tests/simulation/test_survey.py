"""A survey before a run in virtual time: what all silos standardise by, in the clear and sealed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fedsync.common.errors import ConfigError, RunError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.evaluation.survey.findings import ColumnScale
from fedsync.extras.surveys.survey_trainer import SurveyTrainer
from fedsync.extras.watch.watch_commands import statistics
from fedsync.flower.flower_strategy import FedSync
from fedsync.model.layout import Vector
from fedsync.silo.owner.model_export import export_model
from fedsync.simulation.run import run_virtual
from fedsync.tasks.csv_ import CsvTask
from fedsync.tasks.task_protocol import SiloData, SiloSlot
from tests.flower.cut_off_runs import TIMING, with_keys
from tests.flower.grid import DirectGrid, keep_state, silos_in_this_process

NAMES = ("a", "b", "c")
CIPHERS = [
    "{kind: plain}",
    "{kind: bfv, bits: 8, members: 2}",
    "{kind: pad, members: 2}",
    "{kind: masked, inner: {kind: bfv, members: 3}}",
]


@pytest.fixture
def scales(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, dict[str, ColumnScale]]]:
    """What each silo standardises its rows by."""
    found: dict[str, dict[str, ColumnScale]] = {}
    original = CsvTask.data

    def data(self: CsvTask, slot: SiloSlot) -> SiloData:
        found[slot.name] = dict(self._scales or {})
        return original(self, slot)

    monkeypatch.setattr(CsvTask, "data", data)
    yield found


def tables(folder: Path, rows: int = 60) -> list[str]:
    """Three silos, of which each measures in its own way, and leaves out other cells."""
    files = []
    for index, name in enumerate(NAMES):
        rng = np.random.default_rng(index)
        frame = pd.DataFrame(
            {
                "age": np.round(rng.normal(50 + 10 * index, 5 + index, rows), 1),
                "dose": np.round(rng.lognormal(index, 1.0, rows), 3),
                "town": rng.choice(["Rome", "Oslo"], rows),
                "sick": rng.integers(0, 2, rows),
            }
        )
        frame.loc[rng.random(rows) < 0.1 * (index + 1), "age"] = np.nan
        frame.to_csv(folder / f"{name}.csv", index=False)
        files.append(str(folder / f"{name}.csv"))
    return files


def config(files: list[str], *overrides: str, **task: Any) -> StrategyConfig:
    made = {"kind": "csv", "files": files, "target": "sick", "standardise": "federated", **task}
    return StrategyConfig.load("bsp", ["stop.rounds=2", "local.steps=2", f"task={json.dumps(made)}", *overrides])


def cluster(**options: float) -> ClusterConfig:
    """The last silo is what the options say."""
    silos = [{"name": name, "speed": 100.0} for name in NAMES]
    return ClusterConfig.model_validate({"silos": [*silos[:-1], {**silos[-1], **options}]})


def trained_on(files: list[str], names: tuple[str, ...] = NAMES) -> pd.DataFrame:
    """The training rows of these silos, as one would pool them."""
    task, parts = CsvTask(tuple(files), "sick"), []
    for name in names:
        index = NAMES.index(name)
        rows = task._rows(SiloSlot(name, index, len(NAMES), seed=7))
        parts.append(pd.read_csv(files[index]).iloc[rows.train])
    return pd.concat(parts)


@pytest.mark.slow
@pytest.mark.parametrize("cipher", CIPHERS)
def test_all_standardise_by_all_rows(cipher: str, tmp_path: Path, scales: dict[str, dict[str, ColumnScale]]) -> None:
    files = tables(tmp_path)
    run_virtual(config(files, f"cipher={cipher}"), cluster(), tmp_path / "run")
    assert set(scales) == set(NAMES)
    assert len({repr(one) for one in scales.values()}) == 1, "bit by bit"
    pooled = trained_on(files)
    assert set(scales["a"]) == {"age", "dose"}
    for name, scale in scales["a"].items():
        assert scale.mean == pytest.approx(pooled[name].mean(), abs=1e-11)
        assert scale.deviation == pytest.approx(pooled[name].std(ddof=0), rel=1e-11)


def test_what_people_see_of_it(tmp_path: Path) -> None:
    files = tables(tmp_path)
    asked = {"bins": 4, "ranges": {"age": [0, 100]}}
    run_virtual(config(files, statistics=asked), cluster(), tmp_path / "run")
    found = json.loads((tmp_path / "run" / "statistics.json").read_text())
    pooled = trained_on(files)
    assert (found["silos"], found["rows"]) == (3, len(pooled))
    assert found["classes"] == pooled["sick"].value_counts().sort_index().tolist()
    age = found["columns"][0]
    assert (age["known"], age["missing"]) == (int(pooled["age"].notna().sum()), int(pooled["age"].isna().sum()))
    counts = np.histogram(pooled["age"].dropna(), [0, 25, 50, 75, 100])[0].tolist()
    shown = [count if count == 0 or count >= 5 else "<5" for count in counts]
    assert all(one is None or one == count for one, count in zip(age["counts"], shown, strict=True))
    assert age["mean"] == pytest.approx(pooled["age"].mean(), rel=5e-4)


WIDE = ["{kind: plain}", "{kind: bfv, members: 2}"]


def alone(files: list[str], cipher: str) -> StrategyConfig:
    task = {"kind": "survey", "of": {"kind": "csv", "files": files, "target": "sick", "statistics": {"bins": 4}}}
    changes = ["aggregation={kind: fedavg, weight: silo}", "evaluation={metrics: []}", f"task={json.dumps(task)}"]
    return StrategyConfig.load("bsp", ["stop.rounds=2", "local.steps=1", f"cipher={cipher}", *changes])


@pytest.mark.slow
def test_a_survey_without_training_has_the_statistics_of_one_before_a_training(tmp_path: Path) -> None:
    files, found = tables(tmp_path), []
    run_virtual(config(files, statistics={"bins": 4}), cluster(), tmp_path / "run")
    for number, cipher in enumerate(WIDE):
        run_virtual(alone(files, cipher), cluster(), tmp_path / str(number))
        found.append((tmp_path / str(number) / "statistics.json").read_text())
    assert set(found) == {(tmp_path / "run" / "statistics.json").read_text()}


@pytest.mark.slow
@pytest.mark.parametrize("cipher", WIDE)
def test_the_statistics_of_an_encrypted_survey_without_training_are_at_the_silos(
    cipher: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, home, run = alone(tables(tmp_path), cipher), tmp_path_factory.mktemp("e"), tmp_path / "run"
    keys = with_keys(made, tmp_path / "keys", monkeypatch, cluster())
    with silos_in_this_process():
        keep_state(monkeypatch, lambda identity: home / "state" / f"{identity.index}")
        FedSync(made, cluster(), out=run, timing=TIMING, keys=keys).start(DirectGrid(3))
    if keys is not None:
        with pytest.raises(ConfigError, match="the folder that `fedsync silo export` wrote"):
            statistics(run)
        export_model(home / "state", run)
    statistics(run)
    assert json.loads((run / "statistics.json").read_text())["silos"] == 3


@pytest.mark.slow
def test_a_survey_alone_leaves_the_training_as_it_was(tmp_path: Path) -> None:
    """Statistics without `standardise: federated` are for people: the model is that of a run without them."""
    files, models = tables(tmp_path), []
    for name, task in (("with", {"statistics": {"bins": 2}}), ("without", {})):
        run_virtual(config(files, **{"standardise": "own", **task}), cluster(), tmp_path / name)
        models.append(torch.load(tmp_path / name / "model.pt", weights_only=True))
    assert (tmp_path / "with" / "statistics.json").exists() and not (tmp_path / "without" / "statistics.json").exists()
    assert all(torch.equal(tensor, models[1][name]) for name, tensor in models[0].items())
    assert (tmp_path / "with" / "journal.jsonl").read_text().splitlines()[1:] == (
        (tmp_path / "without" / "journal.jsonl").read_text().splitlines()[1:]
    )


@pytest.mark.slow
@pytest.mark.parametrize("cipher", CIPHERS[:2])
def test_a_silo_that_comes_later_standardises_like_the_others(
    cipher: str, tmp_path: Path, scales: dict[str, dict[str, ColumnScale]]
) -> None:
    """It was in no round of the survey."""
    files = tables(tmp_path)
    run = config(files, f"cipher={cipher}", "stop.rounds=8", "min_silos=2")
    run_virtual(run, cluster(joins_at_s=2.0), tmp_path / "run")
    assert scales["c"] == scales["a"]
    assert scales["a"]["age"].mean == pytest.approx(trained_on(files, ("a", "b"))["age"].mean(), abs=1e-11)
    journal = (tmp_path / "run" / "journal.jsonl").read_text()
    assert '"c/1"' in journal, "and it took part"


def test_a_mean_of_four_people_is_not_used(tmp_path: Path) -> None:
    files = tables(tmp_path)
    for file in files:
        frame = pd.read_csv(file)
        frame.loc[1 if file == files[0] else 0 :, "dose"] = np.nan
        frame.to_csv(file, index=False)
    with pytest.raises(ConfigError, match="column 'dose': fewer than 5 cells are known in all silos together"):
        run_virtual(config(files), cluster(), tmp_path / "run")
    assert not (tmp_path / "run" / "statistics.json").exists()


def test_columns_that_differ_are_refused_by_the_silos_name(tmp_path: Path) -> None:
    files = tables(tmp_path)
    frame = pd.read_csv(files[2])
    frame["age"] = frame["age"].astype(str) + " years"
    frame.to_csv(files[2], index=False)
    with pytest.raises(ConfigError, match=r"c\.csv, line \d+, column 1: the cell looks like a number"):
        run_virtual(config(files), cluster(), tmp_path / "run")


def test_a_scale_may_be_given(tmp_path: Path, scales: dict[str, dict[str, ColumnScale]]) -> None:
    files = tables(tmp_path)
    run_virtual(config(files, standardise={"age": [50, 10], "dose": [1, 2.5]}), cluster(), tmp_path / "run")
    assert scales["a"] == {"age": ColumnScale(50.0, 10.0), "dose": ColumnScale(1.0, 2.5)}
    assert not (tmp_path / "run" / "survey").exists()
    with pytest.raises(ConfigError, match=r"standardise\.age \[50.*, 0.*\] is no mean and positive deviation"):
        config(files, standardise={"age": [50, 0]})
    with pytest.raises(
        ConfigError, match=r"numbers 'dose', and there is no scale for it. Write standardise: \{dose: \["
    ):
        run_virtual(config(files, standardise={"age": [50, 10]}), cluster(), tmp_path / "other")


@pytest.mark.parametrize("overrides", [(), ("min_silos=3",)])
def test_a_survey_of_fewer_silos_than_may_begin_ends_the_run(
    overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow = SurveyTrainer._next

    def failing(self: SurveyTrainer, sums: Vector) -> Vector:
        if self._place == 0:
            raise ConfigError("task", "its rows cannot be read", "Mend the file")
        return follow(self, sums)

    monkeypatch.setattr(SurveyTrainer, "_next", failing)
    with pytest.raises(RunError, match=r"of 2 silos, and min_silos is 3: a is missing .* cannot be read"):
        run_virtual(config(tables(tmp_path), *overrides), cluster(), tmp_path / "run")
