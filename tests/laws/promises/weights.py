"""What updates count in a commit, worked out here from what silos said, and how batches sum up."""

import math
from collections.abc import Sequence

import pytest

from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit, Dispatch
from fedsync.core.events import SiloJoined, SiloLost, UpdateArrived
from fedsync.core.orders import UpdateMeta
from fedsync.core.silo_weight import Weighting
from tests.laws.law import law
from tests.laws.promises.fairness import lots_decide
from tests.laws.watched import Run


def weighting(config: StrategyConfig) -> Weighting | None:
    """How the strategy says that it weighs updates, if it weighs each by what its silo knows."""
    return config.policies().weigher.weighting


def not_by_silos(config: StrategyConfig) -> str:
    return "" if weighting(config) else "its weigher has no `weighting`: no silo knows what its update will count"


def expected(weighs: Weighting, metas: Sequence[UpdateMeta]) -> list[float]:
    """c_i = rate x p_i x tau_eff / a_i, where p_i is the share of what the silo stands for."""
    stands_for = [{"silo": 1, "examples": meta.examples, "samples": meta.samples}[weighs.by] for meta in metas]
    shares = [each / math.fsum(stands_for) for each in stands_for]
    if not weighs.normalised:
        return [weighs.rate * share for share in shares]
    # How far SGD goes along a constant gradient, step by step; the strategies here have no proximal term.
    assert weighs.pull == 0
    longest = max(meta.steps for meta in metas)
    speed, way, ways = 0.0, 0.0, [0.0]
    for _ in range(longest):
        speed = weighs.momentum * speed + 1.0
        way += speed
        ways.append(way)
    effective = math.fsum(share * ways[meta.steps] for share, meta in zip(shares, metas, strict=True))
    return [weighs.rate * share * effective / ways[meta.steps] for share, meta in zip(shares, metas, strict=True)]


@law(least=50, unless=not_by_silos)
def updates_count_by_what_they_stand_for(run: Run) -> int:
    """The weights of a commit equal a calculation by hand: by silo, examples or samples, normalised.

    Counted are the updates.
    """
    weighs, exposed = run.policies.weigher.weighting, 0
    assert weighs is not None
    metas: dict[str, UpdateMeta] = {}
    for entry in run.entries:
        for event in entry.events:
            if isinstance(event, UpdateArrived):
                metas.setdefault(event.meta.update_id, event.meta)
        for action in entry.actions:
            if isinstance(action, Commit):
                wanted = expected(weighs, [metas[update_id] for update_id in action.weights])
                assert list(action.weights.values()) == pytest.approx(wanted, rel=1e-9)
                exposed += len(wanted)
    return exposed


@law(least=100)
def weights_are_sorted_and_positive(run: Run) -> int:
    """A commit sorts its updates by name, so that all drivers add in the same order. Each weight is positive."""
    commits = run.outcome.actions(Commit)
    for commit in commits:
        assert list(commit.weights) == sorted(commit.weights)
        assert all(0 < weight < math.inf for weight in commit.weights.values())
        assert commit.toward == run.policies.weigher.toward
    return len(commits)


def balances_nothing(config: StrategyConfig) -> str:
    alone = "" if config.policies().sizing.balances else "its sizing `balances` nothing: each silo has its own batch"
    return alone or lots_decide(config)


@law(least=15, unless=balances_nothing)
def batches_sum_to_the_total(run: Run) -> int:
    """If all silos begin together, their batches sum to n x B, or to all that fits if this is less.

    Steps sum to n x tau where the balancer shares them, unless the barrier sets them. Counted are such beginnings of
    several silos.
    """
    local, balancer = run.config.local, run.config.balancer
    caps: dict[str, int] = {}
    exposed = 0
    for entry in run.entries:
        for event in entry.events:
            if isinstance(event, SiloJoined):
                caps[event.silo] = min(event.facts.examples, run.policies.sizing.cap or event.facts.examples)
            elif isinstance(event, SiloLost):
                caps.pop(event.silo, None)
        orders = {action.silo: action.order for action in entry.actions if isinstance(action, Dispatch)}
        if orders.keys() != caps.keys() or any(silo.memory for silo in run.scenario.silos):
            continue
        assert all(order.batch_size <= caps[name] for name, order in orders.items())
        if balancer.scales_steps:
            assert all(order.batch_size == min(local.batch_size, caps[name]) for name, order in orders.items())
            if not run.config.barrier.innermost.sets_steps:
                assert sum(order.max_steps for order in orders.values()) == len(orders) * local.steps
        else:
            total = min(len(orders) * local.batch_size, sum(caps.values()))
            assert sum(order.batch_size for order in orders.values()) == total
        exposed += len(orders) > 1
    return exposed
