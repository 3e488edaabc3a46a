"""Habits of users of Flower's strategies: they change a round's configuration, make metrics, and override methods."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedsync import FeaturePolicy, FedSync
from fedsync.common.errors import ConfigError, FedSyncError
from fedsync.config.strategy import StrategyConfig
from fedsync.core.extension import Extension
from fedsync.core.orders import Evaluation, WorkReport
from fedsync.core.report_checks import MAX_TEST_SAMPLES
from fedsync.flower.silo_metrics import SiloMetrics
from fedsync.server.timeouts import Timeouts
from tests.client.stock_app import stock_app
from tests.client.test_stock_app import CHANGES, FIXED, cluster, strategy_of
from tests.flower.grid import DirectGrid, honest, said, saying
from tests.flower.test_start import QUICK, TIMING
from tests.policies.test_rounds import orders_of

pytestmark = pytest.mark.usefixtures("silos_here")


def quick(*overrides: str) -> StrategyConfig:
    return StrategyConfig.load("fedavg", [*QUICK, "local.learning_rate=0.4", *overrides])


class Halving(FedSync):
    """As Flower's documentation changes the learning rate."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        config["lr"] = float(config["lr"]) / server_round  # type: ignore[arg-type]
        config["round"] = server_round
        return super().configure_train(server_round, arrays, config, grid)


def rates(out: Path) -> dict[int, tuple[float, str]]:
    return {each["base_version"]: (each["learning_rate"], each.get("config", "")) for each in orders_of(out)}


def test_a_subclass_configures_training_as_with_flowers_strategies(tmp_path: Path) -> None:
    Halving(quick(), out=tmp_path, timing=TIMING).start(DirectGrid(2), train_config=ConfigRecord({"mix": 1}))
    assert rates(tmp_path) == {0: (0.4, '{"round": 1}'), 1: (0.2, '{"lr": 0.2, "round": 2}')}


class Falling(FedSync):
    """A schedule that passes through the rate of ``train_config``."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        config["lr"] = 0.2 / server_round
        return super().configure_train(server_round, arrays, config, grid)


def test_a_rate_that_equals_the_one_of_train_config_holds_too(tmp_path: Path) -> None:
    Falling(quick(), out=tmp_path, timing=TIMING).start(DirectGrid(2), train_config=ConfigRecord({"lr": 0.1}))
    assert rates(tmp_path) == {0: (0.2, '{"lr": 0.2}'), 1: (0.1, "")}


@pytest.mark.slow
def test_a_clientapp_finds_it_in_its_configuration(tmp_path: Path) -> None:
    tells = ('"num-examples": len(trainloader.dataset)})', '"num-examples": 9, "told": msg.content["config"]["mix"]})')
    config = strategy_of(stock_app(tmp_path, [*CHANGES, tells]), *FIXED, "stop.rounds=2")
    strategy = FedSync(
        config, cluster(), out=tmp_path / "out", timing=Timeouts(poll_s=0.001), on_round=lambda n: {"mix": n}
    )
    result = strategy.start(DirectGrid(3))
    assert [result.train_metrics_clientapp[n]["told"] for n in (1, 2)] == [1.0, 2.0]


class Messages(FedSync):
    def configure_train(self, *arguments: Any) -> Iterable[Message]:
        return []


class Less(FedSync):
    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        del config["lr"]
        return super().configure_train(server_round, arrays, config, grid)


@pytest.mark.parametrize(("kind", "told"), [(Messages, "messages of its own"), (Less, "it takes lr away")])
def test_what_configure_train_cannot_do_is_refused(kind: type[FedSync], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{kind.__name__}\.configure_train: .*{told}"):
        kind(quick(), out=tmp_path, timing=TIMING).start(DirectGrid(2))


def test_it_is_said_in_one_place_and_called_by_the_run_alone(tmp_path: Path) -> None:
    strategy = Halving(quick("on_round={kind: decay}"), out=tmp_path, timing=TIMING)
    with pytest.raises(ConfigError, match=r"on_round: Halving\.configure_train says it too"):
        strategy.start(DirectGrid(2))
    with pytest.raises(FedSyncError, match="drives its own loop"):
        strategy.configure_train(1, ArrayRecord(), ConfigRecord({"lr": 1.0}), DirectGrid(2))
    with pytest.raises(FedSyncError, match=r"call start\(\)"):
        strategy.aggregate_evaluate(1, [])


def largest(records: list[RecordDict], weighted_by: str) -> MetricRecord:
    """Makes one record of the silos'."""
    metrics = [record.metric_records["metrics"] for record in records]
    told = {name: max(each[name] for each in metrics) for name in metrics[0]}  # type: ignore[type-var]
    return MetricRecord({**told, "silos-asked": len(records), "weighted": sum(each[weighted_by] for each in metrics)})  # type: ignore[misc]


def test_metrics_of_single_silos_are_for_functions_of_ones_own(tmp_path: Path) -> None:
    result = FedSync(
        quick(), out=tmp_path, timing=TIMING, train_metrics_aggr_fn=largest, evaluate_metrics_aggr_fn=largest
    ).start(DirectGrid(2))
    for round in (1, 2):
        trained, tested = result.train_metrics_clientapp[round], result.evaluate_metrics_clientapp[round]
        assert trained["silos-asked"] == tested["silos-asked"] == 2
        assert trained["train_loss"] > 0 and trained["weighted"] > trained["num-examples"] > 0  # type: ignore[operator]
        assert 0 <= tested["accuracy"] <= 1 and tested["loss"] > 0 and "seconds" in trained  # type: ignore[operator]


