"""Every shipped metric beside scikit-learn's or SciPy's, on the same scores."""

import math
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedsync.common.errors import ConfigError
from fedsync.evaluation.metrics.classes import ClassCounts
from fedsync.evaluation.metrics.metric_types import _T, Sums, number
from fedsync.evaluation.metrics.moments import ERRORS, PairCounts
from fedsync.evaluation.metrics.named import NAMES, classification, regression, shipped
from fedsync.evaluation.metrics.score_histograms import FINE, GROUPS, ScoreCounts, edges, middles
from tests.evaluation.metrics.make import Floats, Labels, block_sums, class_sums, error_sums, rounded, score_sums

sk = pytest.importorskip("sklearn.metrics")

WIDTH = 1 / FINE
"""Of the widest bin."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def drawn(seed: int, size: int, classes: int = 2, ties: bool = False) -> tuple[Floats, Labels]:
    """Probabilities [n, classes] that know something of labels [n], some of them nearly 0 or 1."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, size)
    logits = rng.normal(size=(size, classes)) * rng.choice([0.3, 2.0, 8.0]) + np.eye(classes)[labels]
    scores = np.exp(logits - logits.max(axis=1, keepdims=True))
    scores /= scores.sum(axis=1, keepdims=True)
    return (np.round(scores, 1) if ties else scores), labels


CASES = given(seed=st.integers(0, 10**6), size=st.integers(2, 120), ties=st.booleans())


@pytest.mark.slow
@CASES
@settings(max_examples=60, deadline=None)
def test_metrics_of_scores_are_scikit_learns_on_rounded_scores(seed: int, size: int, ties: bool) -> None:
    scores, labels = drawn(seed, size, ties=ties)
    statistic = ScoreCounts()
    sums, of_bins = score_sums(statistic, scores[:, 1], labels), rounded(scores[:, 1], FINE)
    found = {metric.name: number(metric, sums) for metric in classification(2) if metric.statistic == statistic}
    assert not statistic.problem(sums)
    both = 0 < labels.sum() < size
    assert found["auroc"] == (pytest.approx(sk.roc_auc_score(labels, of_bins)) if both else None)
    if labels.any():
        assert found["average_precision"] == pytest.approx(sk.average_precision_score(labels, of_bins))
    else:
        assert found["average_precision"] is None
    assert found["brier"] == pytest.approx(np.mean((of_bins - labels) ** 2))
    assert found["brier"] == pytest.approx(np.mean((scores[:, 1] - labels) ** 2), abs=WIDTH)
    # What the bins change: pairs of one bin, of which each counts half.
    if both:
        places = np.searchsorted(edges(FINE), scores[:, 1], side="left")
        same = np.mean(places[labels == 1][:, None] == places[labels == 0])
        assert found["auroc"] == pytest.approx(sk.roc_auc_score(labels, scores[:, 1]), abs=same / 2 + 1e-12)
        wrong, right = np.array(statistic.roc(sums)).T
        assert found["auroc"] == pytest.approx(sk.auc(wrong, right))
        assert (wrong[0], right[0], wrong[-1], right[-1]) == (0, 0, 1, 1)
    else:
        assert statistic.roc(sums) == []


@CASES
@settings(max_examples=40, deadline=None)
def test_calibration_is_that_of_equal_spans(seed: int, size: int, ties: bool) -> None:
    scores, labels = drawn(seed, size, ties=ties)
    exact = scores[:, 1]
    span = np.clip(np.ceil(exact * GROUPS) - 1, 0, GROUPS - 1)  # a span has its upper end
    each = [abs(labels[span == one].sum() - exact[span == one].sum()) for one in range(GROUPS)]
    found = number(shipped("calibration_error", 2), score_sums(ScoreCounts(), exact, labels))
    assert found == pytest.approx(sum(each) / size, abs=WIDTH / 2)


@pytest.mark.parametrize("classes", [3, 5])
def test_metrics_of_many_classes_are_means_over_one_against_the_rest(classes: int) -> None:
    scores, labels = drawn(classes, 300, classes)
    sums = score_sums(ScoreCounts(classes, 32), scores, labels)
    of_bins, truth = rounded(scores, 32), np.eye(classes)[labels]
    found = {name: number(shipped(name, classes), sums) for name in ("auroc", "average_precision", "brier")}
    assert found["auroc"] == pytest.approx(
        np.mean([sk.roc_auc_score(*pair) for pair in zip(truth.T, of_bins.T, strict=True)])
    )
    assert found["average_precision"] == pytest.approx(sk.average_precision_score(truth, of_bins, average="macro"))
    assert found["brier"] == pytest.approx(np.mean(((of_bins - truth) ** 2).sum(axis=1)))
    assert shipped("auroc", classes).interval(sums, 1) is None
    assert ScoreCounts(classes, 32).support(sums) == {str(c): int((labels == c).sum()) for c in range(classes)}


