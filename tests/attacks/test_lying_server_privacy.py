"""A lying server at a silo with a privacy budget: it overspends nothing, and no figure goes around the mechanism.

The server writes the whole specification and all orders, restarts runs, and repeats messages. The judge reads the
ledger in the silo's state folder, and compares replies of two silos whose tables differ in one row.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fedsync.config.run_spec import RunSpec
from fedsync.config.sections.privacy import BudgetConfig
from fedsync.config.silo_start import SiloStartConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import Evaluation, Split, Subject, WorkOrder, WorkReport
from fedsync.model.layout import Vector
from fedsync.privacy.accounting import epsilon
from fedsync.privacy.release import Release
from fedsync.silo.owner.audit_chain import MOST_LINE
from fedsync.silo.protocol import (
    AskModel,
    AskSnapshot,
    Describe,
    EvaluateModel,
    Hello,
    Identity,
    InitialModel,
    Question,
    Refusal,
    Refused,
    Train,
)
from fedsync.train.dp_sgd.noise import SystemRandom
from tests.attacks.adversary import FEATURES, STEPS, Federation, Heard, Victim, patients
from tests.attacks.conftest import Make

pytest.importorskip("dp_accounting")
pytest.importorskip("opacus")

ROWS, BATCH = 24, 6
BUDGET = {"epsilon": 8.0, "delta": 1e-3, "least_noise": 1.0, "largest_clip": 1.0}
DP = {"kind": "dp-sgd", "clip": 1.0, "noise_multiplier": 1.0}
SCALES = {"age": [50.0, 10.0], "dose": [0.0, 1.0]}
TASK = {"kind": "csv", "file": "data:patients", "target": "ill", "standardise": SCALES}
HUGE = np.float32(3e38)


def table(path: Path, **changes: str) -> Path:
    """A table of patients; ``changes`` replaces lines by their number, as in ``row3="50,1.5,1"``."""
    rng = np.random.default_rng(1)
    lines = [f"{50 + rng.integers(-9, 9)},{rng.normal():.3f},{index % 2}" for index in range(ROWS)]
    for place, line in changes.items():
        lines[int(place.removeprefix("row"))] = line
    path.write_text("\n".join(["age,dose,ill", *lines]) + "\n")
    return path


class Silo:
    """A silo of an owner with a silo.yaml, as a server reaches it."""

    def __init__(self, folder: Path, owner: Any = None, **rows: str) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        folder.chmod(0o700)
        (folder / "data").mkdir()
        (folder / "state").mkdir(mode=0o700)  # as `fedsync silo start` makes it
        said = {
            "name": "silo-a", "server": "localhost:1", "insecure": True, "state": "state",
            "limits": {"batch_size": 1, "samples": 1},
            "data": {"patients": str(table(folder / "data" / "patients.csv", **rows))}, "privacy": BUDGET,
            **(owner or {}),
        }  # fmt: skip
        (folder / "silo.yaml").write_text(yaml.safe_dump(said))
        self.owner = SiloStartConfig.load(folder / "silo.yaml")
        self.number = 0

    def begin(self, folder: Path | None = None, **changes: Any) -> Victim:
        """Have the silo begin a run."""
        identity = Identity(spec(**changes).dump(), 0, "silo-a")
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            identity.save(folder)
        return Victim(identity, self.owner, folder)

    def order(self, **changes: Any) -> WorkOrder:
        self.number += 1
        made = WorkOrder(f"silo-a/{self.number}", 0, self.number, BATCH, 1, 0.1, seed=7, evaluate=False)
        return replace(made, **changes)

    def train(self, victim: Victim, model: Vector | None = None, **changes: Any) -> Heard:
        return victim.ask(Train(self.order(**changes)), sent(zeros() if model is None else model))

    @property
    def entries(self) -> list[dict[str, Any]]:
        found = [line for file in sorted(self.ledgers.glob("*.jsonl")) for line in file.read_text().splitlines()]
        return [json.loads(line) for line in found]

    @property
    def ledgers(self) -> Path:
        return self.folder / "state" / "privacy"

    def spent(self) -> float:
        """Epsilon by the ledger, added up by the judge."""
        releases: dict[Release, int] = {}
        for line in self.entries:
            if line["kind"] == "spent":
                release = Release(line["rate"], line["noise"])
                releases[release] = releases.get(release, 0) + line["times"]
        return epsilon(releases, BUDGET["delta"])

    @property
    def steps(self) -> int:
        return sum(line["times"] for line in self.entries if line["kind"] == "spent")


def spec(**changes: Any) -> RunSpec:
    plain = RunSpec.of(StrategyConfig.load("fedavg", [f"local={{steps: 1, batch_size: {BATCH}}}"]), None, 1)
    told = {"task": TASK, "run": "run-1", "quorum": 1, "privacy": DP, "silos": 1, **changes}
    local = {**plain.model_dump()["local"], "threads": 1, **told.pop("local", {})}
    return RunSpec.model_validate({**plain.model_dump(), **told, "local": local})


def zeros() -> Vector:
    return np.zeros(6, np.float32)


def sent(model: Vector) -> Any:
    return np.asarray(model, np.float32).view(np.uint8)


def answers(heard: Heard) -> Vector:
    """The update that a silo sent."""
    assert isinstance(heard.reply, WorkReport), heard.words
    assert heard.payload is not None
    return np.asarray(heard.payload).view(np.float32)


def code(heard: Heard) -> Refusal:
    assert isinstance(heard.reply, Refused), heard.words
    return heard.reply.code


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with a short path: a silo's state folder may have only sixty bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def silo(place: Path) -> Silo:
    return Silo(place / "s")


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No noise, and all units in each step: what is left of an update is what the data did."""
    monkeypatch.setattr(SystemRandom, "normal", lambda self, like: like * 0)
    monkeypatch.setattr(SystemRandom, "chosen", lambda self, units, rate: np.arange(units))


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
def test_a_run_with_less_than_the_owner_demands_is_refused_alike_whatever_the_data(
    place: Path, changes: dict[str, Any]
) -> None:
    """The rule comes before the data: a table that does not fit the task gets the same answer."""
    for name, rows in {"whole": {}, "other": {"row3": "50,1.5,9"}}.items():
        silo = Silo(place / name, **rows)
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
    if not heard.refused and batch_size > ROWS:
        assert silo.entries[-1]["rate"] == 1.0
    assert heard.refused or batch_size > ROWS or not np.any(np.isfinite(answers(heard)))


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
def test_an_order_of_endless_steps_is_refused_before_it_begins(silo: Silo, max_steps: int) -> None:
    victim = silo.begin()
    assert code(silo.train(victim, max_steps=max_steps)) is Refusal.BUDGET
    assert not silo.entries


