"""Base classes of all server optimizers."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, ClassVar

from annotated_types import Gt, Le

from fedsync.model.server_optimizer import ServerOptimizer
from fedsync.policies.schema import Count, Policy

Rate = Annotated[float, Gt(0), Le(1e6)]


class ServerOptimizerPolicy(Policy):
    """Base of server optimizers, which turn a commit's weighted sum of updates into a step of the model."""

    __slots__ = ()
    section = "server_optimizer"

    controls: ClassVar[bool] = False
    """Whether silos keep control variates, which correct their local steps."""

    rate: Rate
    """Learning rate of the server: factor of each step."""

    @abstractmethod
    def build(self) -> ServerOptimizer:
        """Return a new optimizer."""


class PacedOptimizerPolicy(ServerOptimizerPolicy):
    """Base of server optimizers that may shorten steps for stale updates."""

    __slots__ = ()

    grace: Count | None
    """Staleness up to which an update counts in full, in versions. Above it, the factor of an update is
    ``1 / (1 + s - grace)``; the rate of a commit is multiplied by the mean factor of its updates. Default: staleness
    has no effect."""