@pytest.mark.slow
@given(seed=st.integers(0, 10**6), size=st.integers(1, 80), classes=st.sampled_from([2, 3, 7, 40]))
@settings(max_examples=60, deadline=None)
def test_metrics_of_classes_are_scikit_learns(seed: int, size: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    labels, predicted = rng.integers(0, classes, size), rng.integers(0, classes, size)
    statistic = ClassCounts(classes)
    sums = class_sums(statistic, labels, predicted)
    assert not statistic.problem(sums)
    assert number(shipped("accuracy", classes), sums) == pytest.approx(sk.accuracy_score(labels, predicted))
    balanced = sk.balanced_accuracy_score(labels, predicted)
    assert number(shipped("balanced_accuracy", classes), sums) == pytest.approx(balanced)
    macro = sk.f1_score(labels, predicted, average="macro")
    assert number(shipped("f1_macro", classes), sums) == pytest.approx(macro)
    if classes > 2:
        assert number(shipped("f1", classes), sums) == pytest.approx(macro)
        return
    there = labels.any() or predicted.any()
    assert number(shipped("f1", 2), sums) == (pytest.approx(sk.f1_score(labels, predicted)) if there else None)
    for name, label in (("sensitivity", 1), ("specificity", 0)):
        recall = sk.recall_score(labels, predicted, pos_label=label) if (labels == label).any() else None
        assert number(shipped(name, 2), sums) == (None if recall is None else pytest.approx(recall))


@given(seed=st.integers(0, 10**6), size=st.integers(2, 80), offset=st.sampled_from([0.0, 100.0]))
@settings(max_examples=40, deadline=None)
def test_metrics_of_numbers_are_scikit_learns(seed: int, size: int, offset: float) -> None:
    rng = np.random.default_rng(seed)
    truth = rng.normal(offset, 2.0, size)
    predicted = truth + rng.normal(size=size)
    found = {metric.name: number(metric, error_sums(predicted, truth)) for metric in regression()}
    assert found == {
        "mae": pytest.approx(sk.mean_absolute_error(truth, predicted)),
        "rmse": pytest.approx(math.sqrt(sk.mean_squared_error(truth, predicted))),
        "r2": pytest.approx(sk.r2_score(truth, predicted), rel=1e-6, abs=1e-6),
    }


def test_numbers_that_are_all_the_same_have_no_r2() -> None:
    same = np.full(20, 0.1)
    assert number(shipped("r2"), error_sums(same + 1, same)) is None
    assert number(shipped("r2"), np.zeros(ERRORS.size)) is None


def test_perplexity_is_of_tokens_not_of_sequences() -> None:
    tokens, losses = np.array([10.0, 2.0]), np.array([20.0, 1.0])
    assert number(shipped("perplexity"), block_sums(tokens, losses)) == pytest.approx(math.exp(21 / 12))


def pair_sums(risks: Floats, times: Floats, events: Labels) -> Sums:
    """By the definition, pair by pair."""
    table = np.zeros((17, 4))
    for i in range(len(risks)):
        table[[0, 1 + i % 16], 0] += 1
        for j in range(len(risks)):
            if events[i] and (times[i] < times[j] or (times[i] == times[j] and not events[j])):
                found = np.array([0, 1, risks[i] > risks[j], risks[i] == risks[j]], float)
                for row in {0, 1 + i % 16, 1 + j % 16}:
                    table[row] += found
    return table.ravel()


def test_concordance_without_censoring_is_kendalls() -> None:
    rng = np.random.default_rng(3)
    risks, times = rng.normal(size=40), rng.normal(size=40)
    sums = pair_sums(risks, times, np.ones(40, np.int64))
    assert not PairCounts().problem(sums)
    assert shipped("concordance").support(sums) == {"samples": 40}, "reports add up all that a metric is of"
    tau = stats.kendalltau(-risks, times).statistic
    assert number(shipped("concordance"), sums) == pytest.approx((tau + 1) / 2)
    ties = pair_sums(np.zeros(6), np.arange(6.0), np.ones(6, np.int64))
    assert number(shipped("concordance"), ties) == 0.5
    assert number(shipped("concordance"), pair_sums(risks, times, np.zeros(40, np.int64))) is None


@pytest.mark.parametrize("name", NAMES)
def test_a_silo_without_samples_has_no_numbers(name: str) -> None:
    metric = shipped(name, 2)
    assert number(metric, np.zeros(metric.statistic.size)) is None
    assert metric.interval(np.zeros(metric.statistic.size), 1) is None
    assert not metric.statistic.problem(np.zeros(metric.statistic.size))


def test_bins_are_fine_where_confident_models_are() -> None:
    ends = np.concatenate([[0.0], edges(FINE), [1.0]])
    assert len(ends) == 257
    assert np.diff(ends).max() == WIDTH and np.diff(ends).min() > 0
    assert np.isin(np.arange(17) / 16, ends).all()  # spans of the calibration error end where bins end
    assert ends[1] < 2e-7
    assert middles(FINE)[0] == ends[1] / 2


def test_metrics_of_classes_need_their_number() -> None:
    assert classification(2000) == classification(1) == ()
    for name, classes in (("auroc", None), ("f1", 2000), ("auroc", 200), ("sensitivity", 3)):
        with pytest.raises(ConfigError, match=r"evaluation\.metrics"):
            shipped(name, classes)


def test_students_t_is_scipys() -> None:
    assert pytest.approx(stats.t.ppf(0.975, np.arange(1, 16))) == _T
