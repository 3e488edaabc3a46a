"""Guard for Flower strategy methods that FedSync's own loop never calls: a call or an override is an error."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NoReturn

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy

from fedsync.common.errors import ConfigError, FedSyncError
from fedsync.common.names import near_miss
from fedsync.config.strategy import StrategyConfig
from fedsync.policies.rounds.settings_by_round import Called

_TRAIN = (
    "Override configure_train, or give on_round. A barrier and a balancer decide who trains and how much, "
    "policies={'barrier': ...}"
)
_ADD = (
    "An aggregation policy sees updates, policies={'aggregation': ...}; server_optimizer makes the step; give "
    "train_metrics_aggr_fn for metrics"
)
_EVALUATE = "Write fraction_evaluate; evaluate_config of start() goes to silos"
_INSTEAD = {
    "configure_fit": _TRAIN,
    "num_fit_clients": "Write fraction_train and min_train_nodes",
    "aggregate_train": _ADD,
    "aggregate_fit": _ADD,
    "configure_evaluate": _EVALUATE,
    "num_evaluation_clients": _EVALUATE,
    "aggregate_evaluate": "Give evaluate_metrics_aggr_fn, or write evaluation.metrics",
    "evaluate": "Give evaluate_fn to start()",
    "initialize_parameters": "Give initial_arrays to start()",
}
"""Remedies for overridden steps of current and older Flower strategies."""
_CALLED = {"start", "summary", "configure_train"}


class _Configured(list[Message]):
    """Result of `OwnLoop.configure_train`: no messages, but the configuration of the round."""

    def __init__(self, config: ConfigRecord) -> None:
        super().__init__()
        self.config = config


class OwnLoop(Strategy):
    """Base of strategies with their own loop in `start`."""

    _asking = False

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the configuration of a round, for a subclass that overrides this method.

        The subclass changes ``config``, calls this method, and returns its result. ``arrays`` is empty, and the result
        has no messages. Raises `FedSyncError` if the caller is not FedSync's loop.
        """
        if not self._asking:
            self._no_step()
        return _Configured(config)

    def _configured(self, grid: Grid, config: StrategyConfig) -> StrategyConfig:
        """Return the configuration with a subclass's `configure_train`; `ConfigError` if it has ``on_round``, too."""
        if type(self).configure_train is OwnLoop.configure_train and "configure_train" not in vars(self):
            return config
        if config.on_round is not None:
            raise ConfigError("on_round", f"{type(self).__name__}.configure_train says it too", "Leave out one")
        asked = partial(self._settings_of, grid, config.train_config, config.local.learning_rate)
        return config.with_policies({"on_round": Called.of(asked)})

    def _settings_of(self, grid: Grid, told: Mapping[str, Any], rate: float, server_round: int) -> dict[str, Any]:
        """Return the round's learning rate, which is ``lr``, and the entries of ``train_config`` that `configure_train`
        of a subclass changes or adds; `ConfigError` if the method makes its own messages, or removes entries.
        """
        config = ConfigRecord({"lr": rate, **told})
        before = dict(config)
        self._asking = True
        try:
            made = self.configure_train(server_round, ArrayRecord(), config, grid)
        finally:
            self._asking = False
        place = f"{type(self).__name__}.configure_train"
        if not isinstance(made, _Configured):
            remedy = "Change config, and end with return super().configure_train(server_round, arrays, config, grid)"
            raise ConfigError(place, "it returns messages of its own, which FedSync does not send", remedy)
        if gone := before.keys() - made.config.keys():
            raise ConfigError(place, f"it takes {', '.join(sorted(gone))} away", "Set other values instead")
        changed: dict[str, Any] = {name: value for name, value in made.config.items() if before.get(name) != value}
        lr = made.config["lr"]
        # A rate equal to that of train_config is also set: a schedule may pass through it.
        return {"learning_rate": lr, **changed} if "lr" in changed or isinstance(lr, float) else changed

    def _no_step(self, *arguments: Any, **named: Any) -> NoReturn:
        raise FedSyncError("FedSync drives its own loop: call start(), not the steps of Flower's round")

    aggregate_train = configure_evaluate = aggregate_evaluate = _no_step

    def _refuse_overridden(self) -> None:
        """Raise `ConfigError`, with the alternative, if a method that only Flower's loop would call is overridden."""
        steps = _INSTEAD.keys() | {name for name in vars(FedAvg) if inspect.isfunction(getattr(FedAvg, name))} - _CALLED
        for name in sorted(name for name in steps if not name.startswith("__")):
            ours = getattr(OwnLoop, name, None)
            if getattr(type(self), name, None) is not ours or name in vars(self):
                remedy = _INSTEAD.get(name, "Override no step of Flower's round")
                problem = "it is overridden, and FedSync, which has a loop of its own, never calls it"
                raise ConfigError(f"{type(self).__name__}.{name}", problem, f"{remedy}; see docs/extending.md")


def unexpected(call: str, word: str, allowed: Iterable[str]) -> TypeError:
    """Return the error for an unknown keyword, like Python's own, with a suggestion."""
    return TypeError(f"{call}() got an unexpected keyword argument {word!r}. {near_miss(word, allowed)}")
