"""A server that dies, and one that goes on from what is on disk."""

from pathlib import Path

import pytest
from flwr.app import Context, Message

from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.flower.flower_strategy import FedSync
from fedsync.server.timeouts import Timeouts
from fedsync.silo.protocol import Train
from tests.e2e.deployed import SMALL
from tests.flower.grid import Answer, DirectGrid, asked, honest

SILOS = ClusterConfig.model_validate({"silos": [{"name": name, "speed": 1e6} for name in ("a", "b", "c")]})
QUICK = [SMALL, "local.steps=2", "local.batch_size=8", "stop.rounds=4"]
TIMING = Timeouts(poll_s=0.001, order_timeout_s=20, join_timeout_s=60)


class Killed(BaseException):
    """The server dies."""


def strategy_in(out: Path, *overrides: str, name: str = "fedavg", **options: object) -> FedSync:
    config = StrategyConfig.load(name, [*QUICK, *overrides])
    return FedSync(config, SILOS, out=out, timing=TIMING, **options)  # type: ignore[arg-type]


def killed_at(version: int) -> Answer:
    """Silos that are honest until the server dies, which it does when it sends this version."""

    def answer(message: Message, context: Context) -> Message | None:
        request = asked(message)
        if isinstance(request, Train) and request.order.base_version == version:
            raise Killed
        return honest(message, context)

    return answer


def cut_off(strategy: FedSync, version: int, node: int = 1) -> None:
    """Run until this version is sent to ``node``; those before it have it."""
    with pytest.raises(Killed):
        strategy.start(DirectGrid(3, {node: killed_at(version)}))


def all_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models, updates and sums have files of their own, as those of large models have."""
    monkeypatch.setattr("fedsync.model.chunked_arrays.LARGE_BYTES", 1000)
