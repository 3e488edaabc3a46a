"""A server with a silo on its side, under masks: it has the group's key and opens whatever it is sent.

It is after one silo's update. The gain is how well what it opens agrees with that: 1 is the update itself, 0 is noise.
"""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsync.cipher.masking.mask_round import RevealQuestion, SignAnswer, Survivors, read_answer, read_question
from fedsync.core.actions import Commit
from fedsync.model.layout import Vector
from fedsync.silo.protocol import Question, Train
from tests.attacks.adversary import Federation
from tests.attacks.conftest import Make
from tests.attacks.forgery import beginning

MASKED = "{kind: masked, inner: {kind: bfv, members: 3}}"
VICTIM, FRIEND = "silo-b", "silo-a"


def agreement(found: Vector, truth: Vector) -> float:
    """Share of the truth that is in what was found, 0..1: squared correlation."""
    if len(found) != len(truth) or not np.any(found):
        return 0.0
    return float(np.dot(found, truth) ** 2 / (np.dot(found, found) * np.dot(truth, truth)))


def opened(federation: Federation) -> Vector:
    """Change of the friend's model once it is sent all that the server has; empty without a model."""
    federation.bring([FRIEND])
    model = federation.silos[FRIEND].model
    return model - federation.first_model if len(model) else model


def isolated(federation: Federation) -> float:
    """Share of the victim's first update that the friend's model tells, 0..1."""
    return agreement(opened(federation), federation.own_update(VICTIM, federation.first_model))


def upload(federation: Federation, names: Sequence[str], **work: Any) -> list[str]:
    """Updates of those who do not refuse; the victim is asked for honest work."""
    return federation.upload({name: {} if name == VICTIM else work for name in names})


WORK: dict[str, dict[str, Any]] = {
    "a rate that moves nothing": {"learning_rate": 1e-30},
    "an order that only scores": {"learning_rate": 0.0},
    "a budget, which ends at once": {"budget_s": 1e-9, "learning_rate": 1e-30},
    "an evaluation": {"evaluate": True, "learning_rate": 1e-30},
}


@pytest.mark.slow
@pytest.mark.parametrize("work", WORK)
def test_other_work_for_others_isolates_nobody(work: str, make: Make) -> None:
    """The sum of one silo's update and of others that moved nothing is that silo's update."""
    federation = make(4, cipher=MASKED)
    federation.commit(upload(federation, federation.names, **WORK[work]))
    gained = isolated(federation)
    assert gained < 0.5, f"{gained:.2f} of one silo's update"


def test_the_same_work_gives_the_sum(make: Make) -> None:
    """The control: so much would be seen."""
    federation = make(4, cipher=MASKED)
    federation.commit(upload(federation, federation.names))
    truth = sum(federation.own_update(name, federation.first_model) for name in federation.names)
    assert agreement(opened(federation), truth) > 0.9


def questions(federation: Federation, ids: list[str]) -> dict[str, Survivors]:
    """What an honest server would ask first."""
    federation.aggregator.commit(Commit(1, dict.fromkeys(ids, 1 / len(ids))))
    asked = {name: read_question(one) for name, one in federation.aggregator.questions().items()}
    return {name: one for name, one in asked.items() if isinstance(one, Survivors)}


def test_nobody_signs_two_lists_and_nobody_reveals_to_few(make: Make) -> None:
    """Two lists would give the victim's own mask by one, and its masks with others by the other."""
    federation = make(5, cipher=MASKED)
    ids = [federation.collect(name) for name in federation.names]
    asked = questions(federation, ids)
    whole = next(iter(asked.values()))
    without = replace(whole, annexes={name: one for name, one in whole.annexes.items() if name != VICTIM})
    signed: dict[str, bytes] = {}
    for name in federation.names:
        heard = federation.silos[name].ask(Question(), whole.encode())
        assert heard.payload is not None
        answer = read_answer(name, heard.payload)
        assert isinstance(answer, SignAnswer)
        signed[name] = answer.signature
    second = [name for name in federation.names if not federation.silos[name].ask(Question(), without.encode()).refused]
    assert second == [], "lists signed twice"
    told = []
    for count in range(4):  # of 5 with one on the server's side, 4 must sign
        few = dict(list(signed.items())[:count])
        question = RevealQuestion(whole.context, few, {}).encode()
        told += [name for name in federation.names if not federation.silos[name].ask(Question(), question).refused]
    assert told == [], "masks revealed"
    own = {name: federation.envelope(f"{name}/1").head.annex for name in federation.names}
    question = RevealQuestion(whole.context, signed, {VICTIM: own[FRIEND]}).encode()
    assert federation.silos["silo-c"].ask(Question(), question).refused, "shares out of another silo's annex"


