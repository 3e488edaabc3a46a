"""A lying server at a silo with a privacy budget: it overspends nothing, and no figure goes around the mechanism.

The server writes the whole specification and all orders, restarts runs, and repeats messages. The judge reads the
ledger in the silo's state folder, and compares replies of two silos whose tables differ in one row.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from fedsync.core.orders import Evaluation, Split, Subject, WorkOrder, WorkReport
from fedsync.silo.owner.audit_chain import MOST_LINE
from fedsync.silo.protocol import AskSnapshot, Describe, EvaluateModel, Question, Refusal, Refused, Train, write_request
from tests.attacks.adversary import FEATURES, STEPS, Federation, Victim, patients
from tests.attacks.conftest import Make
from tests.attacks.private_silo import (
    BATCH,
    BUDGET,
    DP,
    HUGE,
    ROWS,
    SCALES,
    TASK,
    Silo,
    answers,
    code,
    neighbours,
    sent,
    spec,
    zeros,
)

pytest.importorskip("dp_accounting")
pytest.importorskip("opacus")

# The specification.


WEAK: dict[str, dict[str, Any]] = {
    "no privacy": {"privacy": None},
    "little noise": {"privacy": {**DP, "noise_multiplier": 0.1}},
    "large clip": {"privacy": {**DP, "clip": 1e6}},
    "little noise on scores": {"privacy": {**DP, "score_noise": 0.1}},
    "the silo's own scales": {"task": {**TASK, "standardise": "own"}},
    "a survey": {"task": {"kind": "survey", "of": {**TASK, "statistics": {"bins": 4}}}},
}


@pytest.mark.parametrize("changes", WEAK.values(), ids=WEAK)
def test_less_than_the_owner_demands_is_refused_alike_whatever_the_data(place: Path, changes: dict[str, Any]) -> None:
    """The rule comes before the data: a table that does not fit the task gets the same answer."""
    for silo in neighbours(place, row3="50,1.5,9"):
        assert code(silo.begin(**changes).ask(Describe())) is Refusal.OWNER
        assert not silo.entries


@pytest.mark.parametrize("clip", [9e-46, 1e-44, 0.0, float("nan"), float("inf")])
def test_a_clip_so_small_that_noise_is_rounded_away_is_refused(silo: Silo, clip: float) -> None:
    """Below the smallest float32 the noise is zero, and gradients round up to what no noise covers."""
    with pytest.raises(ValueError, match=r"privacy\.dp-sgd|clip|privacy"):
        spec(privacy={**DP, "clip": clip})


@pytest.mark.parametrize("batch_size", [0, -1, 10**9])
def test_batches_of_no_rows_and_of_more_rows_than_there_are_cost_what_they_tell(silo: Silo, batch_size: int) -> None:
    victim = silo.begin()
    heard = silo.train(victim, batch_size=batch_size)
    if batch_size > ROWS:
        assert silo.entries[-1]["rate"] == 1.0
        assert np.all(np.isfinite(answers(heard)))
    else:
        assert heard.refused
        assert not silo.entries


@pytest.mark.slow
def test_many_orders_end_at_the_budget_over_runs_texts_and_restarts(silo: Silo) -> None:
    """Each run has another name, or another text under the same name, and each is begun twice."""
    released = 0
    changes: list[dict[str, Any]] = [{"run": f"run-{number}"} for number in range(3)] + [{"seed": 3}, {"seed": 4}]
    for change in changes:
        for _ in range(2):
            victim = silo.begin(**change)
            for _ in range(4):
                released += not silo.train(victim, batch_size=20, max_steps=3).refused
    assert code(silo.train(victim, batch_size=20, max_steps=3)) is Refusal.BUDGET
    assert 0 < released < 40, "the budget ended"
    assert silo.steps == 3 * released
    assert silo.spent() <= BUDGET["epsilon"]


@pytest.mark.parametrize("max_steps", [10**6, 10**15])
def test_an_order_of_endless_steps_is_refused_before_it_begins_and_below_zero_gives_nothing_back(
    silo: Silo, max_steps: int
) -> None:
    victim = silo.begin()
    assert code(silo.train(victim, max_steps=max_steps)) is Refusal.BUDGET
    assert not silo.entries
    assert not silo.train(victim, batch_size=20, max_steps=3).refused
    before = silo.spent()
    silo.train(victim, batch_size=20, max_steps=-3)
    assert silo.spent() >= before


def test_orders_race_for_what_is_left_and_one_gets_it(silo: Silo) -> None:
    """Two runs are admitted at once, and the ledger has room for one."""
    victims = [silo.begin(run=f"run-{number}") for number in range(2)]
    orders = [silo.order(batch_size=ROWS, max_steps=3) for _ in victims]
    ready = threading.Barrier(2)

    def ask(victim: Victim, order: WorkOrder) -> str:
        ready.wait()
        return victim.service.ask(write_request(Train(order)), sent(zeros()))[0]

    with ThreadPoolExecutor(2) as pool:
        heard = list(pool.map(ask, victims, orders))
    assert sum('"refused"' in words.lower() for words in heard) == 1, heard
    assert silo.spent() <= BUDGET["epsilon"]


# Orders.


def test_a_name_too_long_for_an_entry_is_no_way_to_have_it_cut_off(silo: Silo) -> None:
    """A reader takes a line without its end for one whose result never left."""
    victim = silo.begin()
    heard = silo.train(victim, batch_size=20, max_steps=3, update_id="x" * (2 * MOST_LINE))
    again = silo.begin(run="run-2")
    assert not again.ask(Describe()).refused
    assert heard.refused or silo.steps == 3, "it left, and the next trainer has cut off its entry"


@pytest.mark.parametrize("learning_rate", [3e38, 1e30, -3e38])
def test_an_update_that_overflows_is_entered_though_it_never_leaves(silo: Silo, learning_rate: float) -> None:
    """Whether it overflowed is a bit of the noisy sum, and each repetition would tell another."""
    victim = silo.begin()
    model = np.full(6, HUGE)
    refused = sum(silo.train(victim, model, learning_rate=learning_rate).refused for _ in range(3))
    assert silo.steps == 3, f"{refused} refusals, {silo.steps} entries"


def test_a_row_whose_gradient_is_not_finite_makes_no_difference_that_a_server_sees(place: Path, quiet: None) -> None:
    """The server scales a column so that one cell overflows, and sends weights that overflow with it."""
    heard = []
    for silo in neighbours(place, row3="50,4000000000000,1"):
        victim = silo.begin(task={**TASK, "standardise": {**SCALES, "dose": [0.0, 1e-25]}, "test_share": 0.01})
        model = np.asarray([0, 3e38, 0, -3e38, 0, 0], np.float32)
        heard.append(silo.train(victim, model, batch_size=10**6))
        assert not heard[-1].refused, heard[-1].words
        assert silo.entries
    assert abs(float(np.linalg.norm(answers(heard[0]) - answers(heard[1])))) <= 2 * 1.0


@pytest.mark.parametrize("score_noise", [None, 1.0])
@pytest.mark.parametrize("asked", ["order", "model"])
def test_an_evaluation_that_is_not_finite_is_told_as_any_other(
    place: Path, monkeypatch: pytest.MonkeyPatch, score_noise: float | None, asked: str
) -> None:
    """One row's loss overflows. Neither a missing evaluation nor a lower score may tell of it."""
    found: list[Evaluation] = []
    monkeypatch.setattr("random.SystemRandom.gauss", lambda self, mean, spread: 0.0)
    dp = {**DP, "score_noise": score_noise}
    for silo in neighbours(place, **{f"row{row}": "50,3000000000000,1" for row in range(ROWS)}):
        victim = silo.begin(privacy=dp, task={**TASK, "standardise": {**SCALES, "dose": [0.0, 1e-25]}})
        model = np.asarray([0, HUGE, 0, -HUGE, 0, 0], np.float32)
        if asked == "order":
            heard = silo.train(victim, model, learning_rate=0.0, evaluate=True)
            assert isinstance(heard.reply, WorkReport), heard.words
            assert heard.reply.evaluation is not None
            found.append(heard.reply.evaluation)
        else:
            reply = victim.ask(EvaluateModel(0, Split.TEST), sent(model)).reply
            assert isinstance(reply, Evaluation), reply
            found.append(reply)
        assert len(silo.entries) == (score_noise is not None)
    assert all(each.loss is None and not each.sums and not each.metrics and not each.gains for each in found)
    assert (found[0].correct is None) == (score_noise is None)
    assert found[0].samples == found[1].samples


