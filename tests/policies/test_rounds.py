"""Settings that change from round to round: what orders say, what silos do with it, and where it is refused."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fedsync.client import Silo
from fedsync.common.errors import ConfigError, PolicyError, ProtocolError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import WorkOrder
from fedsync.observe.replay import replay
from fedsync.policies.rounds.settings_by_round import ByRound, Called, Cosine, Decay, FromRound, RoundHook, RoundPolicy
from fedsync.silo.session.session import check_settings
from fedsync.simulation.run import run_virtual

ORDER = WorkOrder("a/1", 0, 1, 8, 4, 0.5, 7)
CLUSTER = ClusterConfig.model_validate({"silos": [{"name": name, "speed": 400.0} for name in "ab"]})


def orders_of(out: Path) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()[1:]]
    given = [action["order"] for entry in entries for action in entry["actions"] if action["type"] == "Dispatch"]
    return [order for order in given if order["learning_rate"]]


def test_rates_by_hand() -> None:
    decay = Decay(factor=0.5, every=2, least=0.2)
    assert [decay.settings(n, 1.0)["learning_rate"] for n in (1, 2, 3, 4, 5, 7)] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.2]
    cosine = Cosine(rounds=4, least=0.5)
    rates = [cosine.settings(n, 1.0)["learning_rate"] for n in (1, 3, 5, 90)]
    assert rates == pytest.approx([1.0, 0.75, 0.5, 0.5])
    table = ByRound([FromRound(5, 0.1), FromRound(2, None, {"mix": 1, "on": True}), FromRound(7, 0.05, {"mix": 2})])
    assert [dict(table.settings(n, 1.0)) for n in (1, 2, 6, 7)] == [
        {},
        {"mix": 1, "on": True},
        {"mix": 1, "on": True, "learning_rate": 0.1},
        {"mix": 2, "on": True, "learning_rate": 0.05},
    ]


def test_a_decaying_rate_never_becomes_zero() -> None:
    """By hand: 0.9 ** 7,100 is below the smallest double. A balancer may have divided the order's rate, here by 100."""
    assert 0.9**7_100 == 0.0
    order = replace(ORDER, base_version=7_100, learning_rate=0.001)
    assert 0 < RoundHook(Decay(factor=0.9), 0.1).on_order(order).learning_rate < 1e-300
    assert Decay(factor=0.9).settings(6_000, 0.1)["learning_rate"] == 0.1 * 0.9**5_999


def test_the_round_s_settings_are_in_its_orders_and_are_asked_for_once() -> None:
    asked: list[int] = []

    def settings(round: int) -> Mapping[str, Any]:
        asked.append(round)
        return {"learning_rate": 0.25, "mix": round, "a": "b"} if round > 1 else {}

    hook = RoundHook(Called.of(settings), 0.5)
    assert hook.on_order(ORDER) == ORDER
    later = replace(ORDER, base_version=1)
    told = hook.on_order(later)
    assert told == replace(later, learning_rate=0.25, config='{"a": "b", "mix": 2}')
    assert hook.on_order(replace(later, learning_rate=1.0)).learning_rate == 0.5, "as a balancer has scaled it"
    assert asked == [1, 2]
    for wrong in (0, -1.0, float("nan"), "fast", True):
        with pytest.raises(PolicyError, match="it must be above 0"):
            RoundHook(Called.of({1: {"learning_rate": wrong}}.__getitem__), 0.5).on_order(ORDER)
    for nothing in (None, {"mix": [1]}, {"learning_rate": None}):
        with pytest.raises(ConfigError, match=r"on_round: it returned .* for round 1\. Return a dictionary of"):
            RoundHook(Called.of({1: nothing}.get), 0.5).on_order(ORDER)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("cipher", ["plain", "pad", "masked"])
def test_a_run_has_the_rates_of_its_rounds_sealed_or_not_and_replays(cipher: str, tmp_path: Path) -> None:
    three = ClusterConfig.model_validate({"silos": [{"name": name, "speed": 400.0} for name in "abc"]})
    sealed = {"plain": [], "pad": ["cipher={kind: pad}"], "masked": ["cipher={kind: masked}"]}[cipher]
    config = StrategyConfig.load("bsp", ["stop.rounds=3", "on_round={kind: decay, factor: 0.5}", *sealed])
    run_virtual(config, three, tmp_path)
    rates = {order["base_version"]: order["learning_rate"] for order in orders_of(tmp_path)}
    assert rates == {0: 0.1, 1: 0.05, 2: 0.025}
    assert len(list(replay(tmp_path / "journal.jsonl"))) > 3
    assert StrategyConfig.load(tmp_path / "config.yaml").on_round == Decay(factor=0.5)


