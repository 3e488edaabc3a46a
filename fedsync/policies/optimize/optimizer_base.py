"""What every server optimizer has that a strategy file may choose."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, ClassVar

from annotated_types import Gt, Le

from fedsync.model.server_optimizer import ServerOptimizer
from fedsync.policies.schema import Count, Policy

Rate = Annotated[float, Gt(0), Le(1e6)]


class ServerOptimizerPolicy(Policy):
    """Base of server optimizers: what a commit's sum of weighted updates is made into before the model moves."""

    __slots__ = ()
    section = "server_optimizer"

    controls: ClassVar[bool] = False
    """Whether silos keep control variates, which correct their local steps."""

    rate: Rate
    """What a step is multiplied by: the server's learning rate."""

    @abstractmethod
    def build(self) -> ServerOptimizer:
        """What steps."""


class PacedOptimizerPolicy(ServerOptimizerPolicy):
    """Base of those that may take shorter steps along what is stale."""

    __slots__ = ()

    grace: Count | None
    """Versions that an update may be old and count in full. A commit's rate is multiplied by the mean over its updates
    of 1, or ``1 / (1 + s - grace)`` for one that is s versions old, more than ``grace``. Left out, age counts for
    nothing."""
