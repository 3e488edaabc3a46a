"""A server that asks silos how good models are, to learn of one of them what they only tell together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedsync.cipher.plan import EncryptionPlan
from fedsync.core.orders import Evaluation, PooledFigures, Score, Split, Subject, WorkOrder
from fedsync.evaluation.metrics.metric_types import number
from fedsync.evaluation.metrics.named import classification
from fedsync.evaluation.version_scores import Selection
from tests.cipher.make import LAYOUT, Federation, change, order, plan, report

SILOS = "abcde"
METRICS = classification(2)


def found(right: tuple[int, int], wrong: tuple[int, int]) -> Evaluation:
    """What a silo finds: right and wrong predictions of either class."""
    table = np.array([[right[0], wrong[0]], [wrong[1], right[1]]], dtype=np.float64)
    sums: dict[str, tuple[float, ...]] = {}
    for metric in METRICS:
        statistic = metric.statistic
        if statistic.key == "confusion/2":
            sums[statistic.key] = tuple(table.reshape(-1).tolist())
        else:
            scores = np.zeros((2, statistic.size // 2))
            scores[:, 10], scores[:, -10] = table[:, 0], table[:, 1]
            sums[statistic.key] = tuple(scores.reshape(-1).tolist())
    return Evaluation(float(sum(wrong)), float(sum(right)), int(table.sum()), sums=sums)


class Asking:
    """Silos, and a server that gives them orders that only score."""

    def __init__(self, folder: Path, of: EncryptionPlan | None = None) -> None:
        whole = replace(plan("pad", quorum=5), seal_metrics=True, metrics=METRICS, selection=Selection())
        self.folder = folder
        self.federation = Federation(of or whole, folder, dict.fromkeys(SILOS, 10))
        self.version = 0
        for name in SILOS:
            (folder / name).mkdir()
        self.restart()

    def ask(self, silos: Mapping[str, Evaluation], *, rate: float = 0.0, **question: object) -> PooledFigures | None:
        """Have silos find this, in one version; what they tell of it."""
        return self.ask_each({name: (each, question) for name, each in silos.items()}, rate)

    def ask_each(
        self, silos: Mapping[str, tuple[Evaluation, Mapping[str, object]]], rate: float = 0.0
    ) -> PooledFigures | None:
        made, ids = self.federation, []
        for name in SILOS:
            made.begin(name, self.version)
        for name, (evaluation, question) in silos.items():
            update_id = f"{name}/{made.serials[name]}"
            work = replace(order(update_id, self.version), learning_rate=rate, **question)  # type: ignore[arg-type]
            self.seal(name, work, evaluation)
            ids.append(update_id)
        made.commit(self.version + 1, ids)
        self.version += 1
        for name in SILOS:
            made.begin(name, self.version)
        told = {made.silos[name].pooled for name in SILOS}
        assert len(told) == 1
        (figures,) = told
        return figures[-1] if figures else None

    def seal(self, name: str, work: WorkOrder, evaluation: Evaluation) -> None:
        done = replace(report(self.version), evaluation=evaluation)
        update = np.zeros(LAYOUT.size, dtype=np.float32)
        payload = self.federation.silos[name].send(update, work, done)
        self.federation.aggregator.put(name, work.update_id, payload)
        self.federation.aggregator.holds(name, self.version)

    def models_differ(self) -> None:
        """Have a best version that is not the last."""
        made = self.federation
        for name in SILOS:
            made.begin(name, 0)
        made.commit(1, [made.answer(name, change(1), evaluation=ALIKE[name]) for name in SILOS])
        self.version = 1

    def restart(self) -> None:
        """Every trainer is killed, and started again."""
        for name in SILOS:
            self.federation.silos[name] = self.federation.copy(name, self.folder / name / "copy.bin")


@pytest.fixture
def asked(tmp_path: Path) -> Asking:
    return Asking(tmp_path)


def score(figures: PooledFigures | None) -> Score | None:
    return None if figures is None else figures.score


ALIKE = {name: found((9, 8), (1, 2)) for name in SILOS}
BUT_ONE = {name: ALIKE[name] for name in SILOS[1:]}
TEST = {"split": Split.TEST}


def test_what_is_told_follows_from_sums_alone(tmp_path: Path) -> None:
    """However the same samples are spread over silos, the server hears the same, digit by digit."""
    parts = [((45, 0), (0, 0)), ((0, 40), (0, 0)), ((0, 0), (5, 0)), ((0, 0), (0, 9)), ((0, 0), (0, 1))]
    spread = {name: found(*part) for name, part in zip(SILOS, parts, strict=True)}
    heard = []
    for index, silos in enumerate((ALIKE, spread)):
        (tmp_path / str(index)).mkdir()
        heard.append(Asking(tmp_path / str(index)).ask(silos))
    assert heard[0] == heard[1] is not None
    assert heard[0] is not None and heard[0].score is not None and len(heard[0].score.metrics) == len(METRICS)


def test_numbers_of_one_pool_can_be_solved_for_its_counts_and_for_no_silo_s(asked: Asking) -> None:
    """Of 100 samples four digits leave one confusion matrix. So take it for known; it is the sum of all silos."""
    figures = asked.ask(ALIKE)
    assert figures is not None and figures.score is not None
    told = {name: figures.score.metrics[name] for name in ("accuracy", "balanced_accuracy", "f1")}
    confusion = [metric for metric in METRICS if metric.name in told]
    fits = []
    samples, right = 100, 85  # from the accuracy, of so many samples
    for positives in range(1, samples):
        for true_positives in range(max(0, right - (samples - positives)), min(positives, right) + 1):
            true_negatives = right - true_positives
            table = [true_negatives, samples - positives - true_negatives, positives - true_positives]
            sums = np.array([*table, true_positives], dtype=np.float64)
            numbers = {metric.name: number(metric, sums) for metric in confusion}
            if all(one is not None and float(f"{one:.3e}") == told[name] for name, one in numbers.items()):
                fits.append((true_positives, true_negatives))
    assert fits == [(40, 45)]


def test_the_test_split_is_not_evaluated_twice(asked: Asking) -> None:
    """Not of the same model, nor of another, nor after a restart; nor if the server then asks all but one."""
    first = asked.ask(ALIKE, **TEST)
    assert first is not None and (first.split, first.loss) == (Split.TEST, None)
    assert score(asked.ask(ALIKE, **TEST)) is None
    asked.restart()
    assert score(asked.ask(BUT_ONE, **TEST)) is None
    same = asked.ask(BUT_ONE, subject=Subject.BEST, **TEST)
    assert score(same) is None, "there is no best one yet, so it is the same model"


def test_the_test_split_does_not_tell_of_models_that_train_on(asked: Asking) -> None:
    assert score(asked.ask(ALIKE, rate=0.1, **TEST)) is None


def test_the_test_split_chooses_no_best_version(asked: Asking) -> None:
    """Though what silos find there is better than all that they found before."""
    asked.ask(ALIKE)
    best = asked.federation.silos["a"]._state.best
    figures = asked.ask({name: found((10, 10), (0, 0)) for name in SILOS}, **TEST)
    after = asked.federation.silos["a"]._state.best
    assert best is not None and after is not None and score(figures) is not None
    assert (after.version, after.score) == (best.version, best.score)


def test_rounds_do_not_evaluate_another_model(asked: Asking) -> None:
    assert score(asked.ask(ALIKE, subject=Subject.BEST)) is None


def test_no_model_is_evaluated_twice_also_not_after_a_restart(asked: Asking) -> None:
    """The versions change nothing. So the second score would be of the same model, of one silo less."""
    first = asked.ask(ALIKE)
    assert first is not None and first.score is not None
    asked.restart()
    for _ in range(4):
        assert score(asked.ask(BUT_ONE)) is None


def test_silos_that_are_asked_different_questions_tell_nothing(asked: Asking) -> None:
    """Else what one of them found would be called what all did."""
    questions: dict[str, Mapping[str, object]] = {name: {} for name in SILOS} | {"c": TEST}
    assert score(asked.ask_each({name: (ALIKE[name], questions[name]) for name in SILOS})) is None


@pytest.mark.parametrize("question", [{}, TEST])
@pytest.mark.parametrize("holders", [1, 2, 3])
def test_silos_without_samples_are_no_company(question: Mapping[str, object], holders: int, asked: Asking) -> None:
    """Three of five are more than half; two, with three that have nothing to evaluate, are two."""
    nothing = Evaluation(0.0, 0.0, 0)
    silos = {name: ALIKE[name] if index < holders else nothing for index, name in enumerate(SILOS)}
    assert (score(asked.ask(silos, **question)) is not None) == (holders == 3)


def test_few_silos_answer_no_question(asked: Asking) -> None:
    assert score(asked.ask({name: ALIKE[name] for name in "ab"}, **TEST)) is None
    assert score(asked.ask({name: ALIKE[name] for name in "cde"}, **TEST)) is not None


def test_one_silo_s_nonsense_is_told_by_nobody_and_costs_no_update(asked: Asking, caplog: object) -> None:
    """It counts samples that it does not have; the version counts all the same."""
    lie = replace(ALIKE["c"], samples=5)
    figures = asked.ask({**ALIKE, "c": lie})
    assert figures is not None and figures.score is None and figures.loss is not None
    state = asked.federation.silos["a"]._state
    assert state.history.records.counted(1) == 1 and state.best is None


@pytest.mark.slow
@pytest.mark.parametrize("later", [Subject.BEST, Subject.LOCAL, Subject.TUNED])
@pytest.mark.parametrize("more", ["abcd", "abcde"])
def test_answers_of_two_sets_of_silos_are_not_both_told(later: Subject, more: str, asked: Asking) -> None:
    """The server says how silos train, so two models may be as good as one: the difference would be that of one silo.

    Whichever set is the larger one, and also after a restart.
    """
    less = "abcde" if more == "abcd" else "abcd"
    asked.models_differ()
    assert score(asked.ask({name: ALIKE[name] for name in less}, **TEST)) is not None
    asked.restart()
    assert score(asked.ask({name: ALIKE[name] for name in more}, subject=later, **TEST)) is None
    assert score(asked.ask({name: ALIKE[name] for name in less}, subject=later, **TEST)) is None, "it had its turn"


def test_a_silo_that_has_no_test_samples_any_more_is_left_out_of_no_second_answer(asked: Asking) -> None:
    """It is in both, by its name."""
    assert score(asked.ask(ALIKE, **TEST)) is not None
    nothing = {**ALIKE, "e": Evaluation(0.0, 0.0, 0)}
    assert score(asked.ask(nothing, subject=Subject.LOCAL, **TEST)) is None


def test_all_questions_are_answered_where_the_same_silos_answer(asked: Asking) -> None:
    asked.models_differ()
    for subject in Subject:
        figures = asked.ask(ALIKE, subject=subject, **TEST)
        assert figures is not None and figures.subject is subject and figures.score is not None
