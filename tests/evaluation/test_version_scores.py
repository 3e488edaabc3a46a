"""Pooling evaluations, and when enough is enough."""

from math import fsum, inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsync.core.orders import Evaluation
from fedsync.core.stopping import StopRules
from fedsync.evaluation.version_scores import Score, Scores


def settle(scores: Scores) -> list[Score]:
    return [settled.score for settled in scores.settle()]


def settled(scores: Scores, version: int, **found: Evaluation | None) -> list[Score]:
    """Scores that settle once these silos, and no others, have evaluated a version."""
    scores.begin(version, len(found))
    for silo, evaluation in found.items():
        scores.end(version, silo, evaluation)
    return settle(scores)


def test_a_version_is_settled_once_nobody_is_at_it() -> None:
    scores = Scores()
    scores.begin(1)
    scores.begin(1)
    scores.end(1, "a", Evaluation(loss=30.0, correct=9.0, samples=10))
    assert settle(scores) == []
    scores.end(1, "b", Evaluation(loss=30.0, correct=3.0, samples=30))
    assert settle(scores) == [Score(1, accuracy=12 / 40, loss=60 / 40)]
    assert settle(scores) == []


def test_the_loss_is_of_those_who_told_one() -> None:
    scores = Scores()
    for version, (one, other, pooled) in enumerate(((None, 30.0, 3.0), (None, None, None), (20.0, None, 2.0))):
        found = settled(scores, version, a=Evaluation(one, 5.0, 10), b=Evaluation(other, 5.0, 10))
        assert found == [Score(version, 0.5, pooled)]


def test_the_score_is_of_those_who_told_one_and_without_any_the_loss_stands_in() -> None:
    scores = Scores()
    told = ((None, 30.0, 3.0), (None, None, None), (None, None, None), (6.0, 5.0, 0.55))
    for version, (one, other, pooled) in enumerate(told):
        (score,) = settled(scores, version, a=Evaluation(10.0, one, 10), b=Evaluation(10.0, other, 10))
        assert (score.accuracy, score.loss) == (pooled, 1.0)
        assert ("accuracy" in score.numbers) == (pooled is not None)
        assert (scores.best, scores.since_best) == (3.0, version)
    only_losses = Scores()
    for version, loss in enumerate((9.0, 5.0, 7.0)):
        settled(only_losses, version, a=Evaluation(loss, None, 10))
    assert (only_losses.best, only_losses.since_best) == (-0.5, 1), "less of it is better"


def test_given_up_evaluations_count_for_nothing() -> None:
    scores = Scores()
    assert settled(scores, 0, a=None) == []
    assert settled(scores, 1, a=None, b=Evaluation(1.0, 1.0, 2)) == [Score(1, 0.5, 0.5)]
    assert (scores.best, scores.settled) == (0.5, 1)


def test_a_version_without_test_samples_has_no_score() -> None:
    scores = Scores()
    assert settled(scores, 3, a=Evaluation(0.0, 0.0, 0)) == []
    assert (scores.best, scores.since_best, scores.settled) == (-inf, 0, -1)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([0.1, 0.5, 0.5, 0.4, 0.6], [(0.1, 0), (0.5, 0), (0.5, 1), (0.5, 2), (0.6, 0)]),
        # A score may be any number.
        ([-500, -70, -90, -2.5, -3, 4], [(-500, 0), (-70, 0), (-70, 1), (-2.5, 0), (-2.5, 1), (4, 0)]),
    ],
)
def test_the_best_and_how_long_ago_it_was(seen: list[float], expected: list[tuple[float, int]]) -> None:
    scores, history = Scores(), []
    for version, score in enumerate(seen):
        settled(scores, version, a=Evaluation(0.0, 10 * score, 10))
        history.append((scores.best, scores.since_best))
    assert history == expected


def test_versions_settle_oldest_first_and_the_newest_settled_stays() -> None:
    scores = Scores()
    for version in (2, 1, 3):
        scores.begin(version)
    for version in (3, 1):
        scores.end(version, "a", Evaluation(0.0, 1.0, 1))
    assert [score.version for score in settle(scores)] == [1, 3]
    scores.end(2, "a", Evaluation(0.0, 0.0, 1))
    assert settle(scores) == [], "version 3 has overtaken it"
    assert scores.settled == 3


def found(correct: float, samples: int = 10) -> Evaluation:
    return Evaluation(2.0 * samples, correct, samples)


def test_where_silos_go_on_by_themselves_a_score_pools_the_newest_of_every_silo() -> None:
    """a finds 9 of 10 at version 1, alone; b found 1 of 30 at version 0: 10 of 40, not 0.9."""
    scores = Scores()
    assert settled(scores, 0, a=found(0), b=found(1, 30)) == [Score(0, 1 / 40, 2.0)]
    assert settled(scores, 1, a=found(9)) == [Score(1, 10 / 40, 2.0)]
    assert not scores.covers(1, "ab")
    assert settled(scores, 1, b=found(6, 30)) == [Score(1, 15 / 40, 2.0)]
    assert scores.covers(1, "ab")
    assert not scores.covers(2, "ab")