@pytest.mark.parametrize("lie", ["evaluation", "report"])
def test_what_the_run_does_not_believe_is_for_no_function(lie: str, tmp_path: Path) -> None:
    """Else one silo could outweigh all others in the user's own mean, with samples that it cannot have."""

    lied: list[str] = []

    def lies(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        report, payload = said(reply)
        if lied or not isinstance(report, WorkReport):
            return reply
        lied.append(lie)
        evaluation = Evaluation(1.0, 1.0, MAX_TEST_SAMPLES + (lie == "evaluation"))
        return saying(message, replace(report, evaluation=evaluation, compute_s=float(lie == "evaluation")), payload)

    result = FedSync(quick(), out=tmp_path, timing=TIMING, evaluate_metrics_aggr_fn=largest).start(
        DirectGrid(2, {1: lies})
    )
    told = [record["num-examples"] for record in result.evaluate_metrics_clientapp.values()]
    assert told and max(told) < MAX_TEST_SAMPLES  # type: ignore[type-var, operator]


def test_the_functions_go_on_with_a_run_that_goes_on(tmp_path: Path) -> None:
    rounds: list[int] = []

    def dies(records: list[RecordDict], weighted_by: str) -> MetricRecord:
        rounds.append(len(records))
        if len(rounds) == 2:
            raise KeyboardInterrupt
        return MetricRecord({"call": len(rounds)})

    def strategy(**more: Any) -> FedSync:
        return FedSync(quick(), out=tmp_path, timing=TIMING, train_metrics_aggr_fn=dies, **more)

    with pytest.raises(KeyboardInterrupt):
        strategy().start(DirectGrid(2))
    result = strategy(resume=True).start(DirectGrid(2))
    assert result.train_metrics_clientapp[1]["call"] == 1
    assert result.train_metrics_clientapp[2]["call"] == len(rounds) >= 3


def test_what_a_function_returns_is_looked_at(tmp_path: Path) -> None:
    def none(*arguments: object) -> Any:
        return {}

    with pytest.raises(ConfigError, match="train_metrics_aggr_fn: it returned dict"):
        FedSync(quick(), out=tmp_path, timing=TIMING, train_metrics_aggr_fn=none).start(DirectGrid(2))


def test_sealed_metrics_are_for_no_function() -> None:
    policies = quick().policies()
    with pytest.raises(ConfigError, match="silos of this run seal the metrics"):
        SiloMetrics(None, largest).joined(policies, sealed=True)
    assert SiloMetrics(None, None).joined(policies, sealed=True) is policies


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


# What a subclass overrides and a caller says is heard, or refused.


def _never(*arguments: object, **more: object) -> None:
    raise AssertionError


HOOKS = ["aggregate_train", "configure_evaluate", "aggregate_evaluate"]
OLDER = ["configure_fit", "aggregate_fit", "initialize_parameters", "evaluate", "num_fit_clients"]


@pytest.mark.parametrize("name", [*HOOKS, *OLDER, "_construct_messages"])
def test_what_is_overridden_and_never_called_is_refused(name: str, tmp_path: Path) -> None:
    config = StrategyConfig.load("fedavg", QUICK)
    with pytest.raises(ConfigError, match=rf"Mine\.{name}.* never calls it") as caught:
        type("Mine", (FedSync,), {name: _never})(config, out=tmp_path)
    assert {"evaluate": "evaluate_fn", "configure_fit": "configure_train"}.get(name, "") in caught.value.remedy
    with pytest.raises(ConfigError, match=name):
        type("Mine", (type("Mixin", (), {name: _never}), FedSync), {}).lb_bsp(task={"kind": "digits"})  # type: ignore[attr-defined]
    strategy = FedSync(config, out=tmp_path, timing=TIMING)
    setattr(strategy, name, _never)
    with pytest.raises(ConfigError, match=name):
        strategy.start(DirectGrid(2))


def test_what_is_called_may_be_overridden_and_added(tmp_path: Path) -> None:
    class Mine(FedSync):
        told = False

        def summary(self) -> None:
            self.told = True
            super().summary()

        def helper(self) -> None:
            """A method of the user's own."""

    strategy = Mine(StrategyConfig.load("fedavg", QUICK), out=tmp_path, timing=TIMING)
    strategy.start(DirectGrid(2))
    assert strategy.told


@pytest.mark.parametrize(
    ("word", "meant"), [("evaluate_fun", "evaluate_fn"), ("initial_aray", "initial_arrays"), ("rounds", "num_rounds")]
)
def test_a_misspelt_word_of_start_is_refused(word: str, meant: str, tmp_path: Path) -> None:
    strategy = FedSync(StrategyConfig.load("fedavg", QUICK), out=tmp_path, timing=TIMING)
    with pytest.raises(TypeError, match=rf"start\(\) got an unexpected keyword argument '{word}'.*'{meant}'"):
        strategy.start(DirectGrid(2), **{word: None})
    assert not (tmp_path / "journal.jsonl").exists()


def test_what_a_later_flower_passes_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: Strategy, grid: Any, initial_arrays: ArrayRecord, num_rounds: int = 3, resume: str = "") -> None:
        raise AssertionError

    monkeypatch.setattr(Strategy, "start", start)
    strategy = FedSync(StrategyConfig.load("fedavg", QUICK), out=tmp_path, timing=TIMING)
    assert strategy.start(DirectGrid(2), resume="").summary["rounds"] == 2
