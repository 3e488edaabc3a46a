"""Policies for the length of time-bounded rounds: a fixed length, and the base class of all others.

A short interval brings fresh parameters often (quality), a long interval has fewer barriers (quantity). Searches for
the length are in `fedsync.extras.intervals`.

Source: Wang et al., "FSP", section 3.3.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

from fedsync.policies.schema import Policy, Positive, register

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Attempt:
    """Settings of the next round. ``interval_s`` is its duration, training and barrier cost together. ``savepoint``
    keeps the model that the round begins with; ``rollback`` begins with the last kept model.
    """

    interval_s: float
    savepoint: bool = False
    rollback: bool = False


@dataclass(frozen=True, slots=True)
class IntervalRound:
    """Result of a committed round.

    Args:
        seconds: time from its orders to its commit.
        cost_s: mean time in which a silo did not train (phi).
        loss: mean training loss per sample of the updates that began with the round.
    """

    seconds: float
    cost_s: float
    loss: float

    @property
    def valid_s(self) -> float:
        """Training time: the interval without its barrier (eta)."""
        return max(self.seconds - self.cost_s, 1e-9)


class IntervalPolicy(Policy, Generic[S]):
    """Base of policies that choose the length of each round."""

    section = "interval"

    @property
    def needs_losses(self) -> bool:
        """Whether the policy needs the loss of each round, which the server gets too late under sealed losses."""
        return True

    @property
    def rolls_back(self) -> bool:
        return False

    @abstractmethod
    def init(self) -> S: ...

    @abstractmethod
    def attempt(self, state: S) -> Attempt:
        """Settings of the next round; asked again if the round ended without a commit."""

    @abstractmethod
    def observe(self, state: S, seen: IntervalRound) -> S: ...


@register("fixed")
@dataclass(frozen=True, slots=True)
class FixedInterval(IntervalPolicy[None]):
    """Interval of a fixed length."""

    interval_s: Positive
    """Duration of a round, transfer included [s]."""

    needs_losses = False

    def init(self) -> None: ...

    def attempt(self, state: None) -> Attempt:
        return Attempt(self.interval_s)

    def observe(self, state: None, seen: IntervalRound) -> None: ...