def test_a_version_that_all_have_evaluated_pools_these_evaluations_and_no_newer_ones() -> None:
    scores = Scores()
    for version in (0, 0, 1):
        scores.begin(version)
    scores.end(0, "a", found(1))
    scores.end(1, "a", found(9))
    scores.end(0, "b", found(3))
    assert settle(scores) == [Score(0, 4 / 20, 2.0), Score(1, 12 / 20, 2.0)]


def test_a_silo_that_is_gone_counts_for_what_it_evaluated_only() -> None:
    scores = Scores()
    for silo in "ab":
        scores.begin(0)
        scores.end(0, silo, found(5))
    scores.forget("b")
    scores.forget("b")
    assert settle(scores) == [Score(0, 0.5, 2.0)]
    assert settled(scores, 1, a=found(9)) == [Score(1, 0.9, 2.0)]


numbers = st.floats(-1e39, 1e39)
happenings = st.one_of(
    st.tuples(st.sampled_from("abcd"), st.builds(Evaluation, numbers, numbers, st.integers(1, 10**9))),
    st.tuples(st.sampled_from("abcd"), st.none()),
)


@given(st.lists(happenings, min_size=1, max_size=40))
def test_a_rolling_score_is_exactly_the_newest_evaluations_pool(happens: list[tuple[str, Evaluation | None]]) -> None:
    """Silos evaluate one version after the other, each alone, or are lost; two others stay as they are."""
    scores, newest = Scores(), {"x": Evaluation(0.1, 0.2, 3), "y": Evaluation(-7.3, 1e-9, 5)}
    settled(scores, 0, **newest)
    for version, (name, found_now) in enumerate(happens, start=1):
        if found_now is None:
            newest.pop(name, None)
            scores.forget(name)
            continue
        newest[name] = found_now
        samples = sum(each.samples for each in newest.values())
        correct, loss = (fsum(getattr(each, part) for each in newest.values()) for part in ("correct", "loss"))
        assert settled(scores, version, **{name: found_now}) == [Score(version, correct / samples, loss / samples)]


def test_a_silo_that_starts_from_the_same_version_twice_counts_once() -> None:
    scores = Scores()
    for silo, correct in (("a", 8), ("a", 8), ("b", 2)):
        scores.begin(0)
        scores.end(0, silo, found(correct))
    assert settle(scores) == [Score(0, 0.5, 2.0)]


def test_at_the_end_all_begin_anew() -> None:
    scores = Scores()
    for version in (0, 0, 1):
        scores.begin(version)
    scores.end(0, "a", found(5))
    scores.restart(1)
    assert settled(scores, 1, a=found(7), b=found(7)) == [Score(1, 0.7, 2.0)]


EVALUATED = Scores(best=0.8, since_best=3)


@pytest.mark.parametrize(
    ("rules", "scores", "version", "now_s", "reason"),
    [
        (StopRules(), EVALUATED, 10**6, 1e9, None),
        (StopRules(rounds=5), EVALUATED, 4, 0.0, None),
        (StopRules(rounds=5), EVALUATED, 5, 0.0, "5 rounds done"),
        (StopRules(seconds=5.0), EVALUATED, 0, 4.999, None),
        (StopRules(seconds=5.0), EVALUATED, 0, 5.0, "5 s are over"),
        (StopRules(target_accuracy=0.81), EVALUATED, 0, 0.0, None),
        (StopRules(target_accuracy=0.8), EVALUATED, 0, 0.0, "target accuracy 0.8 reached: 0.8000"),
        # Of two reasons the good news.
        (StopRules(rounds=1, target_accuracy=0.5), EVALUATED, 1, 0.0, "target accuracy 0.5 reached: 0.8000"),
        # No target is reached by what nobody has evaluated, and one may be below zero.
        *((StopRules(target_accuracy=target), Scores(), 9, 9.0, None) for target in (0.01, 0.0, -1.0, -1e300)),
        (StopRules(target_accuracy=-2.5), Scores(best=-2.51), 9, 9.0, None),
        (StopRules(target_accuracy=-2.5), Scores(best=-2.5), 9, 9.0, "target accuracy -2.5 reached: -2.5000"),
        (StopRules(target_accuracy=-2.5), Scores(best=0.0), 9, 9.0, "target accuracy -2.5 reached: 0.0000"),
        (StopRules(patience=4), EVALUATED, 0, 0.0, None),
        (StopRules(patience=3), EVALUATED, 0, 0.0, "no better accuracy in 3 evaluated versions"),
        # Patience waits for the first score, however low.
        (StopRules(patience=1), Scores(best=-1e9, since_best=0), 9, 9.0, None),
        (StopRules(patience=1), Scores(best=-1e9, since_best=1), 9, 9.0, "no better accuracy in 1 evaluated versions"),
    ],
)
def test_stop_rules(rules: StopRules, scores: Scores, version: int, now_s: float, reason: str | None) -> None:
    assert rules.decide(version, now_s, scores) == reason


def test_a_fast_silo_alone_does_not_count_while_others_are_at_their_first_evaluation() -> None:
    scores = Scores()

    def alone(version: int) -> bool:
        scores.begin(version, 1, ["fast"])
        scores.end(version, "fast", Evaluation(loss=1.0, correct=9.9, samples=10))
        return scores.settle()[-1].counts

    scores.begin(0, 2, ["slow", "slower"])
    assert not alone(1)
    scores.end(0, "slow", None)
    scores.end(0, "slower", None)
    assert alone(2)
