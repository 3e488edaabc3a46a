"""Intervals from sums beside those of the samples themselves."""

import numpy as np
import pytest

from fedsync.evaluation.metrics.classes import ClassCounts
from fedsync.evaluation.metrics.gain import JudgedSamples, gain_intervals
from fedsync.evaluation.metrics.named import shipped
from fedsync.evaluation.metrics.score_histograms import ScoreCounts
from tests.evaluation.metrics.make import block_sums, class_sums, error_sums, score_sums
from tests.evaluation.metrics.test_against_sklearn import drawn, pair_sums


@pytest.mark.full
def test_the_interval_of_an_auroc_is_that_of_a_bootstrap_of_samples() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    scores, labels = drawn(1, 400)
    mine = shipped("auroc", 2).interval(score_sums(ScoreCounts(), scores[:, 1], labels), seed=3)
    rng, found = np.random.default_rng(5), []
    for _ in range(1000):
        rows = np.concatenate([rng.choice(np.flatnonzero(labels == one), (labels == one).sum()) for one in (0, 1)])
        found.append(metrics.roc_auc_score(labels[rows], scores[rows, 1]))
    assert mine == pytest.approx(np.quantile(found, [0.025, 0.975]), abs=0.006)


@pytest.mark.slow
def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(7)
    covered = {"accuracy": 0, "mae": 0, "rmse": 0, "r2": 0}
    for each in range(300):
        labels = rng.integers(0, 2, 150)
        predicted = np.where(rng.random(150) < 0.8, labels, 1 - labels)
        truth = rng.normal(size=150)
        errors = error_sums(truth + rng.normal(size=150), truth)
        for name, sums, true in (
            ("accuracy", class_sums(ClassCounts(2), labels, predicted), 0.8),
            ("mae", errors, np.sqrt(2 / np.pi)),
            ("rmse", errors, 1.0),
            ("r2", errors, 0.0),
        ):
            low, high = shipped(name, 2).interval(sums, each) or (9, 9)
            covered[name] += low <= true <= high
    assert all(0.90 <= count / 300 <= 0.99 for count in covered.values()), covered


@pytest.mark.parametrize("classes", [2, 40])
def test_intervals_of_classes_hold_their_values(classes: int) -> None:
    rng = np.random.default_rng(1)
    labels = np.repeat(np.arange(classes), 30)
    predicted = np.where(rng.random(len(labels)) < 0.7, labels, rng.integers(0, classes, len(labels)))
    sums = class_sums(ClassCounts(classes), labels, predicted)
    for name in ("accuracy", "balanced_accuracy", "f1", "f1_macro"):
        metric = shipped(name, classes)
        low, high = metric.interval(sums, 1) or (9, 9)
        assert low < (metric.value(sums) or 0) < high and high - low < 0.4
        assert metric.interval(sums, 1) == (low, high)  # the seed's


def test_fewer_than_five_of_a_class_have_no_interval() -> None:
    for few, there in ((4, False), (5, True)):
        labels = np.array([1] * few + [0] * 20)
        scores = np.linspace(0.1, 0.9, len(labels))
        for name in ("auroc", "average_precision", "brier"):
            found = shipped(name, 2).interval(score_sums(ScoreCounts(), scores, labels), 1)
            assert (found is not None) == there
        predicted = labels[::-1].copy()
        for name in ("accuracy", "f1", "sensitivity"):
            found = shipped(name, 2).interval(class_sums(ClassCounts(2), labels, predicted), 1)
            assert (found is not None) == there
        numbers = np.arange(float(few))
        assert (shipped("mae").interval(error_sums(numbers, numbers**2), 1) is not None) == there
        assert (shipped("dice").interval(block_sums(numbers / 9, numbers / 9), 1) is not None) == there


def test_a_calibration_error_has_no_interval() -> None:
    """Percentiles of a bootstrap would lie above the value: of perfect scores, here, from 0.04 on."""
    rng = np.random.default_rng(0)
    scores = rng.beta(2, 2, 400)
    sums = score_sums(ScoreCounts(), scores, (rng.random(400) < scores).astype(np.int64))
    assert shipped("calibration_error", 2).interval(sums, 1) is None
    metrics = (shipped("brier", 2), shipped("calibration_error", 2))
    judged = JudgedSamples(
        metrics, {"scores/256": sums}, {"scores/256": np.zeros(9, np.int64)}, {"scores/256": np.zeros((9, 1), np.int64)}
    )
    assert list(gain_intervals(judged, judged)) == ["brier"]


def test_an_interval_stays_within_what_a_metric_may_be() -> None:
    shares = np.array([1.0] * 9 + [0.6])
    assert (shipped("dice").interval(block_sums(shares, shares), 1) or (0, 0))[1] == 1.0
    assert shipped("rmse").limits[0] == 0


def test_leaving_a_sample_out_is_leaving_its_pairs_out() -> None:
    rng = np.random.default_rng(2)
    risks, times, events = rng.normal(size=12), rng.normal(size=12), rng.integers(0, 2, 12)
    metric, sums = shipped("concordance"), pair_sums(risks, times, events)
    each = []
    for left in range(12):
        rest = np.arange(12) != left
        each.append(metric.value(pair_sums(risks[rest], times[rest], events[rest])))
    error = np.sqrt(11 / 12 * np.sum((np.array(each) - np.mean(each)) ** 2))
    low, high = metric.interval(sums, 1) or (0.0, 0.0)
    value = metric.value(sums) or 0.0
    assert low == pytest.approx(max(0.0, value - 2.200985 * error))
    assert high == pytest.approx(min(1.0, value + 2.200985 * error))
