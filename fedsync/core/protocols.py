"""Protocols (interfaces) of the policies that the coordinator calls. A policy is a value with pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedsync.core.orders import UpdateMeta, Window
from fedsync.core.silo_weight import Weighting
from fedsync.core.speed.curve import Curve
from fedsync.core.views import ClusterView, Verdict

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class MachineLoad:
    """Resources of a machine at a forecast: ``cpu`` share and ``memory`` pressure, 0..1; 0 if not reported."""

    cpu: float
    memory: float


@dataclass(frozen=True, slots=True)
class SpeedSample:
    """One observation of a silo: an order, or one step of a series.

    Args:
        speed: samples per second over the compute part.
        cpu: share of processors available to the trainer, 0..1, as in `Window`; None if not reported.
        memory: memory pressure, 0..1, as in `Window`; None if not reported.
        windows: the order in short pieces, or empty; for predictors that learn.
        known: inputs of the forecast of this speed, for predictors that score their forecasts; None if there was none.
    """

    speed: float
    cpu: float | None = None
    memory: float | None = None
    windows: tuple[Window, ...] = ()
    known: MachineLoad | None = None


class Predictor(Protocol[S]):
    """Predictor of a silo's speed from observations. State ``S`` is a picklable value; each silo has its own state.

    ``observe`` and ``forecast`` are cheap and never train. ``learn`` trains; the driver calls it in spare time if
    `unlearned`.
    """

    @property
    def learns(self) -> bool:
        """Whether `learn` can ever change a state."""

    def init(self) -> S: ...

    def observe(self, state: S, sample: SpeedSample) -> S:
        """Return the state after one more observation. Never changes ``state``."""

    def forecast(self, state: S, drivers: MachineLoad | None = None) -> float | None:
        """Return the predicted mean speed of the next order [samples/s], or None before the first observation.
        ``drivers`` are the newest known resources of the machine, or None.
        """

    def unlearned(self, state: S) -> bool:
        """Whether training with `learn` is due."""

    def learn(self, state: S, epochs: int) -> S:
        """Return the state after at most ``epochs`` passes over the remembered observations. Deterministic."""

    def reuse(self, state: S, donor: S) -> S:
        """Return ``state`` with the learned parameters of ``donor`` (another silo) as the start of its training."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Smallest and largest batch of each silo, both int64 [n] [samples], ``floor <= cap``."""

    floor: NDArray[np.int64]
    cap: NDArray[np.int64]


class Balancer(Protocol):
    """Division of a total of samples among silos."""

    def plan(self, curves: Sequence[Curve], total: int, bounds: Bounds) -> NDArray[np.int64]:
        """Return sizes [samples], int64 of shape [n], within bounds, with sum ``total``; else raise `ConfigError`."""


@dataclass(frozen=True, slots=True)
class RoundSeen:
    """Observations of an adaptive balancer between two rounds.

    Args:
        names: the n connected silos, in order of joining.
        seconds: duration of the last order, by name; silos without an order since the last round are absent.
        memory: share of memory in use during the last order, 0..1, by name, for silos that report it.
        examples: number of training samples, by name.
    """

    names: Sequence[str]
    seconds: Mapping[str, float]
    memory: Mapping[str, float]
    total: int
    bounds: Bounds
    examples: Mapping[str, int] = field(default_factory=dict)


class AdaptiveBalancer(Protocol[S]):
    """Division of a total of samples among silos by earlier rounds' durations. State ``S`` is a picklable value."""

    def init(self) -> S: ...

    def advance(self, state: S, seen: RoundSeen) -> tuple[S, tuple[str, ...]]:
        """Return the next round's state and messages for the user. Called once a round; never changes ``state``."""

    def plan(self, state: S, names: Sequence[str], total: int, bounds: Bounds) -> NDArray[np.int64]:
        """Return sizes as `Balancer.plan` does, for the round of ``state``. May be called at any time."""


class Barrier(Protocol[S]):
    """Rule for when updates are committed and which silos may continue. Each call receives the whole cluster, so a late
    or duplicate call is harmless.
    """

    def init(self) -> S: ...

    def decide(self, state: S, view: ClusterView) -> tuple[S, Verdict]:
        """Return the new state and the verdict. Called again after a commit until no commit follows."""


class Weigher(Protocol):
    """Source of the coefficients of a commit's updates."""

    @property
    def weighting(self) -> Weighting | None:
        """Coefficients as a silo's own factor times a common factor; None if only the server can compute them."""

    @property
    def toward(self) -> bool:
        """Whether the model moves towards the silos' models instead of along their updates; see `Commit`."""

    def coefficients(self, metas: Sequence[UpdateMeta], version: int) -> Sequence[float]:
        """Return positive finite coefficients c_i of the updates in the commit that makes ``version``, in the order of
        ``metas``; see `Commit`. The coefficients need not sum to 1.
        """


AnyAdaptiveBalancer = AdaptiveBalancer[Any]
AnyPredictor = Predictor[Any]
AnyBarrier = Barrier[Any]
