"""Guard of budgets: what a run may do at a silo, and what is entered for it."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from fedsync.common.errors import (
    BudgetSpent,
    ConfigError,
    Diverged,
    Hanging,
    OwnerRefusal,
    ProtocolError,
    UserCodeError,
)
from fedsync.config.cluster import ClusterConfig, SiloConfig
from fedsync.config.run_spec import RunSpec
from fedsync.config.sections.privacy import BudgetConfig
from fedsync.config.sections.survey import survey_of
from fedsync.core.orders import Evaluation, WorkOrder
from fedsync.core.silo_weight import PRECISION_UNIT
from fedsync.model.transfer import Payload
from fedsync.policies.aggregate.aggregate_kinds import FedAvg
from fedsync.privacy.accounting import epsilon
from fedsync.privacy.release import Release
from fedsync.silo.owner.owner_policy import ALL_DATA, OwnerPolicy
from fedsync.silo.owner.privacy_guard import PrivacyGuard, ledger_of
from fedsync.silo.owner.privacy_ledger import PrivacyLedger, kept_tallies, spent_by
from fedsync.silo.protocol import STATE, Identity
from fedsync.silo.session.current_order import OrderJob
from fedsync.silo.session.session import SiloSession
from fedsync.train.dp_sgd.private_trainer import PrivateTrainer
from fedsync.train.silo_trainer import likely_update
from tests.privacy.guards import (
    BATCH,
    BUDGET,
    ORDER,
    PRIVATE,
    REPORT,
    SCORED,
    STEP,
    TRAIN,
    begun,
    entered,
    guard,
    guard_of,
    outcome,
    owner,
    session,
    strategy,
)

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


def test_an_order_is_entered_before_its_update_is_sent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, found = session(folder), []
    send = subject.replica.send

    def sending(*given: Any) -> Payload:
        found.append(entered(folder))
        return send(*given)

    monkeypatch.setattr(subject.replica, "send", sending)
    done = subject.train(ORDER, subject.initial_model())
    assert found == [entered(folder)] == [Counter({STEP: 3})]
    assert done.report.steps == 3 and np.asarray(done.update).any()


def test_an_order_counts_with_the_rate_of_its_own_batch(folder: Path) -> None:
    subject = session(folder, {"noise_multiplier": 4.0})
    for number, batch in enumerate((4, 20, 80), 1):  # the last is larger than the data
        subject.train(replace(ORDER, update_id=f"a/{number}", round=number, batch_size=batch), subject.initial_model())
    assert entered(folder) == {Release(4 / TRAIN, 4.0): 3, Release(20 / TRAIN, 4.0): 3, Release(1.0, 4.0): 3}


def test_an_order_that_ends_early_counts_the_steps_that_it_did(folder: Path) -> None:
    subject = session(folder)
    done = subject.train(ORDER, subject.initial_model(), lambda steps, samples: steps < 2)
    assert done.report.steps == 2 and entered(folder) == {STEP: 2}


@pytest.mark.parametrize(
    "error", [Diverged("training", "something is not finite", "Look for it"), SystemExit(1), KeyboardInterrupt()]
)
def test_a_failed_order_counts_all_steps(error: BaseException, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it fails may tell what a step found: a server asks for steps so long that a weight overflows or not."""
    subject, gradients, steps = session(folder, {"score_noise": SCORED.noise}), PrivateTrainer._gradients, []

    def failing(trainer: PrivateTrainer, rows: Any) -> Any:
        steps.append(rows)
        if len(steps) == 2:
            raise error
        return gradients(trainer, rows)

    monkeypatch.setattr(PrivateTrainer, "_gradients", failing)
    with pytest.raises(UserCodeError if isinstance(error, SystemExit) else type(error)):
        subject.train(replace(ORDER, evaluate=True), subject.initial_model())
    assert entered(folder) == {STEP: 3, SCORED: 1}


