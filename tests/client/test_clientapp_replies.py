"""A Flower ClientApp, hosted: its evaluations, its first model, and what goes wrong in its replies."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from torch import nn

from fedsync.client import steps
from fedsync.common.errors import ConfigError, Diverged
from fedsync.core.orders import Cursor, Evaluation
from fedsync.train.guests.guest_clientapp import ClientAppTrainer, FirstModel
from tests.client.clientapps import SITE, Loop, Tied, app_of, array, hosted, loader, opaque, remembering
from tests.train.make import order


def evaluating(metrics: dict[str, float], seen: list[Any] | None = None) -> ClientAppTrainer:
    app = app_of(remembering)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        if seen is not None:
            seen.append((dict(msg.content["config"]), dict(context.state)))
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)

    return hosted(app)


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"eval_loss": 0.5, "eval_acc": 0.75, "num-examples": 40}, Evaluation(20.0, 30.0, 40)),
        (
            {"loss": 0.5, "top3": 0.9, "accuracy": 0.75, "num-examples": 8},
            Evaluation(4.0, 6.0, 8, {"eval_top3": (0.9, 8)}),
        ),
        (
            {"num-examples": 8, "hausdorff": 9.0, "val_dice": 0.5},
            Evaluation(None, 4.0, 8, {"eval_hausdorff": (9.0, 8)}),
        ),
        ({"num-examples": 8, "eval_loss": 0.5}, Evaluation(4.0, None, 8)),
        (  # of errors, more is no better
            {"num-examples": 8, "test_mae": 0.7, "Top 5": 3, "odd": float("nan")},
            Evaluation(None, None, 0, {"test_mae": (0.7, 8), "eval_top_5": (3.0, 8)}),
        ),
    ],
)
def test_an_evaluation_is_the_replys_metrics(metrics: dict[str, float], expected: Evaluation) -> None:
    guest = evaluating(metrics)
    assert guest.evaluate(guest.initial_model()) == expected


def test_an_evaluation_finds_what_the_last_order_kept() -> None:
    seen: list[Any] = []
    guest = evaluating({"num-examples": 8, "acc": 1.0}, seen)
    cursor = guest.run(replace(order(), evaluate=True), guest.initial_model(), Cursor()).cursor
    guest.evaluate(guest.initial_model(), cursor)
    (before, nothing), (after, kept) = seen
    assert before == {"top": 3, "server-round": 3} and nothing == {}
    assert after["server-round"] == 4 and kept["counts"]["orders"] == 1


def test_an_app_need_not_evaluate() -> None:
    guest = hosted(app_of(opaque))
    assert guest.evaluate(guest.initial_model()) == Evaluation(0.0, 0.0, 0)


def test_a_first_model_is_a_module_a_record_or_arrays() -> None:
    arrays = [np.ones((2, 3), np.float32), np.zeros(2, np.int64)]
    for made in (arrays, ArrayRecord(arrays)):
        first = FirstModel(make=lambda made=made: made).arrays(seed=7)
        assert first.layout.names == ("0", "1") and first.read().tolist() == [1] * 6 + [0] * 2
    one, other = (FirstModel(make=Tied).arrays(seed=7).read() for _ in range(2))
    assert (one == other).all(), "the same at every silo"
    given = FirstModel(tensors=[("w", "float64", (2, 2)), ("n", "int64", ())]).arrays(seed=7)
    assert given.layout.shapes == ((2, 2), ()) and given.arrays["w"].dtype == np.float64


def test_a_model_that_only_the_server_knows_is_nowhere_else() -> None:
    tensors = [(name, tensor.numpy().dtype.name, tuple(tensor.shape)) for name, tensor in Tied().state_dict().items()]
    guest = hosted(app_of(opaque), tensors=tensors)
    guest.run(order(), np.ones(guest.layout.size, np.float32), Cursor())
    with pytest.raises(ConfigError, match="silos cannot make it"):
        guest.initial_model()


def epochs(msg: Message, context: Context, model: nn.Module) -> dict[str, float]:
    batches = steps(msg, loader(8))
    for _ in range(2):
        for _ in batches:
            pass
    return {}


def diverging(msg: Message, context: Context, model: nn.Module) -> dict[str, float]:
    return {"train_loss": float("inf")}


@pytest.mark.parametrize(
    ("loop", "kind", "problem"),
    [
        (epochs, ConfigError, "a second loop over steps of one order.*write 1"),
        (diverging, Diverged, "the update or the reported loss is not finite; the loss is inf"),
    ],
)
def test_what_goes_wrong_in_an_order_is_said_in_a_line(loop: Loop, kind: type[Exception], problem: str) -> None:
    guest = hosted(app_of(loop), site=replace(SITE, node_config={"num-examples": 40}))
    with pytest.raises(kind, match=problem):
        guest.run(order(), guest.initial_model(), Cursor())


def small(msg: Message, context: Context) -> Message:
    content = RecordDict({"arrays": ArrayRecord([np.zeros(2)]), "metrics": MetricRecord({"num-examples": 4})})
    return Message(content, reply_to=msg)


def other_shape(msg: Message, context: Context) -> Message:
    arrays = {name: np.zeros((2,)) for name in Tied().state_dict()}
    return Message(
        RecordDict({"arrays": ArrayRecord({n: array(a) for n, a in arrays.items()}), "metrics": MetricRecord({})}),
        reply_to=msg,
    )


def no_arrays(msg: Message, context: Context) -> Message:
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": 4})}), reply_to=msg)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (small, r"its arrays \(0, \.\.\.\) lack encode\.weight"),
        (other_shape, r"encode\.weight has the shape \(2,\), not \(3, 3\)"),
        (no_arrays, "0 records of arrays"),
        (lambda msg, context: None, "it answers NoneType"),
    ],
)
def test_a_reply_of_another_form_is_refused(answer: Any, problem: str) -> None:
    app = ClientApp()
    app.train()(answer)
    guest = hosted(app, site=replace(SITE, node_config={"num-examples": 40}))
    with pytest.raises(ConfigError, match=problem):
        guest.run(order(), guest.initial_model(), Cursor())


def test_what_cannot_be_hosted_says_so_before_training() -> None:
    with pytest.raises(ConfigError, match="a Linear, no ClientApp"):
        hosted(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="made of a client_fn"):
        hosted(ClientApp(client_fn=lambda context: NumPyClient().to_client()))
    with pytest.raises(ConfigError, match="the strategy names no initial model"):
        hosted(app_of(opaque), tensors=[])
    with pytest.raises(ConfigError, match="it makes str"):
        hosted(app_of(opaque), make=lambda: "a model")
    with pytest.raises(ConfigError, match=r"the number of this silo's samples is 0"):
        _ = hosted(app_of(lambda *parts: {"num-examples": 0})).examples
