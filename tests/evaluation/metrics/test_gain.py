"""Intervals of what one model gains over another, beside those of the samples themselves."""

from dataclasses import replace

import numpy as np
import pytest

from fedsync.core.orders import Evaluation
from fedsync.evaluation.metrics.classes import ClassCounts
from fedsync.evaluation.metrics.gain import JudgedSamples, LocalGains, gain_intervals
from fedsync.evaluation.metrics.metric_types import AnyMetric
from fedsync.evaluation.metrics.named import shipped
from fedsync.evaluation.metrics.score_histograms import ScoreCounts
from tests.evaluation.metrics.make import Floats, Labels, binned, class_sums, error_sums, rounded, score_sums
from tests.evaluation.metrics.test_against_sklearn import pair_sums

NAMES = ("auroc", "brier", "accuracy", "f1")


def judged(labels: Labels, scores: Floats, names: tuple[str, ...] = NAMES) -> JudgedSamples:
    """What a model of two classes found, by the scores [n] of class 1."""
    metrics = tuple(shipped(name, 2) for name in names)
    counts, histogram, said = ClassCounts(2), ScoreCounts(), (scores > 0.5).astype(np.int64)
    sums = {counts.key: class_sums(counts, labels, said), histogram.key: score_sums(histogram, scores, labels)}
    cells = {
        counts.key: (2 * labels + said)[:, None],
        histogram.key: (labels * histogram.bins + binned(scores, histogram.resolution))[:, None],
    }
    return JudgedSamples(metrics, sums, dict.fromkeys(cells, labels), cells)