def test_an_order_that_goes_on_after_its_hang_gives_nothing_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server knows that it hung, which may depend on the data; the process may live for seconds after that."""
    subject, gradients, job, steps = session(folder), PrivateTrainer._gradients, OrderJob(ORDER), []
    job.halt.set()

    def hanging(trainer: PrivateTrainer, rows: Any) -> Any:
        steps.append(rows)
        job.end(error=Hanging("it waits"))
        return gradients(trainer, rows)

    monkeypatch.setattr(PrivateTrainer, "_gradients", hanging)
    with pytest.raises(Hanging):
        subject.train(ORDER, subject.initial_model(), job.watch)
    assert len(steps) == 1 and subject.last is None and entered(folder) == {STEP: 3}


def test_releases_of_an_order_are_on_disk_before_its_first_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill or a hang at any later instant, which may depend on the data, finds it there; the payload comes before."""
    subject, gradients, released = session(folder, {"score_noise": SCORED.noise}), PrivateTrainer._gradients, Seen()
    monkeypatch.setattr(PrivateTrainer, "_gradients", lambda *given: released.after(entered(folder), gradients(*given)))
    guarded = guard_of(subject)
    monkeypatch.setattr(guarded, "released", lambda *given: released.after(entered(folder), given[1]))
    monkeypatch.setattr(subject, "receive", lambda *given: released.after(entered(folder), subject.initial_model()))
    subject.train(replace(ORDER, evaluate=True), subject.initial_model())
    assert released.seen == [Counter(), *[Counter({STEP: 3, SCORED: 1})] * 4]


class Seen:
    """Ledgers that were seen in turn."""

    def __init__(self) -> None:
        self.seen: list[Counter[Release]] = []

    def after(self, found: Counter[Release], value: Any) -> Any:
        self.seen.append(found)
        return value


def test_a_model_that_does_not_fit_costs_nothing(folder: Path) -> None:
    subject = session(folder)
    with pytest.raises(ProtocolError):
        subject.train(ORDER, np.zeros(1, np.float32))
    assert entered(folder) == {}


def test_what_an_order_left_out_comes_back_to_each_ledger_and_never_more(folder: Path) -> None:
    subject = guard(folder, BUDGET, BUDGET, score_noise=5.0)
    for steps, spent in ((1, 1), (0, 1), (-4, 1), (3, 4), (5, 9)):  # a confined trainer may report anything
        order = replace(ORDER, evaluate=steps >= 0)
        subject.begins(order)
        scores = REPORT.evaluation if order.evaluate else None
        subject.released(order, outcome(replace(REPORT, steps=steps, evaluation=scores)))
        assert [each.spent[STEP] for each in subject.ledgers] == [spent, spent]
    assert [each.spent[SCORED] for each in subject.ledgers] == [4, 4]
    again = guard(folder, BUDGET, BUDGET)
    assert [each.spent for each in again.ledgers] == [each.spent for each in subject.ledgers]


def test_an_order_that_failed_gives_nothing_back_to_the_next(folder: Path) -> None:
    subject = guard(folder, BUDGET)
    subject.begins(ORDER)
    subject.begins(replace(ORDER, update_id="a/2", max_steps=1))
    subject.released(replace(ORDER, update_id="a/2", max_steps=1), outcome(replace(REPORT, steps=1)))
    assert subject.ledgers[0].spent == {STEP: 5}, "an order that the guard has not seen begin is entered whole"


def test_an_evaluation_that_raises_is_entered_before_it_begins(folder: Path) -> None:
    subject = guard(folder, BUDGET, score_noise=5.0)

    def failing(gains: bool) -> Evaluation:
        assert subject.ledgers[0].spent == {SCORED: 1}
        raise Diverged("evaluation", "something is not finite", "Look for it")

    with pytest.raises(Diverged):
        subject.judged(failing, "version 3")
    assert subject.ledgers[0].spent == {SCORED: 1}


def test_simulated_silos_draw_noise_on_scores_independently(folder: Path) -> None:
    """Common noise would not average out in pooled scores."""
    made = guard(folder, BUDGET, score_noise=5.0, seeded=True)
    judged = [replace(made, seed=f"7 {silo}").judged(lambda _: Evaluation(None, 5.0, 10), "version 3") for silo in "ab"]
    assert judged[0].correct != judged[1].correct


def test_an_order_that_only_scores_releases_no_step(folder: Path) -> None:
    subject = session(folder, {"score_noise": SCORED.noise})
    done = subject.train(replace(ORDER, learning_rate=0.0, max_steps=1, evaluate=True), subject.initial_model())
    assert entered(folder) == {SCORED: 1}
    assert done.report.evaluation is not None and done.report.evaluation.correct is not None


def test_an_update_weighs_by_its_rows_and_the_noise_in_it(folder: Path) -> None:
    """A share of 1 / (1 + d z^2 / B) of its variance is no noise; the model is a logistic regression of two columns."""
    weighed = strategy(folder, PRIVATE).model_copy(update={"aggregation": FedAvg(weight="precision")})
    subject = begun(weighed, owner(folder))
    done = subject.train(ORDER, subject.initial_model())
    assert done.report.precision == round(PRECISION_UNIT * TRAIN / (1 + subject.layout.size * 1.0**2 / BATCH))
    assert session(folder).train(ORDER, subject.initial_model()).report.precision is None


