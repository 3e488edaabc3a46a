"""What a ServerApp says to `FedSync.start`, as Flower's quickstart does."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Context, Message

from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.flower import messages
from fedsync.flower.strategy import FedSync
from fedsync.flower.timeouts import Timeouts
from tests.flower.grid import DirectGrid, honest, silos_in_this_process

QUICK = ["task={kind: digits}", "local.steps=1", "local.batch_size=8", "min_silos=2", "stop.rounds=2"]
TIMING = Timeouts(poll_s=0.001, order_timeout_s=20, join_timeout_s=60)


@pytest.fixture(autouse=True)
def _identity() -> Iterator[None]:
    with silos_in_this_process():
        yield


def _strategy(out: Path, *overrides: str) -> FedSync:
    return FedSync(StrategyConfig.load("fedavg", [*QUICK, *overrides]), out=out, timing=TIMING)


def test_its_configurations_reach_silos_with_the_run(tmp_path: Path) -> None:
    specs: set[str] = set()

    def answer(message: Message, context: Context) -> Message | None:
        specs.add(messages.read_request(message)[0])
        return honest(message, context)

    told, judged = ConfigRecord({"lr": 0.01}), ConfigRecord({"full": True})
    strategy = _strategy(tmp_path, "train_config={lr: 1.0, epochs: 2}")
    strategy.start(DirectGrid(2, {1: answer}), train_config=told, evaluate_config=judged)
    [spec] = [RunSpec.parse(text) for text in specs]
    assert (spec.train_config, spec.evaluate_config) == ({"lr": 0.01, "epochs": 2}, {"full": True})
    assert dict(told) == {"lr": 0.01}, "what the caller gave stays as it is"
