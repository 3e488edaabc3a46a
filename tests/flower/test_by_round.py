"""Settings by round as a function, and a user's own feature, in runs on Flower."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord

from fedsync import FeaturePolicy, FedSync
from fedsync.common.errors import ConfigError
from fedsync.config.strategy import StrategyConfig
from fedsync.core.extension import Extension
from fedsync.server.timeouts import Timeouts
from tests.client.stock_app import stock_app
from tests.client.test_stock_app import CHANGES, FIXED, cluster, strategy_of
from tests.flower.grid import DirectGrid
from tests.flower.test_start import QUICK, TIMING
from tests.policies.test_rounds import orders_of

pytestmark = pytest.mark.usefixtures("silos_here")


def quick(*overrides: str) -> StrategyConfig:
    return StrategyConfig.load("fedavg", [*QUICK, "local.learning_rate=0.4", *overrides])


def rates(out: Path) -> dict[int, tuple[float, str]]:
    return {each["base_version"]: (each["learning_rate"], each.get("config", "")) for each in orders_of(out)}


def test_a_function_changes_the_configuration(tmp_path: Path) -> None:
    FedSync(quick(), out=tmp_path, timing=TIMING, on_round=lambda n: {"learning_rate": 0.4 / n, "n": n}).start(
        DirectGrid(2)
    )
    assert rates(tmp_path) == {0: (0.4, '{"n": 1}'), 1: (0.2, '{"n": 2}')}


@pytest.mark.slow
def test_a_clientapp_finds_it_in_its_configuration(tmp_path: Path) -> None:
    tells = ('"num-examples": len(trainloader.dataset)})', '"num-examples": 9, "told": msg.content["config"]["mix"]})')
    config = strategy_of(stock_app(tmp_path, [*CHANGES, tells]), *FIXED, "stop.rounds=2")
    strategy = FedSync(
        config, cluster(), out=tmp_path / "out", timing=Timeouts(poll_s=0.001), on_round=lambda n: {"mix": n}
    )
    result = strategy.start(DirectGrid(3))
    assert [result.train_metrics_clientapp[n]["told"] for n in (1, 2)] == [1.0, 2.0]


@dataclass(frozen=True)
class Brief(FeaturePolicy):
    """A user's feature that ends a run after one commit."""

    def build(self) -> Extension:
        return _Ends()


class _Ends(Extension):
    name = "ends"
    commits = 0

    def on_commit(self, version: int, updates: object) -> None:
        self.commits += 1

    def stops(self, now_s: float) -> str | None:
        return "one is enough" if self.commits else None

    def state(self) -> dict[str, Any]:
        return {"commits": self.commits}


def test_a_feature_of_one_s_own_follows_a_run_on_flower(tmp_path: Path) -> None:
    config = quick().model_copy(update={"extensions": (Brief(),)})
    result = FedSync(config, out=tmp_path, timing=TIMING).start(DirectGrid(2), train_config=ConfigRecord({"mix": 1}))
    assert result.summary["rounds"] == 1 and result.summary["stopped_by"] == "one is enough"


def test_a_feature_is_listed_once() -> None:
    with pytest.raises(ConfigError, match="extensions has 'Brief' twice"):
        quick()._with("extensions", {"extensions": (Brief(), Brief())})