@pytest.mark.slow
@pytest.mark.parametrize("score_noise", [None, 4.0])
def test_evaluations_at_learning_rate_zero_cost_what_they_tell(silo: Silo, score_noise: float | None) -> None:
    """The orders train on nothing, and ask about many models that differ a little."""
    victim = silo.begin(privacy={**DP, "score_noise": score_noise})
    told = 0
    for number in range(30):
        model = zeros() + number
        heard = silo.train(victim, model, learning_rate=0.0, evaluate=True)
        asked = victim.ask(EvaluateModel(0, Split.TEST), sent(model))
        for reply in (heard.reply, asked.reply):
            found = reply.evaluation if isinstance(reply, WorkReport) else reply
            told += isinstance(found, Evaluation) and found.correct is not None
        if isinstance(heard.reply, WorkReport):
            assert heard.reply.loss is None and not np.any(answers(heard))
    assert sum(line["times"] for line in silo.entries) == told
    assert (told == 0) == (score_noise is None)
    assert silo.spent() <= BUDGET["epsilon"]


@pytest.mark.parametrize("subject", [Subject.LOCAL, Subject.TUNED])
def test_no_own_model_is_trained_shared_or_evaluated(silo: Silo, subject: Subject) -> None:
    victim = silo.begin(evaluation={"metrics": [], "cross_site": {"local": True, "fine_tune": 2}})
    heard = silo.train(victim, subject=subject, share=True)
    assert code(heard) is Refusal.OWNER
    assert victim.ask(EvaluateModel(0, Split.TEST, subject), sent(zeros())).refused
    other = victim.ask(EvaluateModel(0, Split.TEST, subject, "silo-b"), sent(zeros())).reply
    assert isinstance(other, Refused) or (isinstance(other, Evaluation) and other.correct is other.loss is None)
    assert not silo.entries


