"""A share of a silo's training samples is held out for validation, in every shipped task that has data of its own."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from fedsync.common.errors import ConfigError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import Split
from fedsync.policies.schema import kinds
from fedsync.simulation.run import run_virtual
from fedsync.tasks.row_split import held_out
from fedsync.tasks.task_protocol import SiloData, SiloSlot
from fedsync.tasks.task_section import AnyTask, TaskSection
from fedsync.train.loop import Trainer
from tests.tasks.given import slot

SECTIONS = {kind: {field.name for field in fields(section)} for kind, section in kinds("task").items()}
TASK: TypeAdapter[TaskSection] = TypeAdapter(AnyTask)
BLOBS = {"data": {"kind": "blobs", "samples": 300}}
KINDS: dict[str, dict[str, Any]] = {
    "digits": {},
    "csv": {"files": ["a.csv", "b.csv"], "target": "sick", "standardise": {"age": [30.0, 10.0]}},
    "images": {"data": {"kind": "digits28", "samples": 200}},
    "sequences": {"data": {"kind": "keywords", "samples": 200}},
    "mlp": BLOBS,
    "linear": {"data": {"kind": "sparse", "samples": 200, "features": 50}},
    "k-means": BLOBS,
    "fuzzy-c-means": BLOBS,
    "gaussian-mixture": BLOBS,
    "factorisation": {"data": {"kind": "ratings", "users": 100}},
}


def splits(kind: str, index: int, **options: object) -> SiloData:
    task = TASK.validate_python({"kind": kind, **KINDS[kind], **options}).build()
    return task.data(SiloSlot("ab"[index], index, 2, seed=7))


def rows(*splits: Any) -> list[bytes]:
    """The samples of splits, in an order that says nothing."""
    tables = [torch.cat([each.double().reshape(len(each), -1) for each in split.tensors], dim=1) for split in splits]
    return sorted(row.numpy().tobytes() for table in tables for row in table)


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, first in (("a", 20), ("b", 40)):
        lines = [f"{first + row / 10},{row % 3 // 2}" for row in range(90)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["age,sick", *lines]))


def test_every_kind_with_a_test_share_has_a_validation_share() -> None:
    assert KINDS.keys() == {kind for kind, section in SECTIONS.items() if "test_share" in section}
    assert KINDS.keys() == {kind for kind, section in SECTIONS.items() if "validation" in section}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", [0, 1])
def test_it_is_taken_from_the_training_samples_alone(tables: None, kind: str, index: int) -> None:
    whole, parts = splits(kind, index), splits(kind, index, validation=0.2)
    assert whole.validation is None and parts.validation is not None
    assert rows(parts.test) == rows(whole.test)
    assert rows(parts.train, parts.validation) == rows(whole.train)
    assert len(parts.validation) == round(0.2 * len(whole.train))
    again, other = splits(kind, index, validation=0.2), splits(kind, index, validation=0.5)
    assert rows(again.validation) == rows(parts.validation) and rows(again.train) == rows(parts.train)
    assert len(other.validation) == round(0.5 * len(whole.train))


@pytest.mark.parametrize("kind", ["digits", "csv", "images", "sequences", "mlp", "linear"])
def test_each_class_has_its_part_of_it(tables: None, kind: str) -> None:
    def counts(split: Any) -> Tensor:
        return torch.bincount(split.tensors[-1].long(), minlength=10)

    parts = splits(kind, 0, validation=0.3)
    whole = counts(parts.train) + counts(parts.validation)
    assert (abs(counts(parts.validation) - 0.3 * whole) < 1).all()


def test_the_seed_and_the_silo_decide() -> None:
    targets = np.arange(60, dtype=np.int64) % 3
    drawn = [held_out(targets, 0.25, each)[1] for each in (slot(), slot(), slot(1, 2), slot(seed=8))]
    first, again, other, seeded = (rows.tolist() for rows in drawn if rows is not None)
    assert first == again and other != first != seeded


def test_few_samples_of_many_classes_are_dealt_by_the_largest_rest() -> None:
    """0.3 of (4, 3, 2, 1) is (1.2, 0.9, 0.6, 0.3): one whole sample, and of the rests 0.9 and 0.6 are the largest."""
    train, kept = held_out(np.repeat([0, 1, 2, 3], [4, 3, 2, 1]), 0.3, slot())
    assert kept is not None and sorted([*train, *kept]) == list(range(10))
    assert np.repeat([0, 1, 2, 3], [4, 3, 2, 1])[kept].tolist() == [0, 1, 2]
    numbers = held_out(np.arange(100, dtype=np.float32), 0.2, slot())[1]
    assert numbers is not None and (np.bincount(numbers // 10) == 2).all()


@pytest.mark.parametrize(("share", "samples"), [(0.01, 40), (0.99, 40), (0.5, 1), (0.2, 0)])
def test_a_share_that_leaves_a_side_empty_is_refused(share: float, samples: int) -> None:
    with pytest.raises(ConfigError, match=rf"task\.validation: {share} of the {samples} .* 'silo-0'"):
        held_out(np.zeros(samples, np.int64), share, slot())


def test_columns_and_means_are_of_training_rows_alone(tables: None) -> None:
    """What silos survey, and what a silo standardises by itself with, must not know the validation rows."""
    options = {**KINDS["csv"], "validation": 0.3}
    task = TASK.validate_python({"kind": "csv", **options}).build()
    data, found = task.data(SiloSlot("a", 0, 2, 7)), task.columns(SiloSlot("a", 0, 2, 7))
    cells = data.train.tensors[0][:, 0].double().numpy() * 10 + 30
    np.testing.assert_allclose(np.sort(found.numbers["age"]), np.sort(cells), atol=1e-4)
    own = splits("csv", 0, validation=0.3, standardise="own").train.tensors[0]
    assert abs(own.mean()) < 1e-6 and own.std(correction=0) == pytest.approx(1)


def test_rounds_go_by_it_and_the_test_split_is_evaluated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Split]] = []
    honest = Trainer._evaluate

    def evaluate(self, split):  # type: ignore[no-untyped-def]
        asked.append((self._slot.name, split))
        return honest(self, split)

    monkeypatch.setattr(Trainer, "_evaluate", evaluate)
    silos = ClusterConfig.model_validate({"silos": [{"name": name, "speed": 100} for name in "ab"]})
    changes = ["stop.rounds=3", "local.steps=2", "task={kind: digits, validation: 0.2}"]
    run_virtual(StrategyConfig.load("bsp", changes), silos, tmp_path)
    found = json.loads((tmp_path / "summary.json").read_text())["evaluation"]
    assert found.keys() >= {"validation", "test"}
    # The test split: of the last version and of the best, unless they are one.
    tests = [name for name, split in asked if split is Split.TEST]
    assert {tests.count(name) for name in "ab"} <= {1, 2} and len(asked) - len(tests) >= 3 * 2
