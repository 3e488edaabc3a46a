"""Settings that change by round (``on_round``): learning rate schedules, and settings for users' training code."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import cos, isfinite, pi
from sys import float_info
from typing import Any, ClassVar

from fedsync.common.errors import ConfigError, PolicyError
from fedsync.core.extension import Extension
from fedsync.core.orders import WorkOrder
from fedsync.policies.schema import PartOfOne, Policy, Positive, PositiveInt, Settings, Share, register

Scalar = bool | int | float | str
RATE = "learning_rate"
"""Key of the learning rate in a round's settings; all other entries go to ``train_config``."""

_INSTEAD = "Write decay, cosine or table; or give FedSync the function again"


class RoundPolicy(Policy):
    """Base of settings that change from round to round; a round has the number of its resulting version, from 1."""

    section = "on_round"

    @property
    def changes_rate(self) -> bool:
        return True

    @abstractmethod
    def settings(self, round: int, learning_rate: float) -> Mapping[str, Scalar]:
        """Return the ``learning_rate`` of a round's orders, and entries to add or replace in ``train_config``. The
        ``round`` of an order is its base version plus one; ``learning_rate`` is ``local.learning_rate``.
        """


class RoundHook(Extension):
    """Extension that writes the round's settings into each order; ``rate`` is ``local.learning_rate``."""

    name: ClassVar[str] = "on_round"

    def __init__(self, policy: RoundPolicy, rate: float) -> None:
        self._policy, self._rate = policy, rate
        self._round, self._settings = 0, dict[str, Scalar]()

    def on_order(self, order: WorkOrder) -> WorkOrder:
        if order.base_version + 1 != self._round:
            self._round = order.base_version + 1
            found: object = self._policy.settings(self._round, self._rate)
            if not isinstance(found, Mapping) or not all(isinstance(each, Scalar) for each in found.values()):
                problem = f"it returned {found!r:.80} for round {self._round}"
                raise ConfigError("on_round", problem, "Return a dictionary of numbers, text and booleans, or {}")
            self._settings = dict(found)
        config = {name: value for name, value in self._settings.items() if name != RATE}
        rate = self._settings.get(RATE, self._rate)
        if isinstance(rate, bool | str) or not isfinite(rate) or rate <= 0:
            raise PolicyError(f"on_round says learning_rate {rate!r} for round {self._round}, and it must be above 0")
        # A balancer may have scaled the order's rate.
        scaled = rate if order.learning_rate == self._rate else order.learning_rate * rate / self._rate
        return replace(order, learning_rate=scaled, config=json.dumps(config, sort_keys=True) if config else "")

    def state(self) -> dict[str, Any]:
        """Return nothing: a resumed run asks the policy again."""
        return {}


@register("own")
@dataclass(frozen=True)
class Called(RoundPolicy):
    """User's own function, passed to a ServerApp as ``on_round``; a strategy file cannot name it."""

    @classmethod
    def of(cls, function: Callable[[int], Mapping[str, Scalar]]) -> Called:
        made = cls()
        object.__setattr__(made, "_function", function)
        return made

    def settings(self, round: int, learning_rate: float) -> Mapping[str, Scalar]:
        if "_function" not in vars(self):
            raise ConfigError("on_round.kind", "'own' is a function, which this process does not have", _INSTEAD)
        settings: Mapping[str, Scalar] = vars(self)["_function"](round)
        return settings


def told_of(policy: RoundPolicy | None) -> RoundPolicy | None:
    """Return the policy as silos see it: silos lack the code of a user's own policy and get a placeholder."""
    return policy if policy is None or policy.is_shipped() else Called()


@register("decay")
@dataclass(frozen=True, slots=True)
class Decay(RoundPolicy):
    """Learning rate that is multiplied by ``factor`` after every ``every`` rounds, down to ``least``."""

    factor: Share = 0.99
    """Factor of the learning rate."""

    every: PositiveInt = 1
    """Number of rounds with the same rate."""

    least: PartOfOne = 0.0
    """Lower limit of the rate, as a share of ``local.learning_rate``. With 0, the rate still never becomes 0."""

    def settings(self, round: int, learning_rate: float) -> Mapping[str, Scalar]:
        rate = learning_rate * max(self.factor ** ((round - 1) // self.every), self.least)
        return {RATE: max(rate, float_info.min)}  # a product of so many factors may underflow to 0


@register("cosine")
@dataclass(frozen=True, slots=True)
class Cosine(RoundPolicy):
    """Learning rate that falls along half a cosine to ``least`` within ``rounds`` rounds, and then stays there."""

    rounds: PositiveInt = 100
    """Number of rounds until the rate reaches ``least``."""

    least: Share = 0.01
    """Final rate, as a share of ``local.learning_rate``."""

    def settings(self, round: int, learning_rate: float) -> Mapping[str, Scalar]:
        gone = min((round - 1) / self.rounds, 1.0)
        return {RATE: learning_rate * (self.least + (1 - self.least) * (1 + cos(pi * gone)) / 2)}


@dataclass(frozen=True, slots=True)
class FromRound(Settings):
    """Settings that hold from a round on, until another entry changes them."""

    round: PositiveInt
    """First round to which the entry applies."""

    learning_rate: Positive | None = None
    """Learning rate of orders. Default: unchanged."""

    train_config: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Entries for the user's own training code, which are added to ``train_config`` or replace its entries."""

    def __post_init__(self) -> None:
        if self.learning_rate is None and not self.train_config:
            raise ValueError(f"round {self.round} changes nothing; write learning_rate or train_config")


@register("table")
@dataclass(frozen=True, slots=True)
class ByRound(RoundPolicy):
    """Settings by round, as in ``rounds: [{round: 1, train_config: {mix: 0.5}}, {round: 9, learning_rate: 0.01}]``."""

    rounds: list[FromRound] = field(default_factory=list)
    """Settings with the round from which each applies; one entry per round."""

    def __post_init__(self) -> None:
        numbers = [each.round for each in self.rounds]
        if not numbers or len(set(numbers)) < len(numbers):
            raise ValueError(
                f"rounds has {numbers or 'no entry'}; write one entry for each round that changes something"
            )

    @property
    def changes_rate(self) -> bool:
        return any(each.learning_rate is not None for each in self.rounds)

    def settings(self, round: int, learning_rate: float) -> Mapping[str, Scalar]:
        settings: dict[str, Scalar] = {}
        for each in sorted(self.rounds, key=lambda entry: entry.round):
            if each.round <= round:
                settings |= each.train_config
                settings |= {} if each.learning_rate is None else {RATE: each.learning_rate}
        return settings
