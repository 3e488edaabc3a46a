"""What the coordinator asks of policies. All are values plus pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedsync.core.orders import UpdateMeta, Window, fast_dataclass
from fedsync.core.speed.curve import Curve
from fedsync.core.views import ClusterView, Verdict
from fedsync.core.weighting import Weighting

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Drivers:
    """What is known of a machine at the moment of a forecast.

    Args:
        cpu: share of processors available to the trainer, 0..1; see `Window`. 0, always, if the silo does not tell.
        memory: memory pressure, 0..1; likewise.
    """

    cpu: float
    memory: float


@fast_dataclass
@dataclass(frozen=True, slots=True)
class SpeedSample:
    """One observation of a silo: an order, or one step of a series.

    Args:
        speed: samples per second over the compute part.
        cpu: share of processors available to the trainer, 0..1, or None if not told; see `Window`.
        memory: memory pressure, 0..1, or None if not told; likewise.
        windows: the course of the order in short pieces, or none; for predictors that learn.
        known: what was known when this speed was forecast, for those that judge their forecasts; likewise.
    """

    speed: float
    cpu: float | None = None
    memory: float | None = None
    windows: tuple[Window, ...] = ()
    known: Drivers | None = None


class Predictor(Protocol[S]):
    """Predicts a silo's speed from what was seen. State ``S`` is a value: it pickles, and there is one a silo.

    ``observe`` and ``forecast`` are cheap and never train. ``learn`` is for those that train (`unlearned` says
    whether they want to); the driver has it called when there is time.
    """

    @property
    def learns(self) -> bool:
        """Whether `learn` can ever change a state."""

    def init(self) -> S: ...

    def observe(self, state: S, sample: SpeedSample) -> S:
        """State after one more observation. Never changes ``state``."""

    def forecast(self, state: S, drivers: Drivers | None = None) -> float | None:
        """Predicted mean speed of the next order [samples/s], or None before the first observation.

        Args:
            state: of the silo.
            drivers: the newest that is known of the machine; None if nothing is.
        """

    def unlearned(self, state: S) -> bool:
        """Whether `learn` has something to do."""

    def learn(self, state: S, epochs: int) -> S:
        """State after training for at most so many epochs (passes over what is remembered). Deterministic."""

    def reuse(self, state: S, donor: S) -> S:
        """``state`` with what ``donor``, another silo's, has learned as the beginning of its own training."""

    def export(self, state: S) -> dict[str, Any] | None:
        """What was learned as plain JSON values, for another run to begin with; None if nothing was."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Smallest and largest batch of each silo, both int64 [n] in samples, ``floor <= cap``."""

    floor: NDArray[np.int64]
    cap: NDArray[np.int64]


class Balancer(Protocol):
    """Shares a total of samples among silos."""

    def plan(self, curves: Sequence[Curve], total: int, bounds: Bounds) -> NDArray[np.int64]:
        """Sizes, int64 [n] in samples, within bounds and summing exactly to ``total``.

        Raises:
            ConfigError: ``total`` lies outside what the bounds allow.
        """


@dataclass(frozen=True, slots=True)
class RoundSeen:
    """What an adaptive balancer learns between two rounds.

    Args:
        names: the n silos that are here, in order of joining.
        seconds: name -> whole seconds of the last order, of those that have finished one since the round before.
        memory: name -> share of memory in use in that order, 0..1, of those that tell.
        total: samples that the silos are to share.
        bounds: smallest and largest size of each silo.
    """

    names: Sequence[str]
    seconds: Mapping[str, float]
    memory: Mapping[str, float]
    total: int
    bounds: Bounds


class AdaptiveBalancer(Protocol[S]):
    """Shares a total of samples among silos by what the rounds so far took. State ``S`` is a value that pickles."""

    def init(self) -> S: ...

    def advance(self, state: S, seen: RoundSeen) -> tuple[S, tuple[str, ...]]:
        """State for the next round, and what the user ought to know. Asked once a round; never changes ``state``."""

    def plan(self, state: S, names: Sequence[str], total: int, bounds: Bounds) -> NDArray[np.int64]:
        """Sizes, as of a `Balancer`, in the round that ``state`` is for. Asked at any time."""


class Barrier(Protocol[S]):
    """Decides when updates are committed and who may go on.

    Level-triggered: it is shown the whole cluster each time, so a late or duplicate call is harmless.
    """

    def init(self) -> S: ...

    def decide(self, state: S, view: ClusterView) -> tuple[S, Verdict]:
        """New state and answer. Called again after a commit until it commits nothing more."""


class Weigher(Protocol):
    """Gives the updates of a commit their coefficients."""

    @property
    def weighting(self) -> Weighting | None:
        """The coefficients as a number that the silo itself knows times one common to the commit.

        None if they are not of that form: then only a server that sees the updates can weigh them.
        """

    @property
    def toward(self) -> bool:
        """Whether the model moves towards the silos' models instead of along their updates; see `Commit`."""

    def coefficients(self, metas: Sequence[UpdateMeta], version: int) -> Sequence[float]:
        """Positive finite coefficients c of the commit that makes ``version``, in the order of ``metas``.

        The model becomes ``model + sum_i c_i update_i``; the coefficients need not sum to 1.
        """


AnyAdaptiveBalancer = AdaptiveBalancer[Any]
AnyPredictor = Predictor[Any]
AnyBarrier = Barrier[Any]
