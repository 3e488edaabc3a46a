"""A lying server that asks what one row of private data decides, before any order and in its models.

The judge compares replies of two silos whose tables differ in one row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsync.config.sections.privacy import BudgetConfig
from fedsync.model.layout import Vector
from fedsync.silo.protocol import AskModel, Describe, Hello, InitialModel, Refusal, Refused, Train
from fedsync.tasks.csv_ import CsvTask
from fedsync.tasks.task_protocol import SiloSlot
from tests.attacks.adversary import Victim
from tests.attacks.private_silo import BUDGET, ROWS, TASK, Silo, answers, code, neighbours, sent, table, zeros

pytest.importorskip("dp_accounting")
pytest.importorskip("opacus")

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
    "a cell that a scale makes too large": ("50,4000000000000,1", {"standardise": {"age": [0, 1], "dose": [0, 1e-27]}}),
    "a column that is a target": (
        "60,1.5,1",
        {"target": "age", "positive_above": 58.5, "ignore": ["ill"], "test_share": 0.45},
    ),
    "how many are held out": ("50,1.5,0", {"validation": 0.3, "test_share": 0.45}),
}


@pytest.mark.parametrize(("line", "task"), LOOKS.values(), ids=LOOKS)
def test_before_an_order_nothing_tells_two_tables_apart(place: Path, line: str, task: dict[str, Any]) -> None:
    """The server asks for a run whose checks or sizes depend on one cell, and costs nothing."""
    one, other = (hello(silo.begin(task={**TASK, **task})) for silo in neighbours(place, row3=line))
    assert one == other


def test_a_row_moves_no_other_row_between_the_splits(place: Path) -> None:
    """Neighbours differ in one row of the training data, which DP-SGD counts on, and not in many."""
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


@pytest.mark.slow
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