def test_the_rate_of_a_round_is_what_silos_train_with(tmp_path: Path) -> None:
    """Half the rate from round 1 on is half the rate."""
    for name, extra in {
        "said": ["local.learning_rate=0.2", "on_round={kind: table, rounds: [{round: 1, learning_rate: 0.1}]}"],
        "plain": ["local.learning_rate=0.1"],
    }.items():
        run_virtual(StrategyConfig.load("bsp", ["stop.rounds=2", *extra]), CLUSTER, tmp_path / name)
    models = [(tmp_path / name / "last.pt").read_bytes() for name in ("said", "plain")]
    assert models[0] == models[1]


def test_training_code_is_told_what_the_order_says_beside_the_run() -> None:
    silo = Silo(0, "a", 7, "cpu", train_config={"mix": 1, "top": 2})
    assert silo.told(ORDER) == {"mix": 1, "top": 2}
    assert silo.told(replace(ORDER, config='{"mix": 5, "on": true}')) == {"mix": 5, "top": 2, "on": True}


def spec_of(policy: RoundPolicy | None) -> RunSpec:
    """As silos read it."""
    config = StrategyConfig.load("bsp").with_policies({} if policy is None else {"on_round": policy})
    return RunSpec.parse(RunSpec.of(config, None, 2).dump())


TABLE = ByRound([FromRound(1, None, {"mix": 1}), FromRound(2, 0.5, {"mix": 2, "on": True})])


@dataclass(frozen=True)
class Own(RoundPolicy):
    """A user's, which silos do not have."""

    def settings(self, round: int, learning_rate: float) -> Mapping[str, Any]:
        return {"mix": round}


@pytest.mark.parametrize(
    ("policy", "config", "told"),
    [
        (None, '{"a": 1}', "the run has none by round"),
        (Called(), "{", "its settings are invalid"),
        (Called(), '{"a": [1]}', "a is list"),
        (Called(), '{"a": NaN}', "a is nan"),
        (Called(), json.dumps({f"k{i}": 1 for i in range(65)}), "65 entries"),
        (Called(), json.dumps({"a": "x" * 2000}), "2000 characters"),
        (TABLE, '{"mix": 2}', "not those that the run has for its round"),
        (TABLE, '{"mix": 1, "path": "/etc"}', "not those that the run has for its round"),
        (TABLE, "", "not those that the run has for its round"),
        (Decay(), '{"mix": 2}', "not those that the run has for its round"),
    ],
)
def test_a_silo_refuses_settings_that_its_run_has_not(policy: RoundPolicy | None, config: str, told: str) -> None:
    with pytest.raises(ProtocolError, match=told):
        check_settings(replace(ORDER, config=config), spec_of(policy))


def test_a_silo_takes_those_of_the_round_and_any_where_a_function_decides() -> None:
    check_settings(replace(ORDER, config='{"mix": 1}'), spec_of(TABLE))
    check_settings(replace(ORDER, base_version=1, config='{"on": true, "mix": 2}'), spec_of(TABLE))
    check_settings(replace(ORDER, config='{"anything": "goes"}'), spec_of(Own()))
    check_settings(replace(ORDER, learning_rate=0.0), spec_of(TABLE))
    check_settings(ORDER, spec_of(Decay()))
    assert spec_of(Own()).on_round == Called()
    with pytest.raises(ConfigError, match="a function, which this process does not have"):
        Called().settings(1, 0.1)
    assert "on_round" not in StrategyConfig.load("bsp").model_dump(mode="json")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["on_round={kind: decay}", "server_optimizer={kind: scaffold}", "aggregation={kind: fednova}"], "scaffold"),
        (["on_round={kind: decay}", "aggregation={kind: fednova}", "local.proximal=0.1"], "Write proximal: 0"),
        (["on_round={kind: decai}"], "Did you mean 'decay'?"),
        (["on_round={kind: table, rounds: [{round: 0}]}"], "at least 1"),
        (["on_round={kind: table, rounds: [{round: 2}]}"], "round 2 changes nothing"),
        (["on_round={kind: table, rounds: []}"], "rounds has no entry"),
        (
            ["on_round={kind: table, rounds: [{round: 2, learning_rate: 1}, {round: 2, learning_rate: 2}]}"],
            "has [2, 2]",
        ),
        (["on_round={kind: table, rounds: [{round: 1, learning_rate: 0}]}"], "greater than 0"),
        (["on_round={kind: decay, least: 2}"], "at most 1"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        StrategyConfig.load("bsp", overrides)
    assert told in str(caught.value)


def test_what_leaves_the_rate_alone_goes_with_all() -> None:
    assert StrategyConfig.load(
        "bsp",
        [
            "aggregation={kind: fednova}",
            "local.proximal=0.1",
            "on_round={kind: table, rounds: [{round: 2, train_config: {mix: 1}}]}",
        ],
    )
