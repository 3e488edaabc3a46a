"""What predictors have in common that never train."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

S = TypeVar("S")


class Plain(Generic[S]):
    """The part of `fedsync.core.protocols.Predictor` about training, for those that do not."""

    __slots__ = ()

    @property
    def learns(self) -> bool:
        """It does not."""
        return False

    def unlearned(self, state: S) -> bool:
        """There is nothing to learn."""
        return False

    def learn(self, state: S, epochs: int) -> S:
        """The same state."""
        return state

    def reuse(self, state: S, donor: S) -> S:
        """The same state: nothing is learned that another silo could use."""
        return state

    def promise(self, state: S) -> float | None:
        """Nothing is learned; see `fedsync.policies.predict.mixture.Expert`."""
        return None

    def export(self, state: S) -> dict[str, Any] | None:
        """Nothing is learned."""
        return None
