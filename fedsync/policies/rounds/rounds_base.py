"""Base of what a strategy file says as ``on_round``: settings that change from round to round."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, ClassVar

from fedsync.common.errors import ConfigError, PolicyError
from fedsync.core.extension import Extension
from fedsync.core.orders import WorkOrder
from fedsync.policies.schema import Policy, register

Scalar = bool | int | float | str
RATE = "learning_rate"
"""The entry of a round's settings that is the learning rate of its orders; all others are for ``train_config``."""


_INSTEAD = "Write decay, cosine or table; or give FedSync the function again"


class RoundPolicy(Policy):
    """Base of settings that change from round to round. A round is that of the version which comes of it, from 1."""

    __slots__ = ()
    section = "on_round"

    @property
    def changes_rate(self) -> bool:
        """Whether it may change the learning rate."""
        return True

    @abstractmethod
    def settings(self, round: int, learning_rate: float) -> Mapping[str, Scalar]:
        """What orders of a round say: ``learning_rate``, and entries of ``train_config`` that others replace or join.

        Args:
            round: of the version that the order's update is for, if it is in time: its base version and one.
            learning_rate: of ``local``.
        """


class RoundHook(Extension):
    """Writes the settings of their round into orders.

    Args:
        policy: says which.
        rate: learning rate of ``local``.
    """

    name: ClassVar[str] = "on_round"

    def __init__(self, policy: RoundPolicy, rate: float) -> None:
        self._policy, self._rate = policy, rate
        self._round, self._settings = 0, dict[str, Scalar]()

    def on_order(self, order: WorkOrder) -> WorkOrder:
        if order.base_version + 1 != self._round:
            self._round = order.base_version + 1
            self._settings = dict(self._policy.settings(self._round, self._rate))
        config = {name: value for name, value in self._settings.items() if name != RATE}
        rate = self._settings.get(RATE, self._rate)
        if isinstance(rate, bool | str) or not isfinite(rate) or rate <= 0:
            raise PolicyError(f"on_round says learning_rate {rate!r} for round {self._round}, and it must be above 0")
        # A balancer may have scaled the order's own.
        scaled = rate if order.learning_rate == self._rate else order.learning_rate * rate / self._rate
        return replace(order, learning_rate=scaled, config=json.dumps(config, sort_keys=True) if config else "")

    def state(self) -> dict[str, Any]:
        """Nothing: a run that goes on asks again."""
        return {}


@register("own")
@dataclass(frozen=True)
class Called(RoundPolicy):
    """A function of the user's own, which a ServerApp gives as ``on_round``; no file can name it."""

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
    """What silos are told of a policy: a user's own, which they do not have, is any."""
    return policy if policy is None or policy.is_shipped() else Called()
