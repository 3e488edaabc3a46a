"""``train_config`` and ``evaluate_config``: what a run tells the silos' own training code."""

import json
from typing import Any

import pytest

from fedsync.common.errors import ConfigError, ProtocolError
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.config.training import LONGEST_KEY, LONGEST_TEXT, MOST_ENTRIES
from fedsync.model.layout import Layout

TOLD = {"lr": 0.01, "epochs": 3, "augment": True, "name": "café", "big": 2**63 - 1, "small": -(2**63)}
NONE = {
    "a list": ({"lr": [1]}, "lr is list"),
    "bytes": ({"lr": b"1"}, "lr is bytes"),
    "nothing": ({"lr": None}, "lr is NoneType"),
    "infinite": ({"lr": float("inf")}, "lr is inf"),
    "not a number": ({"lr": float("nan")}, "lr is nan"),
    "too large": ({"lr": 2**63}, "more than 64 bits"),
    "too small": ({"lr": -(2**63) - 1}, "more than 64 bits"),
    "too long": ({"lr": "x" * (LONGEST_TEXT + 1)}, f"{LONGEST_TEXT + 1} characters"),
    "a long name": ({"x" * (LONGEST_KEY + 1): 1}, "is not text of 1 to"),
    "no name": ({"": 1}, "is not text of 1 to"),
    "too many": ({str(number): 1 for number in range(MOST_ENTRIES + 1)}, f"{MOST_ENTRIES + 1} entries"),
}


def _same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found == expected and all(type(found[key]) is type(expected[key]) for key in expected)


def test_silos_get_what_the_strategy_and_its_start_say() -> None:
    config = StrategyConfig.load("fedavg", ["train_config={lr: 1.0, batch: 8}"]).told(TOLD, {"full": False})
    spec = RunSpec.parse(RunSpec.of(config, None, 2).dump())
    assert _same(spec.train_config, {"batch": 8, **TOLD})
    assert _same(spec.evaluate_config, {"full": False})


def test_nothing_is_told_by_default() -> None:
    spec = RunSpec.of(StrategyConfig.load("fedavg"), None, 2)
    assert (spec.train_config, spec.evaluate_config) == ({}, {})


@pytest.mark.parametrize("name", NONE)
@pytest.mark.parametrize("key", ["train_config", "evaluate_config"])
def test_what_is_no_configuration_is_refused_where_it_is_written(key: str, name: str) -> None:
    told, problem = NONE[name]
    both = {"train_config": {}, "evaluate_config": {}, key: told}
    with pytest.raises(ConfigError, match=problem) as caught:
        StrategyConfig.load("fedavg").told(both["train_config"], both["evaluate_config"])
    assert caught.value.place == key


@pytest.mark.parametrize("name", [name for name in NONE if name != "bytes"])
def test_a_silo_refuses_a_specification_with_no_such_configuration(name: str) -> None:
    spec = json.loads(RunSpec.of(StrategyConfig.load("fedavg"), None, 2).dump())
    with pytest.raises(ProtocolError, match="run specification"):
        RunSpec.parse(json.dumps({**spec, "train_config": NONE[name][0]}))


@pytest.mark.parametrize(
    ("barrier", "silos", "quorum"),
    [
        ("{kind: buffered, size: 200}", 1000, 200),
        ("{kind: buffered, size: 200}", 150, 150),
        ("{kind: buffered, size: 201}", 1000, 1000),
        ("{kind: bsp}", 1000, 1000),
    ],
)
def test_more_silos_than_a_sum_holds_seal_where_commits_have_fewer(barrier: str, silos: int, quorum: int) -> None:
    """A sum of `bfv` holds 200 updates of 16 bits."""
    settings = ["task={kind: digits}", f"min_silos={silos}", f"barrier={barrier}", "cipher={kind: bfv}"]
    settings += ["aggregation={kind: fedbuff, server_rate: 1.0, staleness: {kind: constant}}"]
    spec = RunSpec.of(StrategyConfig.load("fedbuff", settings), None, silos)
    assert spec.quorum == quorum
    layout = Layout(("w",), ((4,),))
    if quorum <= 200:
        assert spec.encryption_plan(layout) is not None
    else:
        with pytest.raises(ConfigError, match="sums of 16 bits hold 200 updates"):
            spec.encryption_plan(layout)