@pytest.mark.slow
@pytest.mark.parametrize("kept", [(FRIEND, VICTIM), (VICTIM,), (FRIEND, VICTIM, "silo-c")])
def test_a_roster_of_the_server_s_making_isolates_nobody(kept: tuple[str, ...], make: Make) -> None:
    """Fewer in the roster than there are silos, so that fewer are in the sum."""
    federation = make(5, cipher=MASKED)
    beginning(federation)
    for name in set(federation.names) - set(kept):
        del federation.aggregator._announcements.here[name]
    federation.aggregator._announcements.renew()
    federation.aggregator._made.clear()
    if ids := upload(federation, kept):
        federation.commit(ids)
    gained = isolated(federation)
    assert gained < 0.9, f"{gained:.2f} of one silo's update"


def test_a_lost_book_of_masks_does_not_give_the_same_masks_again(make: Make) -> None:
    """Two updates under the same masks give their difference to whoever has the group's key."""
    federation = make(4, cipher=MASKED)
    payload = federation.aggregator.outgoing(VICTIM)
    order = federation.order(VICTIM)
    first = federation.silos[VICTIM].ask(Train(order), payload)
    assert first.payload is not None
    shutil.rmtree(federation.rings[VICTIM] / "masks")
    again = federation.silo(VICTIM).ask(Train(replace(order, learning_rate=0.5)), payload)
    assert again.payload is None, "two updates under one roster and attempt"


# Others that do little, by another configuration, order or time.


APP = """
import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


def model():
    return [np.zeros(64, dtype=np.float32)]


@app.train()
def train(msg, context):
    (start,) = msg.content["arrays"].to_numpy_ndarrays()
    own = np.random.default_rng(context.node_config["partition-id"]).normal(size=start.shape) / 20
    arrays = ArrayRecord([start + np.float32(context.run_config.get("local-epochs", 1)) * own.astype(np.float32)])
    figures = MetricRecord({"num-examples": 60, "train_loss": 1.0})
    return Message(RecordDict({"arrays": arrays, "metrics": figures}), reply_to=msg)
"""


def test_another_run_configuration_for_others_isolates_nobody(root: Path, make: Make) -> None:
    """Their code reads it, and then does nothing."""
    (root / "data").mkdir(exist_ok=True)
    (root / "data" / "app.py").write_text(APP)
    place = str(root / "data" / "app.py")
    task = {"kind": "clientapp", "app": f"{place}:app", "model": f"{place}:model"}
    trains, idles = '{"local-epochs": 1}', '{"local-epochs": 0}'
    every, owner = {f"silo-{each}": trains for each in "abcd"}, {"code_files": [f"{place}:app", f"{place}:model"]}
    federation = make(4, cipher=MASKED, changes={"task": task}, settings=every, owner=owner)
    federation.settings = {name: trains if name == VICTIM else idles for name in federation.names}
    federation.silos |= {name: federation.silo(name) for name in federation.names}
    orders: dict[str, dict[str, Any]] = {name: {} for name in federation.names}
    federation.commit(federation.upload(orders))
    truth = np.random.default_rng(1).normal(size=64).astype(np.float32)
    gained = agreement(opened(federation), truth)
    assert gained < 0.5, f"{gained:.5f} of one silo's update"


UNEQUAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "more steps": ({"max_steps": 200, "batch_size": 8}, {"max_steps": 1, "batch_size": 8}),
    "larger batches": ({"max_steps": 8, "batch_size": 20}, {"max_steps": 8, "batch_size": 1}),
    "more time": (
        {"max_steps": 200, "batch_size": 8, "budget_s": 600.0},
        {"max_steps": 200, "batch_size": 8, "budget_s": 1e-9},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "weight"),
    [("more steps", "silo"), ("more steps", "samples"), ("larger batches", "samples"), ("more time", "examples")],
)
def test_much_work_for_one_silo_and_little_for_others_isolates_nobody(work: str, weight: str, make: Make) -> None:
    much, little = UNEQUAL[work]
    changes = {"aggregation": {"kind": "fedavg", "weight": weight}, "local": {"steps": much["max_steps"]}}
    federation = make(4, cipher=MASKED, changes=changes)
    orders = {name: much if name == VICTIM else little for name in federation.names}
    federation.commit(federation.upload(orders))
    truth = federation.own_update(VICTIM, federation.first_model, **much)
    gained = agreement(opened(federation), truth)
    assert gained < 0.95, f"{gained:.5f} of one silo's update"
