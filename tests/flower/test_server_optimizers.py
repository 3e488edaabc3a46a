"""Server optimizers beside flwr's own strategies, on the same updates."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvgM, FedYogi
from numpy.typing import NDArray

from fedsync.core.actions import Commit
from fedsync.model.layout import Vector
from fedsync.model.plain_aggregator import PlainAggregator
from fedsync.policies.schema import kinds

pytestmark = pytest.mark.usefixtures("silos_here")

VALUES, ROUNDS = 400, 12
EXAMPLES = {"a": 30, "b": 50, "c": 20}

PAIRS: list[tuple[str, dict[str, Any], Any]] = [
    ("fedavgm", {}, FedAvgM(server_momentum=0.9)),
    ("fedavgm", {"momentum": 0.5, "rate": 0.7}, FedAvgM(server_momentum=0.5, server_learning_rate=0.7)),
    ("fedadam", {}, FedAdam()),
    ("fedadam", {"rate": 0.02, "beta_1": 0.8, "beta_2": 0.95, "tau": 0.01},
        FedAdam(eta=0.02, beta_1=0.8, beta_2=0.95, tau=0.01)),
    ("fedyogi", {}, FedYogi()),
    ("fedyogi", {"rate": 0.05, "beta_1": 0.5, "beta_2": 0.9, "tau": 0.01},
        FedYogi(eta=0.05, beta_1=0.5, beta_2=0.9, tau=0.01)),
    ("fedadagrad", {}, FedAdagrad()),
    ("fedadagrad", {"rate": 0.03, "tau": 0.1}, FedAdagrad(eta=0.03, tau=0.1)),
]  # fmt: skip


def _updates(number: int) -> dict[str, Vector]:
    """Of one round: values of very different sizes, some of which nobody changes."""
    rng = np.random.default_rng(number)
    sizes = np.repeat(np.float32([0.3, 0.01, 1e-4, 0]), VALUES // 4)
    return {name: (rng.normal(loc=0.5, size=VALUES) * sizes).astype(np.float32) for name in EXAMPLES}


def _by_flwr(strategy: Any, first: Vector) -> Iterator[NDArray[np.float64]]:
    """The models of each round.

    In float64: flwr takes the difference of two models, and in float32 what that rounds is as large as small updates.
    """
    model = first.astype(np.float64)
    for number in range(1, ROUNDS + 1):
        # What `configure_train` does, which wants a grid.
        if isinstance(strategy, FedAvgM):
            strategy.current_arrays = strategy.current_arrays or ArrayRecord({"w": Array(model)})
        else:
            strategy.current_arrays = {"w": model}
        replies = []
        for name, update in _updates(number).items():
            metrics = MetricRecord({"num-examples": EXAMPLES[name]})
            found = ArrayRecord({"w": Array(model + update)})
            content = RecordDict({"arrays": found, "metrics": metrics})
            replies.append(Message(content, dst_node_id=1, message_type="train"))
        arrays, _ = strategy.aggregate_train(number, replies)
        model = arrays["w"].numpy()
        yield model


@pytest.mark.parametrize(("kind", "keys", "theirs"), PAIRS, ids=[f"{kind}-{len(keys)}" for kind, keys, _ in PAIRS])
def test_the_models_are_flwr_s_to_float32(kind: str, keys: dict[str, Any], theirs: Any) -> None:
    first = np.random.default_rng(0).normal(size=VALUES).astype(np.float32)
    optimizer: Any = kinds("server_optimizer")[kind](**keys)
    ours = PlainAggregator(first, optimizer=optimizer.build())
    weights = {name: count / sum(EXAMPLES.values()) for name, count in EXAMPLES.items()}
    for number, expected in enumerate(_by_flwr(theirs, first), 1):
        for name, update in _updates(number).items():
            ours.put(name, name, update)
        ours.commit(Commit(number, weights))
        np.testing.assert_allclose(ours.model, expected, rtol=1e-6, atol=1e-6, err_msg=f"round {number}")
    assert not np.allclose(ours.model[:100], first[:100], atol=0.05), "it went somewhere"
    np.testing.assert_array_equal(ours.model[300:], first[300:])
