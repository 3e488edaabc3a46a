"""What every predictor has that a strategy file may choose; most of it is for those that train."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, Generic, TypeVar, cast

from annotated_types import Ge, Le

from fedsync.core.protocols import Drivers, SpeedSample
from fedsync.policies.schema import Policy, kinds

S = TypeVar("S")

Hidden = Annotated[int, Ge(1), Le(64)]
Memory = Annotated[int, Ge(50), Le(10_000)]


class PredictorPolicy(Policy, Generic[S]):
    """Base of predictors: how fast a silo will be in its next order; see `fedsync.core.protocols.Predictor`.

    One that does not train leaves everything about training as it is here.
    """

    __slots__ = ()
    section = "predictor"

    @property
    def learns(self) -> bool:
        """Whether `learn` can ever change a state."""
        return False

    def loaded(self) -> PredictorPolicy[S]:
        """The predictor with whatever its fields name files for. Asked once, before a run.

        Raises:
            ConfigError: a file is not what it should be.
        """
        return self

    @abstractmethod
    def init(self) -> S: ...

    @abstractmethod
    def observe(self, state: S, sample: SpeedSample) -> S:
        """State after one more observation; never trains."""

    @abstractmethod
    def forecast(self, state: S, drivers: Drivers | None = None) -> float | None:
        """Predicted mean speed of the next order [samples/s], or None before the first observation."""

    def unlearned(self, state: S) -> bool:
        """Whether `learn` has something to do."""
        return False

    def learn(self, state: S, epochs: int) -> S:
        """State after training for at most so many epochs."""
        return state

    def reuse(self, state: S, donor: S) -> S:
        """``state`` with what ``donor`` has learned as the beginning of its own training."""
        return state

    def promise(self, state: S) -> float | None:
        """Squared error of the trained model against the moving average's, on samples held out of training.

        None while there is no model, or where nothing was held out.
        """
        return None

    def export(self, state: S) -> dict[str, Any] | None:
        """What was learned as plain JSON values; None if nothing was."""
        return None


def predictors() -> dict[str, PredictorPolicy[Any]]:
    """One predictor of each kind, as a strategy file that names nothing but the kind has it."""
    return {kind: cast(PredictorPolicy[Any], policy()) for kind, policy in kinds("predictor").items()}