def test_a_report_has_no_figure_of_the_data(silo: Silo) -> None:
    """Metrics of the task and of the server's choice, the loss, and what the machine did."""
    victim = silo.begin(evaluation={"metrics": ["f1", "brier"], "classes": 2})
    heard = silo.train(victim, evaluate=True)
    assert isinstance(heard.reply, WorkReport), heard.words
    told = heard.reply
    assert (told.loss, told.metrics, told.batch_cap, told.pooled) == (None, {}, None, ())
    assert told.evaluation == Evaluation(None, None, told.evaluation.samples if told.evaluation else 0)
    assert told.samples == BATCH * told.steps


@pytest.mark.parametrize("home", [True, False])
def test_a_repeated_order_gets_the_kept_answer_or_noise_that_costs_again(silo: Silo, place: Path, home: bool) -> None:
    """The silo is killed after an order, with its folder or without: the seed tells nothing of the noise."""
    order = silo.order()
    one, other = (
        answers(silo.begin(place / "home" if home else None).ask(Train(order), sent(zeros()))).copy() for _ in range(2)
    )
    assert np.all(one == other) if home else np.all(one != other)
    assert silo.steps == (1 if home else 2)


def test_what_cannot_be_stored_stays_entered(silo: Silo, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = silo.begin(place / "home")
    monkeypatch.setattr("fedsync.silo.session.current_order.LastOrder.save", Mock(side_effect=OSError(28)))
    assert silo.train(victim).refused
    assert silo.steps == 1


def test_questions_and_snapshots_of_a_run_in_the_clear_tell_nothing(silo: Silo) -> None:
    victim = silo.begin()
    assert victim.ask(Question(), sent(zeros())).refused
    assert victim.ask(AskSnapshot()).refused
    assert not silo.entries


def entered(federation: Federation, name: str) -> list[str]:
    """Orders in a silo's ledger, one for each release."""
    file = Path(federation.config(name).state) / "privacy" / "data.jsonl"
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return [line["of"] for line in lines for _ in range(line["times"])]


@pytest.mark.parametrize("sealed", [False, True])
def test_under_encryption_each_estimate_counts_and_no_figure_leaves(make: Make, root: Path, sealed: bool) -> None:
    """The scale of sealed numbers follows from an update that no order asked for; each start tells another."""
    seal = {} if sealed else {"seal": {"metrics": "plain"}}
    cipher = "{kind: bfv, members: 2}" if sealed else "{kind: bfv, members: 2, metrics: plain}"
    owner = {"privacy": {**BUDGET, "epsilon": 50.0, "examples": 100}, "limits": {"samples": 1}, **seal}
    scales = {f"x{number:02}": [0.0, 1.0] for number in range(FEATURES)}
    task = {"kind": "csv", "file": str(patients(root / "data")[0]), "target": "y", "positive_above": 0.0}
    changes = {"privacy": DP, "task": {**task, "standardise": scales}}
    federation = make(cipher=cipher, owner=owner, changes=changes)
    assert entered(federation, "silo-a") == ["estimate"] * STEPS
    assert not federation.silo("silo-a").ask(Describe()).refused
    assert len(entered(federation, "silo-a")) == 2 * STEPS
    heard = federation.train("silo-a", federation.order("silo-a", evaluate=True))
    assert isinstance(heard.reply, WorkReport), heard.words
    assert entered(federation, "silo-a").count("silo-a/1") == STEPS
    assert heard.reply.loss is None and not heard.reply.metrics
    assert heard.reply.evaluation in (None, Evaluation(None, None, 100))
    assert federation.silos["silo-a"].replica._examples == 100
