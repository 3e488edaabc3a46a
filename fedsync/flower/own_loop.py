"""The steps of Flower's loop, which FedSync's own loop never calls: whoever overrides or calls one is told what to do.

FedSync has no moment at which all messages of a round are made, or all replies are there.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import NoReturn

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy

from fedsync.common.names import near_miss
from fedsync.core.errors import ConfigError, FedSyncError

_TRAIN = (
    "A barrier and a balancer decide who trains and how much, policies={'barrier': ...}; train_config goes to silos"
)
_ADD = "An aggregation policy weighs updates, policies={'aggregation': ...}; server_optimizer makes the step"
_EVALUATE = "Write fraction_evaluate; evaluate_config of start() goes to silos"
_INSTEAD = {
    "configure_train": _TRAIN,
    "configure_fit": _TRAIN,
    "num_fit_clients": "Write fraction_train and min_train_nodes",
    "aggregate_train": _ADD,
    "aggregate_fit": _ADD,
    "configure_evaluate": _EVALUATE,
    "num_evaluation_clients": _EVALUATE,
    "aggregate_evaluate": "Metrics of silos are pooled by evaluation.metrics; listeners see each entry of the journal",
    "evaluate": "Give evaluate_fn to start()",
    "initialize_parameters": "Give initial_arrays to start()",
}
"""Remedies for overridden steps, of this Flower's strategies and of its older ones."""
_CALLED = {"start", "summary"}


class OwnLoop(Strategy):
    """A strategy whose `start` is a loop of its own."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Not a step of FedSync's loop; raises `FedSyncError`."""
        _refuse()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Not a step of FedSync's loop; raises `FedSyncError`."""
        _refuse()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Not a step of FedSync's loop; raises `FedSyncError`."""
        _refuse()

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Not a step of FedSync's loop; raises `FedSyncError`."""
        _refuse()

    def _refuse_overridden(self) -> None:
        """Refuse a subclass or an object with a method that only Flower's loop would call.

        Raises:
            ConfigError: it has one; names the way that exists.
        """
        steps = _INSTEAD.keys() | {name for name in vars(FedAvg) if inspect.isfunction(getattr(FedAvg, name))} - _CALLED
        for name in sorted(name for name in steps if not name.startswith("__")):
            ours = getattr(OwnLoop, name, None)
            if getattr(type(self), name, None) is not ours or name in vars(self):
                remedy = _INSTEAD.get(name, "Override no step of Flower's round")
                problem = "it is overridden, and FedSync, which has a loop of its own, never calls it"
                raise ConfigError(f"{type(self).__name__}.{name}", problem, f"{remedy}; see docs/extending.md")


def unexpected(call: str, word: str, allowed: Iterable[str]) -> TypeError:
    """The error of a keyword that nobody knows, as Python's own, with what was probably meant."""
    return TypeError(f"{call}() got an unexpected keyword argument {word!r}. {near_miss(word, allowed)}")


def _refuse() -> NoReturn:
    raise FedSyncError("FedSync drives its own loop: call start(), not the steps of Flower's round")