def test_each_ledger_must_have_room(folder: Path) -> None:
    small = BudgetConfig(epsilon=0.5, delta=1e-3)
    for budgets in ((BUDGET, small), (small, BUDGET)):
        subject = guard(folder, *budgets)
        with pytest.raises(BudgetSpent):
            subject.allow(ORDER)
        with pytest.raises(BudgetSpent):
            subject.released(ORDER, outcome())
        assert [ledger.spent for ledger in subject.ledgers] == [{}, {}]
    subject = guard(folder, BUDGET, BUDGET)
    subject.released(ORDER, outcome(replace(REPORT, steps=2)))
    assert [ledger.spent for ledger in subject.ledgers] == [{STEP: 2}, {STEP: 2}]


def test_an_order_that_evaluates_must_have_room_for_both(folder: Path) -> None:
    budget = BudgetConfig(epsilon=8.0, delta=1e-3, accountant="rdp")
    ledger, most = guard(folder, budget).ledgers[0], 1
    while ledger.allows({STEP: most + 1}):
        most += 1
    subject = guard(folder, budget, score_noise=1.0)
    subject.allow(replace(ORDER, max_steps=most))
    with pytest.raises(BudgetSpent):
        subject.allow(replace(ORDER, max_steps=most, evaluate=True))


def test_an_evaluation_that_fails_counts_too(folder: Path) -> None:
    subject = guard(folder, BUDGET, score_noise=5.0)
    subject.released(replace(ORDER, evaluate=True), outcome(replace(REPORT, evaluation=None)))
    assert subject.ledgers[0].spent == {STEP: 3, SCORED: 1}


def test_a_run_without_privacy_is_refused_where_there_is_a_budget(folder: Path) -> None:
    """Of all data, of the folder of the run's data, or in a silo file; budgets of other data ask for nothing."""
    (folder / "others").mkdir()
    whole, others = {"all": str(folder)}, {"others": str(folder / "others")}
    state, plain = str(folder / "state"), strategy(folder)
    machines = ClusterConfig(silos=[SiloConfig(name=name, speed=100, privacy=BUDGET) for name in "abc"])
    for rules, emulated in (
        (owner(folder), None),
        (OwnerPolicy(privacy={"all": BUDGET}, named=whole, ledgers=state), None),
        (None, machines),
    ):
        with pytest.raises(OwnerRefusal, match=r"the run is not private.*Write privacy: \{kind: dp-sgd"):
            begun(plain, rules, emulated)
    for rules in (owner(folder, None), OwnerPolicy(privacy={"others": BUDGET}, named=others, ledgers=state)):
        begun(plain, rules)
    subject = begun(strategy(folder, PRIVATE), None, machines)
    subject.train(ORDER, subject.initial_model())
    assert guard_of(subject).ledgers[0].spent == {STEP: 3}


