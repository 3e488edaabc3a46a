"""Views by hand, and whole runs in virtual time, in few words."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedsync.core.actions import Action, Commit, Dispatch
from fedsync.core.orders import LocalWork, SiloFacts, UpdateMeta, WorkOrder
from fedsync.core.speed.curve import Curve
from fedsync.core.views import ClusterView, SiloView
from fedsync.policies.barrier.intervals import Attempt, IntervalPolicy, IntervalRound
from tests.simulation.fake import Result, Twist, machines, simulate, strategy

EXAMPLES = 1000


def silo(
    *,
    clock: int = 0,
    busy: bool = False,
    base: int = 0,
    steps: int = 4,
    batch: int = 8,
    speed: float | None = None,
    examples: int = EXAMPLES,
    **more: Any,
) -> SiloView:
    """An idle silo, or one that is busy with an order from version ``base``."""
    order = WorkOrder(f"?/{clock + 1}", base, clock + 1, batch, steps, 0.1, 1) if busy else None
    forecast = None if speed is None else Curve(speed)
    return SiloView(SiloFacts(examples), clock=clock, order=order, forecast=forecast, **more)


def meta(name: str, base: int = 0, number: int = 1, steps: int = 4, batch: int = 8, **more: Any) -> UpdateMeta:
    """An update of ``steps`` x ``batch`` samples."""
    return UpdateMeta(
        f"{name}/{number}", name, base, steps, steps * batch, more.pop("examples", EXAMPLES), nbytes=40, **more
    )


def view(
    silos: dict[str, SiloView],
    *pending: UpdateMeta,
    now_s: float = 0.0,
    version: int = 0,
    work: LocalWork | None = None,
    seed: int = 7,
) -> ClusterView:
    """What a barrier sees; every silo would be given the same ``work``."""
    each = work or LocalWork(steps=4, batch_size=8, learning_rate=0.1)
    return ClusterView(
        now_s, version, silos, {update.update_id: update for update in pending}, dict.fromkeys(silos, each), seed
    )


def follow(policy: IntervalPolicy[Any], losses: Iterable[float], cost_s: float = 0.0) -> list[Attempt]:
    """Rounds that take what was asked for, one a loss; returns what was asked for each time, and then next."""
    state, attempts = policy.init(), []
    for loss in losses:
        attempts.append(policy.attempt(state))
        state = policy.observe(state, IntervalRound(attempts[-1].interval_s, cost_s, loss))
    return [*attempts, policy.attempt(state)]


def lengths(attempts: list[Attempt]) -> list[float]:
    return [attempt.interval_s for attempt in attempts]


def race(
    out: Path,
    speeds: list[float],
    barrier: dict[str, Any],
    silos: dict[str, Any] | None = None,
    twists: dict[str, Twist] | None = None,
    **sections: Any,
) -> Result:
    """Silos a, b, c... with 8 local steps of 32 samples each, so 256 samples an order, without balancing."""
    plain: dict[str, Any] = {
        "barrier": barrier,
        "balancer": {"kind": "fixed"},
        "local": {"steps": 8, "batch_size": 32},
        "stop": {"seconds": 20.0},
    }
    config = strategy(**{**plain, **sections})
    return simulate(out, machines(*({"speed": speed, **(silos or {})} for speed in speeds)), config, twists)


def steps(result: Result) -> list[dict[str, int]]:
    """Local steps of each silo, round by round."""
    return [{name: share.steps for name, share in row.silos.items()} for row in result.ledger.rounds]


def begins(result: Result) -> dict[str, list[float]]:
    """When each silo was given its orders [s]."""
    at: dict[str, list[float]] = defaultdict(list)
    for at_s, action in result.actions(Dispatch):
        at[action.silo].append(at_s)
    return dict(at)


def commits(result: Result) -> list[tuple[float, list[str]]]:
    """When what was committed."""
    return [(at_s, list(commit.weights)) for at_s, commit in result.actions(Commit)]


def deeds(result: Result) -> list[tuple[float, tuple[Action, ...]]]:
    """The journal without its events and reasons."""
    return [(entry.at_s, entry.actions) for entry in result.entries]
