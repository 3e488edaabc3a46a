"""What evaluations come to in the files of a run."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedsync.core.actions import Attested, KeepBest
from fedsync.core.journal import JournalEntry
from fedsync.core.orders import Evaluation, PooledFigures, Score, Split, Subject
from fedsync.evaluation.metrics.named import classification
from fedsync.evaluation.metrics.score_histograms import ScoreCounts
from fedsync.evaluation.version_scores import Settled
from fedsync.observe.ledger import Ledger
from fedsync.observe.quality import evaluations
from fedsync.observe.quality.evaluations import JudgedModels, curves, metrics_of
from tests.evaluation.metrics.make import class_sums, score_sums
from tests.evaluation.metrics.test_against_sklearn import drawn

METRICS = classification(2)


def found(seed: int, size: int = 60) -> Evaluation:
    scores, labels = drawn(seed, size)
    said = (scores[:, 1] > 0.5).astype(np.int64)
    sums = {
        "scores/256": tuple(score_sums(ScoreCounts(), scores[:, 1], labels).tolist()),
        "confusion/2": tuple(class_sums(METRICS[0].statistic, labels, said).tolist()),
    }
    return Evaluation(0.5 * size, float((said == labels).sum()), size, sums=sums)


def test_a_model_has_estimates_pooled_and_of_each_silo_and_curves() -> None:
    told = {"a": found(1), "b": found(2), "c": found(3, 6)}
    judged = {(Split.TEST, Subject.LAST): Settled(Score(4, 0.5, 0.5), told)}
    estimates, drawn_there = evaluations.summary(judged, METRICS)
    assert estimates["higher_is_better"]["brier"] is False and estimates["higher_is_better"]["auroc"] is True
    model = estimates["test"]["last"]
    assert model["version"] == 4 and list(model["silos"]) == ["a", "b", "c"]
    pooled = model["pooled"]["auroc"]
    assert pooled["low"] < pooled["value"] < pooled["high"] and sum(pooled["support"].values()) == 126
    assert model["silos"]["c"]["auroc"]["low"] is None  # fewer than five of a class
    assert model["pooled"]["loss"] == {"value": 0.5, "low": None, "high": None, "support": {"samples": 126}}
    lines = drawn_there["test"]["last"]["curves"]
    wrong, right = np.array(lines["roc"]).T
    assert float(np.trapezoid(right, wrong)) == pytest.approx(pooled["value"])
    assert sum(count for _, _, count in lines["calibration"]) == 126
    error = sum(count * abs(score - share) for score, share, count in lines["calibration"]) / 126
    assert error == pytest.approx(model["pooled"]["calibration_error"]["value"])
    json.dumps([estimates, drawn_there], allow_nan=False)


def test_a_test_split_that_silos_share_counts_once() -> None:
    """Eight silos with the same samples know no more than one."""

    def model(told: dict[str, Evaluation]) -> tuple[Any, Any]:
        judged = {(Split.TEST, Subject.LAST): Settled(Score(4, 0.5, 0.5), told)}
        estimates, lines = evaluations.summary(judged, METRICS)
        return estimates["test"]["last"]["pooled"], lines["test"]["last"]["curves"]["calibration"]

    assert model({f"silo-{index}": found(1) for index in range(8)}) == model({"alone": found(1)})
    apart = replace(found(1), loss=29.0)
    assert (
        model({"a": found(1), "b": apart})[0]["accuracy"]["support"] != model({"a": found(1)})[0]["accuracy"]["support"]
    )


def test_of_sealed_figures_there_are_pooled_numbers_only() -> None:
    ledger = Ledger(measured=METRICS)
    score = Score(2, 0.9, 0.4, {"auroc": 0.95})
    ledger.add(JournalEntry(1.0, (), (Attested(PooledFigures(3, 0.5, score)),), ""))
    estimates, drawn_there = evaluations.summary(ledger.models(), METRICS)
    model = estimates["test"]["last"]
    assert model["silos"] == {} and drawn_there == {}
    assert model["pooled"]["auroc"] == {"value": 0.95, "low": None, "high": None, "support": {}}


def test_the_best_keeps_what_silos_found_of_it() -> None:
    judged, told = JudgedModels(validates=True), {"a": found(1)}
    best = Settled(Score(1, 0.5, 0.5), told)
    judged.settle([best, Settled(Score(2, 0.4, 0.5), told)])
    judged.keep(KeepBest(best.score, 0.5))
    told["a"] = found(2)
    models = judged.models()
    assert models[Split.VALIDATION, Subject.BEST].found == {"a": found(1)}
    assert models[Split.VALIDATION, Subject.LAST].score.version == 2


def test_curves_are_of_scores() -> None:
    assert curves({"a": Evaluation(1.0, 1.0, 2)}, METRICS) == {}


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({}, ()),
        ({"evaluation": {"metrics": ["f1"], "classes": 2}}, ("f1",)),
        ({"evaluation": {"metrics": ["mine"], "classes": 2}}, None),
        ({"evaluation": {"odd": 1}}, None),
    ],
)
def test_metrics_are_known_from_a_journal(config: dict[str, Any], names: tuple[str, ...] | None) -> None:
    metrics = metrics_of(config)
    assert names == (None if metrics is None else tuple(metric.name for metric in metrics))
