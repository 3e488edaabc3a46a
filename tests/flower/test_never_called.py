"""What a subclass overrides and a caller says is heard, or refused."""

from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

from fedsync import FedSync
from fedsync.common.errors import ConfigError
from fedsync.config.strategy import StrategyConfig
from tests.flower.grid import DirectGrid
from tests.flower.test_start import QUICK, TIMING

pytestmark = pytest.mark.usefixtures("silos_here")


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
