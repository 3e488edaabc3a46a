"""Guard of budgets: what of a silo's reports and evaluations leaves, with which noise."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsync.common.errors import BudgetSpent
from fedsync.config.sections.privacy import BudgetConfig
from fedsync.core.orders import Evaluation, Split, WorkReport
from fedsync.silo.owner.privacy_ledger import PrivacyLedger
from fedsync.silo.protocol import EvaluateModel
from tests.privacy.guards import BUDGET, FOUND, ORDER, REPORT, SCORED, STEP, TRAIN, entered, guard, outcome, session

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


def test_an_evaluation_is_counted_and_has_noise(folder: Path) -> None:
    subject = session(folder, {"score_noise": SCORED.noise})
    asked = EvaluateModel(version=0, split=Split.VALIDATION)
    found = [subject.evaluate(subject.initial_model(), asked) for _ in range(20)]
    assert entered(folder) == {SCORED: 20}
    assert len({each.correct for each in found if isinstance(each, Evaluation)}) > 1
    assert all(isinstance(each, Evaluation) and each.loss is None and not each.sums for each in found)


def test_an_evaluation_beyond_the_budget_is_refused(folder: Path) -> None:
    subject = session(folder, {"score_noise": 0.5}, BudgetConfig(epsilon=1.0, delta=1e-3))
    with pytest.raises(BudgetSpent):
        subject.evaluate(subject.initial_model(), EvaluateModel(version=0, split=Split.VALIDATION))
    assert entered(folder) == {}


def test_without_noise_for_scores_none_is_sent_and_none_counted(folder: Path) -> None:
    subject = session(folder)
    found = subject.evaluate(subject.initial_model(), EvaluateModel(version=0, split=Split.VALIDATION))
    assert found == Evaluation(None, None, TRAIN) and entered(folder) == {}
    done = subject.train(replace(ORDER, evaluate=True), subject.initial_model())
    assert done.report.evaluation == Evaluation(None, None, TRAIN) and entered(folder) == {STEP: 3}


NO_SCORE = Evaluation(None, None, TRAIN)
BARE = WorkReport(0, 3, 24, 3.0, None, evaluation=NO_SCORE)
SPEED_ALONE = replace(REPORT, loss=None, metrics={}, evaluation=NO_SCORE)
PUBLIC: dict[str, tuple[dict[str, Any], WorkReport]] = {
    "nothing": ({"public": []}, BARE),
    "times, windows and memory, unless the owner takes them out": ({}, SPEED_ALONE),
    "the loss": ({"public": ["loss"]}, replace(BARE, loss=0.7)),
    "scores, as they are": ({"public": ["scores"]}, replace(BARE, evaluation=replace(FOUND, gains={}))),
    "statistics, which open no report": ({"public": ["statistics"]}, BARE),
}


@pytest.mark.parametrize("what", PUBLIC)
def test_a_report_has_nothing_that_the_owner_does_not_declare_public(what: str, folder: Path) -> None:
    """No metric either, which training code may have filled. What is public costs nothing."""
    said, expected = PUBLIC[what]
    budget = BudgetConfig.model_validate({**BUDGET.model_dump(), **said})
    subject = guard(folder, budget, score_noise=5.0 if "scores" in what else None)
    assert subject.released(replace(ORDER, evaluate=True), outcome()).report == expected
    assert PrivacyLedger("data-0", BUDGET, folder / "data-0.jsonl").load().spent == {STEP: 3}


def test_a_figure_is_public_only_if_all_owners_data_allow_it(folder: Path) -> None:
    both = BudgetConfig(epsilon=8.0, delta=1e-3, public=["loss", "scores"])
    found = guard(folder, both, BudgetConfig(epsilon=8.0, delta=1e-3, public=["scores"])).released(ORDER, outcome())
    assert found.report.loss is None and found.report.compute_s == 3.0
    assert found.report.evaluation is not None and found.report.evaluation.correct == 6.0


def test_a_silo_without_a_budget_sends_neither_loss_nor_score_of_a_private_run(folder: Path) -> None:
    assert guard(folder).released(ORDER, outcome()).report == SPEED_ALONE


def test_a_noisy_score_is_a_count_with_noise_of_the_asked_size(folder: Path) -> None:
    """Of a large split, so that nothing is cut; where its size is secret, that has noise too, and both have more."""
    found = Evaluation(9.0, 5000.0, 10_000)
    for examples, spread in ((None, 5.0), (TRAIN, 5.0 * 2**0.5)):
        budget = BudgetConfig(epsilon=100.0, delta=1e-3, examples=examples)
        subject = guard(folder, budget, score_noise=5.0)
        several = [subject._told(found, "x") for _ in range(400)]
        scores = np.array([each.correct for each in several], float)
        assert abs(scores.mean() - 5000) < 7 * spread / 20 and 0.7 < scores.std() / spread < 1.3
        assert (len({each.samples for each in several}) == 1) == (examples is None)
        assert all(each.loss is None and not each.metrics for each in several)


def test_a_score_stays_between_none_and_all_and_is_never_nan(folder: Path) -> None:
    subject = guard(folder, score_noise=50.0)
    for correct in (0.0, 10.0, 1e30, -1e30, float("nan"), float("inf")):
        for _ in range(20):
            found = subject._told(Evaluation(None, correct, 10), "x")
            assert found.correct is not None and 0 <= found.correct <= 10


def test_a_score_that_is_no_count_is_not_sent(folder: Path) -> None:
    """One person's rows, or a score of any size, may move it by more than the noise is for."""
    subject = guard(folder, BUDGET, score_noise=5.0, counts=False)
    assert subject.judged(lambda _: Evaluation(1.0, 5.0, 10), "x") == Evaluation(None, None, TRAIN)
    assert subject.ledgers[0].spent == {}


def test_virtual_time_draws_a_score_s_noise_from_its_name(folder: Path) -> None:
    subject = guard(folder, score_noise=5.0, seeded=True)
    one, again, other = (subject.judged(lambda _: Evaluation(1.0, 500.0, 1000), name) for name in ("x", "x", "y"))
    assert one == again != other