@pytest.mark.slow
def test_what_a_simulated_silo_spends_is_kept_over_restarts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As trainers in processes of their own keep it; the second silo has a budget, the others have none."""
    monkeypatch.setenv(STATE, str(folder))
    small = BudgetConfig(epsilon=6.0, delta=1e-2)
    budgets = (("a", None), ("b", small), ("c", None))
    cluster = ClusterConfig(silos=[SiloConfig(name=name, speed=100, privacy=own) for name, own in budgets])
    spec = RunSpec.of(strategy(folder, PRIVATE), cluster, 3)
    assert kept_tallies(folder) == []
    step = {}
    for index in (1, 0, 1):
        subject = SiloSession(Identity(spec.dump(), index, "x"), spec)
        subject.train(ORDER, subject.initial_model())
        step[index] = Release(BATCH / subject.facts.examples, 1.0)
    found = spent_by(kept_tallies(folder))["privacy"]
    assert found == {
        "a": {"epsilon": epsilon({step[0]: 3}, 1e-5), "delta": 1e-5, "budget": None},
        "b": {"epsilon": epsilon({step[1]: 6}, small.delta), "delta": small.delta, "budget": small.epsilon},
    }


@pytest.mark.slow
def test_the_budget_of_a_simulated_silo_holds_over_restarts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE, str(folder))
    budget = BudgetConfig(epsilon=epsilon({STEP: 4}, 1e-3), delta=1e-3)
    cluster = ClusterConfig(silos=[SiloConfig(name=name, speed=100, privacy=budget) for name in "abc"])
    begun(strategy(folder, PRIVATE), None, cluster).train(ORDER, np.zeros(6, np.float32))
    with pytest.raises(BudgetSpent):
        begun(strategy(folder, PRIVATE), None, cluster).train(ORDER, np.zeros(6, np.float32))


@pytest.mark.parametrize("said", ["own", "federated"])
def test_means_of_rows_are_refused_at_the_silo_too(folder: Path, said: str) -> None:
    """They put each row into the gradients of all others; a strategy does not validate so, and a liar sends it."""
    honest = RunSpec.of(strategy(folder, PRIVATE), None, 3)
    spec = honest.model_copy(update={"task": replace(honest.task, standardise=said)})
    for budget in (BUDGET, None):
        with pytest.raises(ConfigError, match=r"^task\.standardise: "):
            SiloSession(Identity(spec.dump(), 0, "a"), spec, owner=owner(folder, budget))
    with pytest.raises(ConfigError, match="scales a row by other rows"):
        strategy(folder, PRIVATE, standardise=said)


def test_statistics_are_refused_unless_they_are_public(folder: Path) -> None:
    config = survey_of(strategy(folder, standardise="federated"), 3)
    assert config is not None
    spec, public = RunSpec.of(config, None, 3), BudgetConfig(epsilon=8.0, delta=1e-3, public=["statistics"])
    rules = [owner(folder, budget).model_copy(update={"statistics": "plain"}) for budget in (BUDGET, public)]
    with pytest.raises(OwnerRefusal, match="the run requests statistics of columns, and the data have a privacy"):
        rules[0].checked(spec, 0)
    with pytest.raises(OwnerRefusal, match="the run is not private"):
        SiloSession(Identity(spec.dump(), 0, "a"), spec, owner=rules[0])
    rules[1].checked(spec, 0)
    SiloSession(Identity(spec.dump(), 0, "a"), spec, owner=rules[1])


def test_rates_go_by_the_number_that_the_owner_tells(folder: Path) -> None:
    budget = BudgetConfig(epsilon=8.0, delta=1e-3, examples=100)
    subject = session(folder, budget=budget)
    assert subject.facts.examples == 100
    subject.train(ORDER, subject.initial_model())
    assert entered(folder, budget) == {Release(0.08, 1.0): 3}


def test_persons_are_units_where_the_owner_says_so(folder: Path) -> None:
    budget = BudgetConfig(epsilon=8.0, delta=1e-3, unit="person", person_column="person")
    subject = session(folder, {"score_noise": 5.0}, budget)
    persons = subject.facts.examples
    assert TRAIN / 2 <= persons < TRAIN
    done = subject.train(replace(ORDER, evaluate=True), subject.initial_model())
    assert entered(folder, budget) == {Release(BATCH / persons, 1.0): 3}
    assert done.report.evaluation == Evaluation(None, None, persons)


@pytest.mark.slow
def test_noise_is_chosen_for_the_target(folder: Path) -> None:
    aim = {"noise_multiplier": None, "target_epsilon": 2.0, "delta": 1e-3}
    noise = guard_of(session(folder, aim)).settings.noise
    assert noise is not None and noise > 0.5
    assert guard_of(session(folder, aim)).settings.noise == noise
    less = guard_of(session(folder, aim, BudgetConfig(epsilon=2.0, delta=1e-3)))
    assert less.settings.noise == pytest.approx(noise, rel=0.01)  # the same, by another way


@pytest.mark.slow
def test_a_silo_with_less_than_the_target_aims_at_what_it_has(folder: Path) -> None:
    aim = {"noise_multiplier": None, "target_epsilon": 2.0, "delta": 1e-3}
    noises = []
    for name in ("full", "spent"):
        (folder / name).mkdir(mode=0o700)
        (folder / name / "a.csv").write_bytes((folder / "a.csv").read_bytes())
        ledger = PrivacyLedger(ALL_DATA, BUDGET, folder / name / "state" / f"{ALL_DATA}.jsonl").load()
        if name == "spent":
            ledger.enter("earlier", "a/1", {Release(1.0, 1.5): 1})
        found = guard_of(session(folder / name, aim, BudgetConfig(epsilon=2.5, delta=1e-3)))
        assert found.settings.noise is not None
        noises.append(found.settings.noise)
    assert noises[1] > 1.2 * noises[0]


def owner_of(folder: Path, **budgets: BudgetConfig) -> OwnerPolicy:
    return OwnerPolicy(privacy=budgets, named={"patients": str(folder)}, ledgers=str(folder / "state"))


def test_a_budget_of_all_data_replaced_by_named_ones_resets_nothing_nor_the_other_way_round(folder: Path) -> None:
    whole, named = owner_of(folder, **{ALL_DATA: BUDGET}), owner_of(folder, patients=BUDGET)
    ledger_of(whole, ALL_DATA).enter("one", "a/1", {STEP: 3})
    ledger_of(named, "patients").enter("two", "a/1", {STEP: 4})
    for _ in range(2):  # each counts the other's once
        for found in (ledger_of(whole, ALL_DATA), ledger_of(named, "patients")):
            assert found.spent == {STEP: 7} and found.by_run == {"one": {STEP: 3}, "two": {STEP: 4}}
    both = owner_of(folder, patients=BUDGET, others=BUDGET)
    assert ledger_of(both, "others").spent == {STEP: 3}, "of all data"
    found = ledger_of(both, "patients")
    found.enter("two", "a/2", {STEP: 1})
    assert found.spent == ledger_of(both, "patients").spent == {STEP: 8}


@pytest.mark.slow
def test_without_an_owner_s_budget_a_target_holds_over_restarts(folder: Path) -> None:
    aim = {**PRIVATE, "noise_multiplier": None, "target_epsilon": 2.0, "delta": 1e-3}
    spec = RunSpec.of(strategy(folder, aim), None, 3)
    for orders in (1, 2):
        subject = SiloSession(Identity(spec.dump(), 0, "a"), spec, owner=owner(folder, None), folder=folder / "run")
        subject.train(replace(ORDER, update_id=f"a/{orders}"), subject.initial_model())
        assert guard_of(subject).ledgers[-1].spent.total() == 3 * orders


@pytest.mark.slow
def test_a_restart_plans_the_rest_of_the_run_and_not_the_whole_run_again(folder: Path) -> None:
    """Every other order of the silo was lost before it began."""
    aim = {**PRIVATE, "noise_multiplier": None, "target_epsilon": 2.0, "delta": 1e-3, "score_noise": 4.0}
    config = strategy(folder, aim)
    local = config.local.model_copy(update={"steps": ORDER.max_steps, "batch_size": BATCH})
    changed = {"local": local, "stop": config.stop.model_copy(update={"rounds": 5})}
    spec, noises = RunSpec.of(config.model_copy(update=changed), None, 3), list[float | None]()
    for number in (1, 2, 3, 4, 5):
        if number in (1, 4):
            subject = SiloSession(Identity(spec.dump(), 0, "a"), spec, owner=owner(folder, None), folder=folder / "run")
        order = replace(ORDER, update_id=f"a/{2 * number}", base_version=number - 1, round=2 * number, evaluate=True)
        subject.train(order, subject.initial_model())
        noises.append(guard_of(subject).settings.noise)
    assert noises[:3] == noises[:1] * 3 and noises[3:] == pytest.approx(noises[:2], rel=0.05)


@pytest.mark.parametrize(
    ("finished", "version", "orders"), [(0, 0, 10), (7, -(10**9), 10), (7, 0, 10), (7, 6, 4), (7, 8, 3), (7, 10**9, 3)]
)
def test_versions_that_a_server_orders_again_are_planned_again_and_no_longer_run_whatever_it_calls_them(
    finished: int, version: int, orders: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The noise for a billion orders takes hours to find, while the trainer answers nothing."""
    subject, planned = replace(guard(folder, BUDGET), finished=finished), list[int]()
    monkeypatch.setattr(PrivacyGuard, "aim", lambda self, batch_size, steps, orders: planned.append(orders))
    numbers = (-(10**9), 0, 1, 4, 10, 11, 10**9)
    for number in numbers:
        subject.allow(replace(ORDER, base_version=version, round=number))
    assert planned == [orders] * len(numbers)


def test_a_spent_budget_begins_no_run_with_a_target(folder: Path) -> None:
    budget = BudgetConfig(epsilon=1.0, delta=1e-3)
    ledger = PrivacyLedger(ALL_DATA, BUDGET, folder / "state" / f"{ALL_DATA}.jsonl").load()
    ledger.enter("earlier", "a/1", {Release(1.0, 2.0): 1})
    with pytest.raises(BudgetSpent, match=r"no noise is enough for the plan to have epsilon 1.*Ask for fewer rounds"):
        session(folder, {"noise_multiplier": None, "target_epsilon": 1.0, "delta": 1e-3}, budget)


def test_nothing_is_spent_for_an_estimate_whose_model_cannot_be_built() -> None:
    trainer, begun = Mock(), list[WorkOrder]()
    trainer.initial_model.side_effect = UserCodeError("no model")
    trainer.facts.layout.size = 3
    assert not likely_update(trainer, begun.append, 4, 2, 0.1, 0)[0].any() and not begun
