"""The matrix of models and silos, and what follows from it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsync.core.actions import Dispatch, Evaluate
from fedsync.core.events import Evaluated, SiloLost
from fedsync.core.journal import JournalEntry
from fedsync.core.orders import Evaluation, Split, Subject, WorkOrder
from fedsync.evaluation.metrics.moments import BlockSums, Mean
from fedsync.evaluation.metrics.named import shipped
from fedsync.evaluation.metrics.score_histograms import edges
from fedsync.extras.cross_site.cross_site_matrix import CrossSiteBooks, Document, Matrix, ModelRow
from tests.core.make import answer, joined

EXAMPLE = Path(__file__).with_name("cross_site.json")
LAST, BEST = ModelRow(Subject.LAST, about={"version": 9}), ModelRow(Subject.BEST, about={"version": 4})


def own(subject: Subject, silo: str) -> ModelRow:
    return ModelRow(subject, silo, {"samples": 64})


def found(correct: float, samples: int = 20, loss: float | None = 5.0, **sums: Any) -> Evaluation:
    return Evaluation(loss, correct, samples, sums=sums)


def matrix(**changes: Any) -> Matrix:
    """Two silos: the best model has 16 and 10 of 20, their own 12 and 14."""
    cells = {
        (LAST, "a"): found(14),
        (LAST, "b"): found(10),
        (BEST, "a"): found(16),
        (BEST, "b"): found(10),
        (own(Subject.LOCAL, "a"), "a"): found(12, loss=8.0),
        (own(Subject.LOCAL, "b"), "b"): found(14),
    }
    return Matrix(["a", "b"], cells=cells, **changes)


def values(cells: list[Any]) -> list[Any]:
    return [None if cell is None else cell["value"] for cell in cells]


def test_rows_are_models_and_columns_silos_and_pooled_local_models_are_each_silo_s_own() -> None:
    document = matrix().document()
    assert document["models"] == [
        {"subject": "last", "silo": None, "version": 9},
        {"subject": "best", "silo": None, "version": 4},
        {"subject": "local", "silo": "a", "samples": 64},
        {"subject": "local", "silo": "b", "samples": 64},
    ]
    accuracy = document["metrics"]["accuracy"]
    assert [values(row) for row in accuracy["matrix"]] == [[0.7, 0.5], [0.8, 0.5], [0.6, None], [None, 0.7]]
    pooled = accuracy["pooled"]
    assert {subject: cell["value"] for subject, cell in pooled.items()} == {"last": 0.6, "best": 0.65, "local": 0.65}
    assert pooled["local"]["support"] == {"samples": 40}


def test_a_gain_is_positive_where_the_federation_is_better() -> None:
    """Of accuracy more is better, of loss less: 5 instead of 8 over 20 samples is a gain of 0.15."""
    metrics = matrix().document()["metrics"]
    gain = metrics["accuracy"]["gain"]
    assert gain.keys() == {"last", "best"}
    assert gain["best"]["a"]["value"] == pytest.approx(0.2) and gain["best"]["b"]["value"] == pytest.approx(-0.2)
    assert metrics["loss"]["gain"]["best"]["a"]["value"] == pytest.approx(0.15)


def test_gains_have_the_intervals_that_silos_tell() -> None:
    """With the local model those of models before it, with the tuned one its own; the last may be the best."""
    part, tuned = matrix(), ModelRow(Subject.TUNED, "a")
    part.cells[own(Subject.LOCAL, "a"), "a"] = replace(found(12), gains={"last": {"accuracy": (-0.1, 0.3)}})
    part.cells[tuned, "a"] = replace(found(15), gains={"tuned": {"accuracy": (0.0, 0.2)}})
    gain = part.document()["metrics"]["accuracy"]["gain"]
    assert gain["last"]["a"] == {"value": pytest.approx(0.1), "low": -0.1, "high": 0.3}
    assert (gain["tuned"]["a"]["low"], gain["tuned"]["a"]["high"]) == (0.0, 0.2)
    assert gain["best"]["a"]["low"] is None, "nobody told of it"
    part.cells[BEST, "a"] = part.cells[LAST, "a"]
    assert part.document()["metrics"]["accuracy"]["gain"]["best"]["a"] == gain["last"]["a"]


def test_a_model_of_another_silo_is_no_own_one() -> None:
    """Where b's local model was tried at a, too: neither pooled nor a gain changes."""
    plain, shared = matrix(), matrix()
    shared.cells[own(Subject.LOCAL, "b"), "a"] = found(3)
    one, other = (each.document()["metrics"]["accuracy"] for each in (plain, shared))
    assert values(other["matrix"][3]) == [0.15, 0.7]
    assert (one["pooled"], one["gain"]) == (other["pooled"], other["gain"])


