"""Mods of a hosted ClientApp: they run around each order and see Flower's numbers; Flower's own mods do their work."""

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod, message_size_mod
from torch import nn

from fedsync.client import Silo
from fedsync.common.environment import FLOWER_IDS
from fedsync.core.orders import Cursor
from tests.client.clientapps import hosted
from tests.train.make import order

SITE = Silo(1, "silo-1", 7, "cpu")
STEP = 3.0
"""Length of an update without mods: one entry of it."""


def after_an_order(*mods: Any, site: Silo = SITE) -> np.ndarray:
    """The update that an order of an app with these mods comes to."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        arrays = msg.content["arrays"].to_torch_state_dict()
        arrays["weight"][0, 0] += STEP
        metrics = MetricRecord({"num-examples": 40, "train_loss": 1.0})
        return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=msg)

    guest = hosted(app, site=site, make=lambda: nn.Linear(2, 2, bias=False))
    return np.asarray(guest.run(order(), guest.initial_model(), Cursor()).update)


def test_flowers_fixed_clipping_clips() -> None:
    assert np.linalg.norm(after_an_order()) == pytest.approx(STEP)
    site = Silo(1, "silo-1", 7, "cpu", train_config={"clipping_norm": 0.5})
    assert np.linalg.norm(after_an_order(fixedclipping_mod, message_size_mod, site=site)) == pytest.approx(0.5)


def test_flowers_local_privacy_clips_and_adds_noise() -> None:
    update = after_an_order(LocalDpMod(clipping_norm=0.5, sensitivity=1.0, epsilon=1e4, delta=0.1))
    assert np.linalg.norm(update) == pytest.approx(0.5, abs=0.01), "the noise is small at this epsilon"
    assert np.count_nonzero(update) == update.size, "and it is in every value"


@pytest.mark.parametrize(("ids", "seen"), [("", (1, 2)), ("17 9223372036854775809", (17, 2**63 + 1))])
def test_a_mod_sees_flowers_run_and_node_ids(ids: str, seen: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Flower's messages, in virtual time, a run is 1, and a silo's node its number + 1."""
    monkeypatch.setenv(FLOWER_IDS, ids)
    told = list[tuple[int, int, int, int]]()

    def note(msg: Message, context: Context, call_next: Any) -> Message:
        told.append((context.run_id, context.node_id, msg.metadata.run_id, msg.metadata.dst_node_id))
        reply: Message = call_next(msg, context)
        return reply

    after_an_order(note)
    assert set(told) == {seen * 2}
