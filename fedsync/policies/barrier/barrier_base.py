"""Base class of all barriers: a barrier decides when a new model version is made, and which silos may continue."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from fedsync.core.views import ClusterView, Verdict
from fedsync.policies.schema import Chosen, Policy

S = TypeVar("S")


class BarrierPolicy(Policy, Generic[S]):
    """Base of barriers, which decide on commits and releases; see `fedsync.core.protocols.Barrier`.

    Callers read the properties from the barrier inside all wrappers (`innermost`), except `mixes_rounds`, `draws`,
    `sampled`, `named_silos` and `least_updates`.
    """

    section = "barrier"

    @property
    def innermost(self) -> BarrierPolicy[Any]:
        return self

    lockstep: ClassVar[bool] = False
    """Whether the barrier has rounds in which all silos do the same number of steps."""

    sets_steps: ClassVar[bool] = False
    """Whether the barrier sets the number of steps of each silo."""

    @property
    def unequal_steps(self) -> bool:
        """Whether silos do unequal numbers of steps, so that a plain mean of updates would favour fast silos."""
        return self.sets_steps

    @property
    def mixes_rounds(self) -> bool:
        """Whether a commit may mix updates of different base versions, or hold a single update."""
        return True

    waits_for_all: ClassVar[bool] = False
    """Whether a round lasts as long as its slowest silo takes, unless a silo is late."""

    @property
    def most_ahead(self) -> float | None:
        """Most orders that a silo may be ahead of the slowest when it begins another; infinite if unbounded, None if
        the barrier does not count orders. A silo that has sent its update and is not further ahead begins at once.
        """
        return None

    @property
    def most_updates(self) -> int | None:
        """Most updates of a commit; None if a commit takes all pending updates."""
        return None

    @property
    def needs_discount(self) -> bool:
        return False

    @property
    def needs_progress(self) -> float | None:
        """Interval of the progress reports that the barrier wants from busy silos [s]; None if it wants none."""
        return None

    @property
    def needs_forecasts(self) -> bool:
        """Whether the barrier reads forecasts; without any reader, no forecasts are made."""
        return True

    needs_examples: ClassVar[bool] = False
    """Whether the barrier needs the number of samples that each silo reports; see ``cipher.examples``."""

    @property
    def needs_losses(self) -> bool:
        """Whether the barrier needs the training losses of updates, which are None under sealed metrics."""
        return False

    @property
    def rolls_back(self) -> bool:
        return False

    @property
    def draws(self) -> bool:
        """Whether the silos of a round are drawn at random, so that some silos skip the round."""
        return False

    def sampled(self, silos: int) -> int:
        """Number of silos that take part in a round, out of ``silos``."""
        return silos

    @property
    def named_silos(self) -> dict[str, int]:
        """Numbers of silos in the strategy file, by key; with fewer silos, the barrier would behave differently."""
        return {}

    def least_updates(self, silos: int) -> int:
        """Fewest silos whose updates are in a commit, if ``silos`` silos are present and none fails."""
        return silos if self.most_ahead == 0 and not self.mixes_rounds else 1

    @abstractmethod
    def init(self) -> S: ...

    @abstractmethod
    def decide(self, state: S, view: ClusterView) -> tuple[S, Verdict]: ...


def within(inner: BarrierPolicy[Any]) -> dict[str, int]:
    return {f"inner.{key}": number for key, number in inner.named_silos.items()}


Inner = Annotated[BarrierPolicy[Any], Chosen("barrier")]
