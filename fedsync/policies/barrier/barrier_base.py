"""What every barrier has that a strategy file may choose, and what others must know of it."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, Generic, TypeVar

from fedsync.core.views import ClusterView, Verdict
from fedsync.policies.schema import Chosen, Policy

S = TypeVar("S")


class BarrierPolicy(Policy, Generic[S]):
    """Base of barriers: decide when updates are committed and who may go on; see `fedsync.core.protocols.Barrier`.

    The properties are true of most barriers; one of which they are not overrides them. They are asked of the barrier
    inside all wrappers (`innermost`), but for `mixes_rounds`, `draws`, `sampled`, `named_silos`, `least_updates`,
    `queues` and `carries`.
    """

    __slots__ = ()
    section = "barrier"

    @property
    def innermost(self) -> BarrierPolicy[Any]:
        """The barrier inside all wrappers."""
        return self

    @property
    def lockstep(self) -> bool:
        """Whether it has rounds in which all silos do the same steps."""
        return False

    @property
    def sets_steps(self) -> bool:
        """Whether it says how many steps a silo does."""
        return False

    @property
    def unequal_steps(self) -> bool:
        """Whether silos do unequal numbers of steps, so that a plain mean of updates would follow the fast."""
        return self.sets_steps

    @property
    def mixes_rounds(self) -> bool:
        """Whether a commit may hold updates that began with different versions, or one alone."""
        return True

    @property
    def rounds(self) -> bool:
        """Whether it waits for all of a round and then releases them together, so that `Overlap` can go around it."""
        return False

    @property
    def queues(self) -> bool:
        """Whether a silo may have an order queued behind the one in work."""
        return False

    @property
    def carries(self) -> bool:
        """Whether such an order begins further on than with its version."""
        return False

    @property
    def most_ahead(self) -> float | None:
        """Orders that a silo may be ahead of the slowest when it begins another, infinite if nothing bounds them.

        Who has sent its update and is not further ahead begins at once. None if something else than orders decides.
        """
        return None

    @property
    def most_updates(self) -> int | None:
        """Most updates of a commit; None where it commits what is there."""
        return None

    @property
    def needs_discount(self) -> bool:
        """Whether it counts on stale updates to be discounted."""
        return False

    @property
    def needs_progress(self) -> float | None:
        """How often it wants to hear of orders in work [s]; None if never."""
        return None

    @property
    def needs_forecasts(self) -> bool:
        """Whether it looks at forecasts of silos; where nothing does, none are made."""
        return True

    @property
    def needs_examples(self) -> bool:
        """Whether it counts on the number of samples that a silo says it holds; see ``cipher.examples``."""
        return False

    @property
    def needs_losses(self) -> bool:
        """Whether it counts on the training losses of updates, which are None where metrics are sealed."""
        return False

    @property
    def rolls_back(self) -> bool:
        """Whether it may go back to an earlier model."""
        return False

    @property
    def draws(self) -> bool:
        """Whether lots decide who takes part in a round, so that some sit it out."""
        return False

    def sampled(self, silos: int) -> int:
        """How many of ``silos`` silos take part in a round."""
        return silos

    @property
    def named_silos(self) -> dict[str, int]:
        """Numbers of silos that the file names, by key: with fewer the barrier is another than the file says."""
        return {}

    def least_updates(self, silos: int) -> int:
        """Fewest silos of whom a commit has updates, where ``silos`` silos are there and none fails."""
        return silos if self.most_ahead == 0 and not self.mixes_rounds else 1

    @abstractmethod
    def init(self) -> S: ...

    @abstractmethod
    def decide(self, state: S, view: ClusterView) -> tuple[S, Verdict]:
        """New state and answer."""


def within(inner: BarrierPolicy[Any]) -> dict[str, int]:
    """`BarrierPolicy.named_silos` of a barrier inside a wrapper."""
    return {f"inner.{key}": number for key, number in inner.named_silos.items()}


def check_outermost(inner: BarrierPolicy[Any], around: str) -> None:
    """See that a wrapper is not around overlap.

    Raises:
        ValueError: it is, and would take silos with an order queued for busy ones.
    """
    if inner.queues:
        raise ValueError(f"{around} around overlap would wait for silos that have sent; write overlap around {around}")


Inner = Annotated[BarrierPolicy[Any], Chosen("barrier")]
"""Any barrier, a wrapper too."""
