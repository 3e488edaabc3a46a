"""Flower's quickstarts, five lines changed: balanced, halted in the middle, sealed, and with equal batches FedAvg."""

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.app.user_config import UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray

from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.config.tasks.clientapp_task import CodePlace
from fedsync.flower.flower_strategy import FedSync
from fedsync.server.timeouts import Timeouts
from fedsync.simulation.run import run_virtual
from fedsync.train.guests.guest_code import own_code
from fedsync.train.guests.guest_reply import declared
from tests.examples.reader import PUBLISHED, as_published
from tests.flower.grid import DirectGrid, run_identity, silos_in_this_process

pytestmark = [pytest.mark.examples, pytest.mark.parametrize("name", PUBLISHED)]

Arrays = dict[str, NDArray[np.generic]]


def strategy_of(example: Path, *overrides: str) -> StrategyConfig:
    return StrategyConfig.load(example / "strategy.yaml", overrides)


def cluster(**speeds: float) -> ClusterConfig:
    return ClusterConfig.model_validate({"silos": [{"name": name, "speed": speed} for name, speed in speeds.items()]})


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("cipher", ["plain", "bfv"])
def test_batches_follow_the_speeds_and_nothing_changes_under_encryption(cipher: str, name: str, example: Path) -> None:
    config = strategy_of(example, f"cipher={{kind: {cipher}}}", "stop.rounds=4")
    run_virtual(config, cluster(fast=300, middle=200, slow=100), example / "out")
    size = config.local.batch_size
    assert rows_of(example / "out")[-1]["batch_sizes"] == {"fast": size * 3 // 2, "middle": size, "slow": size // 2}


def test_a_bsp_halts_its_loop_in_the_middle(name: str, example: Path) -> None:
    """Once c is done, a third of all samples are, and a and b stop where they are."""
    config = strategy_of(
        example,
        "balancer={kind: fixed}",
        "local={steps: 40, batch_size: 8}",  # a and b would need 20 s
        "barrier={kind: a-bsp, sync_ratio: 0.34, report_s: 0.1}",
        "stop.rounds=1",
    )
    timing = Timeouts(poll_s=0.01, order_timeout_s=60)
    strategy = FedSync(config, cluster(a=16.0, b=16.0, c=800.0), out=example / "out", timing=timing)
    with silos_in_this_process():
        strategy.start(DirectGrid(3))
    assert strategy.run_summary is not None
    done = {silo["name"]: silo["steps"] for silo in strategy.run_summary["silos"]}
    assert done["c"] == 40
    assert 1 <= done["a"] < 20 and 1 <= done["b"] < 20


def test_with_equal_batches_it_is_flowers_own_fedavg(name: str, example: Path, tmp_path: Path) -> None:
    """Of the app as it was published: an epoch a round, seeded as the orders, averaged by flwr.

    Each round from FedSync's model: Adam makes large differences of the last bit of a base.
    """
    rounds, first = 3, strategy_of(example)
    published = as_published(example, tmp_path / "published")
    app, module = first.task.app, first.task.app.partition(".")[0]  # type: ignore[union-attr]
    size = first.local.batch_size
    with own_code(torch.device("cpu"), 0):
        loader = CodePlace.parse(f"{module}.task:load_data").find(published, "task.app", {})
        counts = {len(loader(*place)[0]) for place in arguments(loader, size)}
    (steps,) = counts  # else a published app's epochs are not as long as orders
    config = strategy_of(
        example, "balancer={kind: fixed}", f"stop.rounds={rounds}", f"local.steps={steps}",
        "aggregation={kind: fedavg, weight: examples}", "local.learning_rate=0.05",
    )  # fmt: skip
    models: list[Arrays] = []
    strategy = FedSync(
        config, cluster(a=1e6, b=1e6, c=1e6), out=tmp_path / "out", timing=Timeouts(poll_s=0.001), checkpoints=0
    )
    with silos_in_this_process():
        strategy.start(DirectGrid(3), evaluate_fn=lambda _, arrays: models.append(read(arrays)))
    journal = [json.loads(line) for line in (tmp_path / "out" / "journal.jsonl").read_text().splitlines()]
    orders = [act["order"] for entry in journal for act in entry.get("actions", ()) if act["type"] == "Dispatch"]
    seeds = {order["update_id"]: order["seed"] for order in orders}
    found = CodePlace.parse(app).find(published, "task.app", {})
    with run_identity():
        for number in range(1, rounds + 1):
            replies = [
                trained(
                    found, models[number - 1], site, declared(published / "pyproject.toml"), seeds[f"{silo}/{number}"]
                )
                for site, silo in enumerate("abc")
            ]
            local = [read(cast(ArrayRecord, reply.content["arrays"])) for reply in replies]
            arrays, _ = FedAvg().aggregate_train(number, replies)
            assert arrays is not None
            for key, expected in read(arrays).items():
                # What is averaged is rounded, and in a sum of opposite signs it may be larger than the average.
                largest = max(np.abs(each[key]).max() for each in local)
                assert np.abs(models[number][key] - expected).max() <= 1e-6 * largest, key
    moved = [np.abs(models[0][key] - each).max() for key, each in models[-1].items()]
    assert max(moved) > 1e-3


def arguments(loader: Any, size: int) -> list[tuple[int, ...]]:
    """Of ``load_data``, a site each."""
    sized = "batch_size" in loader.__code__.co_varnames[: loader.__code__.co_argcount]
    return [(site, 3, size) if sized else (site, 3) for site in range(3)]


def trained(app: ClientApp, arrays: Arrays, site: int, settings: Any, seed: int) -> Message:
    """The reply of a published app to a message of a ServerApp that has FedAvg."""
    record = ArrayRecord({key: torch.from_numpy(np.asarray(each)) for key, each in arrays.items()})
    content = RecordDict({"arrays": record, "config": ConfigRecord({"lr": 0.05, "server-round": 1})})
    message = Message(content=content, dst_node_id=site + 1, message_type=MessageType.TRAIN)
    node = cast(UserConfig, {"partition-id": site, "num-partitions": 3})
    context = Context(run_id=1, node_id=site + 1, node_config=node, state=RecordDict(), run_config=settings)
    with own_code(torch.device("cpu"), seed):
        return app(message, context)


def read(arrays: ArrayRecord) -> Arrays:
    return {name: array.numpy() for name, array in arrays.items()}