def test_a_silo_without_its_own_model_has_no_gain() -> None:
    part = matrix(missing=[(ModelRow(Subject.LOCAL, "b"), "training diverged")])
    del part.cells[own(Subject.LOCAL, "b"), "b"]
    document = part.document()
    assert document["metrics"]["accuracy"]["gain"]["best"] == {
        "a": {"value": pytest.approx(0.2), "low": None, "high": None},
        "b": None,
    }
    assert document["missing"] == [{"subject": "local", "silo": "b", "reason": "training diverged"}]


def test_of_a_silo_that_was_lost_the_matrix_says_why_its_model_is_missing() -> None:
    local = WorkOrder("a/7", 0, 7, 8, 2, 0.1, 9, evaluate=False, subject=Subject.LOCAL)
    given = (Dispatch("a", local), Dispatch("b", replace(local, update_id="b/7")))
    asked = Evaluate(0, ("a",), Split.TEST, Subject.LOCAL)
    told = Evaluated(3.0, "a", 0, found(12), (), Split.TEST, Subject.LOCAL)
    books = CrossSiteBooks()
    books.add(JournalEntry(1.0, tuple(joined("a", "b")), given, ""))
    books.add(JournalEntry(2.0, (SiloLost(2.0, "b", "no sign of life"), answer("a", local)), (asked,), ""))
    books.add(JournalEntry(3.0, (told,), (), ""))
    document = books.document()
    assert document is not None
    assert document["missing"] == [{"subject": "local", "silo": "b", "reason": "it was lost: no sign of life"}]
    assert document["models"] == [{"subject": "local", "silo": "a", "samples": 16}]


def test_a_silo_without_test_samples_has_no_value() -> None:
    part = matrix()
    part.cells[LAST, "b"] = found(0, samples=0, loss=0.0)
    document = part.document()["metrics"]["accuracy"]
    assert document["matrix"][0][1] == {"value": None, "low": None, "high": None, "support": {"samples": 0}}
    assert document["pooled"]["last"]["value"] == 0.7


def scores(own_class: list[float], others: list[float]) -> tuple[float, ...]:
    ends = edges(128)
    table = [np.bincount(np.searchsorted(ends, each, "left"), minlength=256) for each in (others, own_class)]
    return tuple(np.concatenate(table).astype(float))


def test_metrics_are_worked_out_of_sums() -> None:
    """Of one class alone there is no AUROC: the cell says so, and the silo has no gain."""
    auroc = shipped("auroc", 2)
    part = Matrix(["a", "b"], [auroc])
    key = auroc.statistic.key
    part.cells[LAST, "a"] = found(9, 9, **{key: scores([0.9] * 4 + [0.2], [0.5] * 4)})
    part.cells[LAST, "b"] = found(5, 5, **{key: scores([0.7] * 5, [])})
    part.cells[own(Subject.LOCAL, "a"), "a"] = found(9, 9, **{key: scores([0.9] * 5, [0.5] * 4)})
    part.cells[own(Subject.LOCAL, "b"), "b"] = found(5, 5, **{key: scores([0.7] * 5, [])})
    found_there = part.document()["metrics"]["auroc"]
    assert values(found_there["matrix"][0]) == [pytest.approx(0.8), None]
    assert found_there["matrix"][0][0]["support"] == {"0": 4, "1": 5}
    assert found_there["gain"]["last"]["a"]["value"] == pytest.approx(-0.2) and found_there["gain"]["last"]["b"] is None
    assert found_there["pooled"]["last"]["support"] == {"0": 4, "1": 10}


def test_a_metric_by_the_name_of_a_plain_figure_takes_its_place() -> None:
    accuracy = Mean("accuracy", BlockSums("accuracy"))
    table = np.zeros((16, 2))
    table[0] = 10, 9
    part = Matrix(["a"], [accuracy], {(LAST, "a"): found(3, 10, **{accuracy.statistic.key: tuple(table.ravel())})})
    assert part.document()["metrics"]["accuracy"]["matrix"] == [
        [{"value": 0.9, "low": None, "high": None, "support": {"samples": 10}}]
    ]


def test_the_example_is_what_is_written() -> None:
    """What is drawn from the example is drawn from a run's file too."""
    example: Document = json.loads(EXAMPLE.read_text())
    written = json.loads(json.dumps(matrix().document()))
    assert example.keys() == written.keys()
    for metric in example["metrics"].values():
        for cell in (cell for row in metric["matrix"] for cell in row if cell is not None):
            assert cell.keys() == {"value", "low", "high", "support"} and isinstance(cell["support"], dict)
    assert written["metrics"]["accuracy"].keys() == example["metrics"]["accuracy"].keys()
