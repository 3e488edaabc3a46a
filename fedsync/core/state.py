"""What a coordinator is made of: the policies that decide, and the state that they decide on."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any

from fedsync.core.failure_policy import FailurePolicy
from fedsync.core.forecasts import Forecasts
from fedsync.core.orders import UpdateMeta
from fedsync.core.protocols import AnyBarrier, AnyPredictor, Weigher
from fedsync.core.roster import Roster
from fedsync.core.scores import Scores
from fedsync.core.sizing import Adaptation, Sizing
from fedsync.core.stopping import Passes, StopRules


@dataclass(frozen=True, slots=True)
class Policies:
    """Everything that decides, as values.

    Args:
        seed: of the run.
        predictor: forecasts a silo's speed.
        sizing: turns forecasts into batch sizes, steps and learning rates.
        barrier: decides commits and releases.
        weigher: gives the updates of a commit their coefficients.
        stop: when the run has done enough.
        declared_speeds: take speeds from what silos declare instead of measuring them.
    """

    seed: int
    predictor: AnyPredictor
    sizing: Sizing
    barrier: AnyBarrier
    weigher: Weigher
    stop: StopRules
    declared_speeds: bool = False


@dataclass(slots=True)
class CoordinatorState:
    """All that a run has come to; it pickles.

    Args:
        forecasts: of all silos that were ever here.
        adaptation: how sizes have adapted.
        version: of the model; raised by commits and rollbacks.
        commits: made.
        silos: that are here.
        pending: updates that wait for a commit, by id.
        barrier: the barrier's own.
        found_caps: largest batch that a silo ran with after one did not fit, by name.
        issued: orders given to each silo.
        scores: of model versions.
        passes: of the silos over their data.
        standing: what may be expected of the silos.
        closing: why the run is about to end.
        awaiting: silos that are still to evaluate the last version.
        halted: the order of each silo that was told to stop last.
        wake_s: when the barrier was last to be asked again.
        timed: the end by time is on the clock.
        stopped: `Stop` was given.
    """

    forecasts: Forecasts
    adaptation: Adaptation
    version: int = 0
    commits: int = 0
    silos: Roster = field(default_factory=Roster)
    pending: dict[str, UpdateMeta] = field(default_factory=dict)
    barrier: Any = None
    found_caps: dict[str, int] = field(default_factory=dict)
    issued: dict[str, int] = field(default_factory=dict)
    scores: Scores = field(default_factory=Scores)
    passes: Passes = field(default_factory=Passes)
    standing: FailurePolicy = field(default_factory=FailurePolicy)
    closing: str | None = None
    awaiting: set[str] = field(default_factory=set)
    halted: dict[str, str] = field(default_factory=dict)
    wake_s: float = inf
    timed: bool = False
    stopped: bool = False
