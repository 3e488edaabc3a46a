"""Base of the ``on_round`` policies of a strategy file: settings that change from round to round."""

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
"""Key of the learning rate in a round's settings; all other entries go to ``train_config``."""


_INSTEAD = "Write decay, cosine or table; or give FedSync the function again"


class RoundPolicy(Policy):
    """Base of settings that change from round to round; a round has the number of its resulting version, from 1."""

    __slots__ = ()
    section = "on_round"

    @property
    def changes_rate(self) -> bool:
        return True

    @abstractmethod
    def settings(self, round: int, learning_rate: float) -> Mapping[str, Scalar]:
        """Return the ``learning_rate`` of a round's orders, and entries to add or replace in ``train_config``.

        Args:
            round: base version of the order plus one, the version of a punctual update.
            learning_rate: ``local.learning_rate``.
        """


class RoundHook(Extension):
    """Extension that writes the settings of their round into orders; ``rate`` is ``local.learning_rate``."""

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
        # A balancer may have scaled the order's rate.
        scaled = rate if order.learning_rate == self._rate else order.learning_rate * rate / self._rate
        return replace(order, learning_rate=scaled, config=json.dumps(config, sort_keys=True) if config else "")

    def state(self) -> dict[str, Any]:
        """Return nothing: a resumed run asks the policy again."""
        return {}


@register("own")
@dataclass(frozen=True)
class Called(RoundPolicy):
    """User's own function, passed to a ServerApp as ``on_round``; no file can name it."""

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
