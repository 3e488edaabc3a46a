"""Guard for Flower strategy methods that FedSync's own loop never calls: a call or an override is an error.

FedSync has no moment at which all messages of a round are made, or all replies have arrived. Errors name a remedy.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, NoReturn

from flwr.serverapp.strategy import FedAvg, Strategy

from fedsync.common.errors import ConfigError, FedSyncError
from fedsync.common.names import near_miss

_TRAIN = (
    "Give on_round, which sets learning rate and train_config by round. A barrier and a balancer decide who trains and "
    "how much, policies={'barrier': ...}"
)
_ADD = "An aggregation policy sees updates, policies={'aggregation': ...}; server_optimizer makes the step"
_EVALUATE = "Write fraction_evaluate; evaluate_config of start() goes to silos"
_INSTEAD = {
    "configure_train": _TRAIN,
    "configure_fit": _TRAIN,
    "num_fit_clients": "Write fraction_train and min_train_nodes",
    "aggregate_train": _ADD,
    "aggregate_fit": _ADD,
    "configure_evaluate": _EVALUATE,
    "num_evaluation_clients": _EVALUATE,
    "aggregate_evaluate": "Write evaluation.metrics",
    "evaluate": "Give evaluate_fn to start()",
    "initialize_parameters": "Give initial_arrays to start()",
}
"""Remedies for overridden steps of current and older Flower strategies."""
_CALLED = {"start", "summary"}


class OwnLoop(Strategy):
    """Base of strategies with their own loop in `start`."""

    def _no_step(self, *arguments: Any, **named: Any) -> NoReturn:
        """Raise `FedSyncError`: FedSync's loop has no such step."""
        raise FedSyncError("FedSync drives its own loop: call start(), not the steps of Flower's round")

    configure_train = aggregate_train = configure_evaluate = aggregate_evaluate = _no_step

    def _refuse_overridden(self) -> None:
        """Refuse a subclass or an object that overrides a method that only Flower's loop would call. Raises
        `ConfigError` if there is such a method; the error names the alternative.
        """
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