def test_steps_below_zero_give_nothing_back(silo: Silo) -> None:
    victim = silo.begin()
    assert not silo.train(victim, batch_size=20, max_steps=3).refused
    before = silo.spent()
    silo.train(victim, batch_size=20, max_steps=-3)
    assert silo.spent() >= before


def test_orders_race_for_what_is_left_and_one_gets_it(silo: Silo) -> None:
    """Two runs are admitted at once, and the ledger has room for one."""
    victims = [silo.begin(run=f"run-{number}") for number in range(2)]
    orders = [silo.order(batch_size=ROWS, max_steps=3) for _ in victims]
    ready, heard = threading.Barrier(2), []

    def ask(victim: Victim, order: WorkOrder) -> None:
        ready.wait()
        words, _ = victim.service.ask(json_of(Train(order)), sent(zeros()))
        heard.append(words)

    threads = [threading.Thread(target=ask, args=pair) for pair in zip(victims, orders, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum('"refused"' in words.lower() for words in heard) == 1, heard
    assert silo.spent() <= BUDGET["epsilon"]


def json_of(request: Any) -> str:
    from fedsync.silo.protocol import write_request

    return write_request(request)


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
    for name, rows in {"with": {"row3": "50,4000000000000,1"}, "without": {}}.items():
        silo = Silo(place / name, **rows)
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
    for name, rows in {"with": {f"row{row}": "50,3000000000000,1" for row in range(ROWS)}, "without": {}}.items():
        silo = Silo(place / name, **rows)
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


def test_the_seed_of_an_order_tells_nothing_of_its_noise_and_a_repetition_draws_anew(silo: Silo) -> None:
    """The silo is killed after an order, without its folder: the same order has other noise, and is entered again."""
    order = silo.order()
    updates = [answers(silo.begin().ask(Train(order), sent(zeros()))) for _ in range(2)]
    assert np.all(updates[0] != updates[1])
    assert silo.steps == 2


def test_a_repeated_order_gets_the_kept_answer_and_no_second_entry(silo: Silo, place: Path) -> None:
    order, home = silo.order(), place / "home"
    first = answers(silo.begin(home).ask(Train(order), sent(zeros()))).copy()
    second = answers(silo.begin(home).ask(Train(order), sent(zeros())))
    np.testing.assert_array_equal(first, second)
    assert silo.steps == 1


def test_an_answer_that_cannot_be_stored_stays_entered(
    silo: Silo, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "no room")

    victim = silo.begin(place / "home")
    monkeypatch.setattr("fedsync.silo.session.last_order.LastOrders.add", full)
    assert silo.train(victim).refused
    assert silo.steps == 1


def test_what_is_carried_over_is_what_left(silo: Silo, place: Path) -> None:
    """A queued order begins with the noisy update, and costs as any other."""
    victim = silo.begin(place / "home")
    first = silo.train(victim, carry=1.0)
    second = silo.train(victim, carry=1.0, behind="silo-a/1", learning_rate=1e-30)
    assert np.any(answers(first)) and silo.steps == 2
    assert float(np.abs(answers(second)).max()) < 1e-20


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


# The data: what decides before any order.


def hello(victim: Victim) -> str:
    """All that a server learns before the first order."""
    model = victim.ask(AskModel()).reply
    return victim.ask(Describe()).words + (repr(model) if isinstance(model, InitialModel) else str(model))


LOOKS: dict[str, tuple[str, dict[str, Any]]] = {
    "a threshold of the target": ("50,1.5,9", {"positive_above": 5.0, "test_share": 0.45}),
    "classes": ("50,1.5,9", {}),
    "a cell among categories": (
        "77,1.5,1",
        {"columns": {"age": {"categories": [str(each) for each in range(30, 70)]}}},
    ),
    "the kind of a column": ("unknown,1.5,1", {}),
    "a cell too large": ("50,9e300,1", {}),
    "a cell that a scale makes too large": (
        "50,4000000000000,1",
        {"standardise": {"age": [0, 1], "dose": [0, 1e-27]}},
    ),
    "a column that is a target": (
        "60,1.5,1",
        {"target": "age", "positive_above": 58.5, "ignore": ["ill"], "test_share": 0.45},
    ),
    "how many are held out": ("50,1.5,0", {"validation": 0.3, "test_share": 0.45}),
}


@pytest.mark.parametrize(("line", "task"), LOOKS.values(), ids=LOOKS)
def test_before_an_order_nothing_tells_two_tables_apart(place: Path, line: str, task: dict[str, Any]) -> None:
    """The server asks for a run whose checks or sizes depend on one cell, and costs nothing."""
    heard = []
    for name, rows in {"with": {"row3": line}, "without": {}}.items():
        victim = Silo(place / name, **rows).begin(task={**TASK, **task})
        heard.append(hello(victim))
    assert heard[0] == heard[1]


def test_a_row_moves_no_other_row_between_the_splits(place: Path) -> None:
    """Neighbours differ in one row of the training data, which DP-SGD counts on, and not in many."""
    from fedsync.tasks.csv_ import CsvTask
    from fedsync.tasks.task_protocol import SiloSlot

    found = []
    for name, extra in {"one": "", "more": "61,0.5,1\n"}.items():
        path = table(place / f"{name}.csv")
        path.write_text(path.read_text() + extra)
        task = CsvTask((str(path),), "ill", scales={}, by_row=True)
        rows = task._rows(SiloSlot("silo-a", 0, 1, 7))
        found.append(set(rows.train.tolist()))
    assert found[0] == found[1] - {ROWS}


def test_the_number_of_rows_that_the_owner_tells_is_the_only_one(place: Path) -> None:
    silo = Silo(place / "s", {"privacy": {**BUDGET, "examples": 100}})
    reply = silo.begin().ask(Describe()).reply
    assert isinstance(reply, Hello) and reply.facts.examples == 100


def test_under_a_budget_no_reason_of_a_failure_leaves(place: Path) -> None:
    """Reasons quote rows and values; an owner who tells them for mending tells them without noise."""
    silo = Silo(place / "s", {"errors": "text"})
    reply = silo.begin(task={**TASK, "target": "age"}).ask(Describe()).reply
    assert not isinstance(reply, Refused) or not reply.text


# The owner's names and rules.


@pytest.mark.parametrize("file", ["data:patients", "data:same", "path"])
def test_one_file_under_two_names_has_one_budget(place: Path, file: str) -> None:
    """The owner gave one name a budget, and another name means the same file."""
    data = place / "s" / "data" / "patients.csv"
    owner = {"data": {"patients": str(data), "same": str(data)}, "privacy": {"patients": BUDGET}}
    silo = Silo(place / "s", owner)
    victim = silo.begin(task={**TASK, "file": str(data) if file == "path" else file})
    assert not silo.train(victim).refused
    assert silo.steps == 1


def test_a_file_outside_of_the_owners_names_is_not_read(place: Path) -> None:
    silo = Silo(place / "s")
    outside = table(place / "outside.csv")
    assert code(silo.begin(task={**TASK, "file": str(outside)}).ask(Describe())) is Refusal.OWNER


def test_an_emulated_machine_draws_its_noise_from_the_system_and_pays_the_owners_budget(place: Path) -> None:
    silo = Silo(place / "s", {"emulate": True})
    machine = {"name": "m", "speed": 1e9, "memory_samples": 10**6}
    order, updates = silo.order(), []
    for _ in range(2):
        updates.append(answers(silo.begin(emulate=[machine]).ask(Train(order), sent(zeros()))))
    assert np.all(updates[0] != updates[1])
    assert silo.steps == 2


def test_noise_that_a_run_chose_once_gives_way_to_a_floor_that_its_owner_raised(place: Path) -> None:
    dp = {"kind": "dp-sgd", "clip": 1.0, "target_epsilon": 7.0, "delta": 1e-3}
    silo = Silo(place / "s")
    changes: dict[str, Any] = {"privacy": dp, "stop": {"rounds": 1}}
    assert not silo.begin(**changes).ask(Describe()).refused
    raised = {**BUDGET, "least_noise": 50.0}
    silo.owner = silo.owner.model_copy(update={"privacy": BudgetConfig.model_validate(raised)})
    assert not silo.train(silo.begin(**changes)).refused
    assert silo.entries[-1]["noise"] >= 50.0


# Models.


def test_a_model_that_silences_all_rows_but_one_gets_no_more_of_it_than_the_clip(place: Path, quiet: None) -> None:
    """Neighbours' noiseless sums are as far apart as the noise is made for."""
    updates = []
    for name, rows in {"with": {"row3": "50,1000,1"}, "without": {"row3": "50,0,1"}}.items():
        silo = Silo(place / name, **rows)
        model = np.asarray([0, 30, 0, -30, 0, 0], np.float32)
        updates.append(answers(silo.train(silo.begin(), model, batch_size=1, learning_rate=1.0)))
    assert float(np.linalg.norm(updates[0] - updates[1])) <= 2.0 * (1 + 1e-5)


def test_private_parts_are_trained_with_noise_and_counted_together_with_the_others(silo: Silo, quiet: None) -> None:
    """A part that never travels would remember rows, and evaluations of it would tell them."""
    victim = silo.begin(model={"private": ["bias"]})
    bias = _bias(victim)
    heard = victim.ask(Train(silo.order(batch_size=1, learning_rate=1.0)), sent(np.zeros(4, np.float32)))
    assert silo.steps == 1
    moved = _bias(victim) - bias
    assert np.any(moved), "it was trained"
    assert float(np.linalg.norm(np.concatenate([answers(heard), moved]))) <= ROWS * 1.0


def _bias(victim: Victim) -> Vector:
    values: Vector = victim.session._trainer._trainer._model.bias.detach().numpy().copy()  # type: ignore[attr-defined]
    return values
