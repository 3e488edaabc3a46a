"""A server with a silo on its side, under masks, that has the others do little: what it finds of one silo's update.

Masks hide an update among others. So the gain is how well the opened sum, or a figure of it, agrees with that of the
victim alone: 1 is the victim's itself.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsync.model.layout import Vector
from tests.attacks.adversary import Federation
from tests.attacks.conftest import Make
from tests.attacks.forgery import give
from tests.attacks.test_server_and_silo import FRIEND, MASKED, VICTIM, agreement

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


def opened(federation: Federation) -> Vector:
    """What the friend's model moves by, once it is sent all that the server has."""
    friend = federation.silos[FRIEND]
    give(friend, federation.aggregator.outgoing(FRIEND), federation.version)
    return friend.model - federation.first_model


def upload(federation: Federation, orders: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Updates of the silos that do not refuse such orders."""
    ids = []
    for name, work in orders.items():
        heard = federation.train(name, federation.order(name, **work))
        if heard.payload is not None:
            federation.aggregator.put(name, federation.last, heard.payload)
            federation.aggregator.holds(name, federation.version)
            ids.append(federation.last)
    return ids


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
    try:
        federation.commit(upload(federation, orders))
        truth = np.random.default_rng(1).normal(size=64).astype(np.float32)
        gained = agreement(opened(federation), truth)
    except Exception:  # the server cannot add up what silos sealed
        gained = 0.0
    assert gained < 0.5, f"{gained:.5f} of one silo's update"


UNEQUAL = {
    "more steps": ({"max_steps": 200, "batch_size": 8}, {"max_steps": 1, "batch_size": 8}),
    "larger batches": ({"max_steps": 8, "batch_size": 20}, {"max_steps": 8, "batch_size": 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "weight"), [("more steps", "silo"), ("more steps", "samples"), ("larger batches", "samples")]
)
def test_much_work_for_one_silo_and_little_for_others_isolates_nobody(work: str, weight: str, make: Make) -> None:
    much, little = UNEQUAL[work]
    changes = {"aggregation": {"kind": "fedavg", "weight": weight}, "local": {"steps": much["max_steps"]}}
    federation = make(4, cipher=MASKED, changes=changes)
    orders = {name: much if name == VICTIM else little for name in federation.names}
    federation.commit(upload(federation, orders))
    truth = federation.own_update(VICTIM, federation.first_model, **much)
    gained = agreement(opened(federation), truth)
    assert gained < 0.95, f"{gained:.5f} of one silo's update"


def test_an_order_that_is_halted_early_for_others_isolates_nobody(make: Make) -> None:
    """All are ordered the same, and the others' time ends at once."""
    federation = make(4, cipher=MASKED, changes={"local": {"steps": 200}})
    orders = {name: {"max_steps": 200, "batch_size": 8, "budget_s": 600.0} for name in federation.names}
    for name in federation.names:
        if name != VICTIM:
            orders[name]["budget_s"] = 1e-9
    federation.commit(upload(federation, orders))
    truth = federation.own_update(VICTIM, federation.first_model, max_steps=200, batch_size=8)
    gained = agreement(opened(federation), truth)
    assert gained < 0.95, f"{gained:.5f} of one silo's update"
