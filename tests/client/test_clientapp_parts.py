"""Private and frozen arrays of a Flower ClientApp, which is given and gives back the whole model as ever."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message
from torch import nn

from fedsync.common.errors import ConfigError
from fedsync.core.orders import Cursor
from fedsync.model.tensor_parts import PartPatterns
from tests.client.clientapps import app_of, hosted, stepwise
from tests.train.make import order

NORMS = PartPatterns(private=["norm.*"])


def test_private_arrays_are_the_apps_from_order_to_order_and_outlive_it() -> None:
    counts: list[int] = []

    def loop(msg: Message, context: Context, model: nn.Module) -> dict[str, float]:
        counts.append(int(model.norm.num_batches_tracked))  # type: ignore[union-attr,arg-type]
        assert "fedsync.private" not in context.state
        return stepwise(msg, context, model)

    guest = hosted(app_of(loop), run=NORMS)
    base = guest.initial_model()
    assert guest.layout.names == ("encode.weight",) and set(guest.kept_names) == {
        f"norm.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }
    first = guest.run(order(max_steps=3), base, Cursor())
    again = hosted(app_of(loop), run=NORMS)  # another process
    second = again.run(order(max_steps=3), base, first.cursor)
    guest.run(order(max_steps=3), base, Cursor())
    assert counts == [0, 3, 0] and first.update.size == 9 and second.update.any()


def test_a_frozen_array_may_be_left_out_and_not_changed() -> None:
    def only(msg: Message, context: Context, model: nn.Module) -> dict[str, float]:
        with torch.no_grad():
            model.encode.weight += 1.0  # type: ignore[operator]
            if spoil:
                model.norm.bias += 1.0  # type: ignore[operator,union-attr]
        return {}

    spoil = False
    guest = hosted(app_of(only), run=PartPatterns(["*code*"]))
    outcome = guest.run(order(), guest.initial_model(), Cursor())
    np.testing.assert_allclose(outcome.update, np.ones(9), rtol=1e-6)
    assert len(guest.frozen_digest) == 32 and outcome.cursor.private == b""
    spoil = True
    with pytest.raises(ConfigError, match=r"training changed norm\.bias, which is frozen"):
        guest.run(order(), guest.initial_model(), Cursor())


def test_what_silos_cannot_make_cannot_stay_there() -> None:
    tensors = [("a", "float32", (2,)), ("b", "float32", (2,))]
    with pytest.raises(ConfigError, match="b does not travel, and silos cannot make it"):
        hosted(app_of(stepwise), run=PartPatterns(private=["b"]), tensors=tensors)
    made = ArrayRecord({name: Array(np.full(2, value, np.float32)) for name, value in (("a", 1), ("b", 2))})
    guest = hosted(app_of(stepwise), run=PartPatterns(private=["b"]), make=lambda: made)
    assert guest.layout.names == ("a",)