def two_models(size: int, seed: int = 1) -> tuple[Labels, Floats, Floats]:
    """Labels, and scores of two models that find the same samples hard; the first is the better one."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, size)
    hard = labels + rng.normal(size=size)
    one, other = (1 / (1 + np.exp(0.5 - hard - noise * rng.normal(size=size))) for noise in (0.2, 0.6))
    return labels, one, other


def of_numbers(name: str, mine: Floats, other: Floats) -> tuple[float, float]:
    metric: AnyMetric = shipped(name)
    both = [JudgedSamples((metric,), {metric.statistic.key: sums}) for sums in (mine, other)]
    return gain_intervals(*both)[name]


@pytest.mark.full
def test_a_gain_s_interval_is_that_of_samples_drawn_for_both_models() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    labels, one, other = two_models(120)
    found = gain_intervals(judged(labels, one), judged(labels, other))
    rng, drawn = np.random.default_rng(5), {"auroc": [], "accuracy": []}  # type: ignore[var-annotated]
    for _ in range(1000):
        rows = np.concatenate([rng.choice(np.flatnonzero(labels == one_), (labels == one_).sum()) for one_ in (0, 1)])
        truth = labels[rows]
        aucs = [metrics.roc_auc_score(truth, rounded(each[rows], 128)) for each in (one, other)]
        drawn["auroc"].append(aucs[0] - aucs[1])
        drawn["accuracy"].append(np.mean((one[rows] > 0.5) == truth) - np.mean((other[rows] > 0.5) == truth))
    for name, differences in drawn.items():
        assert found[name] == pytest.approx(np.quantile(differences, [0.025, 0.975]), abs=0.01)


def test_of_the_same_samples_a_gain_is_surer_than_of_others() -> None:
    """Both find the same samples hard: the interval is far narrower than those of both models let it seem."""
    labels, one, other = two_models(120)
    low, high = gain_intervals(judged(labels, one), judged(labels, other))["auroc"]
    alone = [shipped("auroc", 2).interval(judged(labels, each).sums[ScoreCounts().key], 0) for each in (one, other)]
    apart = np.sqrt(sum((ends[1] - ends[0]) ** 2 for ends in alone if ends is not None))
    assert high - low < 0.7 * apart


def test_a_model_gains_nothing_over_itself() -> None:
    labels, one, _ = two_models(60)
    same = judged(labels, one)
    assert set(gain_intervals(same, same).values()) == {(0.0, 0.0)}
    errors = error_sums(one, labels.astype(float))
    assert of_numbers("rmse", errors, errors) == (0.0, 0.0)


def test_gains_of_what_should_be_low_are_positive_too() -> None:
    labels, one, _ = two_models(200)
    worse = np.random.default_rng(3).random(200)
    found = gain_intervals(judged(labels, one), judged(labels, worse))
    assert all(0 < low < high for low, high in found.values()) and found.keys() == set(NAMES)
    back = gain_intervals(judged(labels, worse), judged(labels, one))
    for name, (low, high) in found.items():
        assert back[name] == pytest.approx((-high, -low))


def test_fewer_than_five_of_a_class_have_no_gain_interval() -> None:
    for few, there in ((4, False), (5, True)):
        labels = np.array([1] * few + [0] * 20)
        scores = np.linspace(0.1, 0.9, len(labels))
        found = gain_intervals(judged(labels, scores), judged(labels, scores[::-1].copy()))
        assert bool(found) == there
        numbers = np.arange(float(few))
        metric = shipped("mae")
        sums = {metric.statistic.key: error_sums(numbers, numbers**2)}
        assert bool(gain_intervals(JudgedSamples((metric,), sums), JudgedSamples((metric,), sums))) == there


@pytest.mark.parametrize("name", ["mae", "concordance"])
def test_a_silo_without_test_samples_has_no_gain_interval(name: str) -> None:
    metric = shipped(name)
    nothing = JudgedSamples((metric,), {metric.statistic.key: np.zeros(metric.statistic.size)})
    assert gain_intervals(nothing, nothing) == {}


def test_of_sixteen_errors_the_interval_is_student_s() -> None:
    """A group of one sample each: the paired t-interval of the mean difference, with 15 degrees of freedom."""
    rng = np.random.default_rng(4)
    truth, errors = rng.normal(size=16), np.abs(rng.normal(size=(2, 16)))
    differences = errors[1] - errors[0]
    half = 2.131449546 * differences.std(ddof=1) / 4
    low, high = of_numbers("mae", *(error_sums(truth + each, truth) for each in errors))
    assert (low, high) == pytest.approx((differences.mean() - half, differences.mean() + half))


def test_gains_of_a_concordance_have_intervals() -> None:
    rng = np.random.default_rng(2)
    times, events = rng.normal(size=60), rng.integers(0, 2, 60)
    low, high = of_numbers("concordance", *(pair_sums(risk, times, events) for risk in (-times, rng.normal(size=60))))
    assert 0 < low < high <= 1


def test_what_was_judged_by_other_samples_is_not_compared() -> None:
    labels, one, other = two_models(60)
    mine = judged(labels, one)
    assert not gain_intervals(mine, judged(1 - labels, other))
    assert not gain_intervals(mine, replace(mine, sums={key: sums * np.nan for key, sums in mine.sums.items()}))


@pytest.mark.full
def test_intervals_cover_the_true_gain_about_as_often_as_they_say() -> None:
    """Two models that are right about 8 and 7 of 10 samples, mostly the same: the true gain is 0.1."""
    rng, covered = np.random.default_rng(7), 0
    for _ in range(300):
        labels, hard = rng.integers(0, 2, 150), rng.random(150)
        one, other = (np.where(hard < share, labels, 1 - labels) * 0.8 + 0.1 for share in (0.8, 0.7))
        low, high = gain_intervals(judged(labels, one, ("accuracy",)), judged(labels, other, ("accuracy",)))["accuracy"]
        covered += low <= 0.1 <= high
    assert 0.90 <= covered / 300 <= 0.99


def test_gains_are_told_once_both_models_were_tested() -> None:
    """With the local model those of the models before it, with the tuned one its own."""
    labels, one, other = two_models(60)
    gains, found = LocalGains(), Evaluation(1.0, 30.0, 60)
    assert gains.told("last", found, judged(labels, one)) == found
    told = gains.told("local", found, judged(labels, other)).gains
    assert told == {"last": gain_intervals(judged(labels, one), judged(labels, other))}
    assert gains.told("tuned", found, judged(labels, one)).gains == {"tuned": told["last"]}
    assert gains.told("last", found, None) == found
