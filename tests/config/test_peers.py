"""Barriers in barriers, aggregations that follow from the barrier, and what is said when they do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedsync.config.strategy import UNEQUAL_STEPS, StrategyConfig
from fedsync.core.errors import ConfigError
from fedsync.core.stopping import StopRules
from fedsync.policies.aggregate.fednova import FedNova
from fedsync.policies.aggregate.staleness import Hinge, Polynomial
from fedsync.policies.aggregate.weighers import Scaled, Stale, Toward, WeightedMean
from fedsync.policies.barrier.kinds.bsp import Bsp
from fedsync.policies.barrier.late import LateRule
from fedsync.policies.barrier.wrappers.capped import Capped
from fedsync.policies.barrier.wrappers.deadline import Deadline
from fedsync.policies.barrier.wrappers.minimum import MinimumSilos
from fedsync.policies.barrier.wrappers.quorum import Quorum, Required
from fedsync.policies.barrier.wrappers.resting import Resting
from tests.laws.kinds import EXAMPLES

GOOD = """\
name: mine
stop: {rounds: 4}
local: {steps: 20, batch_size: 32, learning_rate: 0.2}
balancer: {kind: fixed}
barrier:
  kind: capped
  cap_s: 5.0
  inner:
    kind: quorum
    share: 0.5
    inner: {kind: bsp}
task: {kind: digits}
"""


def load(folder: Path, *overrides: str, text: str = GOOD) -> StrategyConfig:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return StrategyConfig.load(path, overrides)


def test_a_barrier_goes_into_a_barrier_into_a_barrier(tmp_path: Path) -> None:
    policies = load(tmp_path).policies(5)
    inner = Quorum(Bsp(), Required(share=0.5), LateRule.NEXT)
    assert policies.barrier == MinimumSilos(Resting(Capped(inner, 5.0, LateRule.NEXT)), 5)


def test_what_is_written_reads_back_the_same(tmp_path: Path) -> None:
    config = load(tmp_path, "barrier.inner={kind: deadline, inner: {kind: fedcompass}}")
    assert StrategyConfig.model_validate(config.model_dump(mode="json")) == config


def test_deadline_defaults(tmp_path: Path) -> None:
    barrier = load(tmp_path, "barrier={kind: deadline, late: drop, inner: {kind: bsp}}").barrier.build()
    assert barrier == Deadline(Bsp(), 3.0, 0.0, Required(share=0.5), 100, LateRule.DROP)


@pytest.mark.parametrize(
    ("override", "place", "problem", "remedy"),
    [
        ("barrier.inner.kind=qorum", "barrier.inner.kind", "unknown kind 'qorum'", "Did you mean 'quorum'?"),
        ("barrier.inner.inner.kind=bps", "barrier.inner.inner.kind", "unknown kind 'bps'", "Did you mean 'bsp'?"),
        ("barrier.inner.inner=bsp", "barrier.inner.inner", "a section is expected", "Write inner: {kind: bsp}"),
        ("barrier.inner.share=2.0", "barrier.inner.share", "2.0 is not allowed", "at most 1"),
        ("barrier.inner.count=3", "barrier.inner", "how many are enough is not clear", "either `count` or `share`"),
        ("barrier.late=never", "barrier.late", "'never' is not allowed", "drop, next"),
        ("barrier.inner.late=drop", "barrier", "late 'next' of capped would commit what quorum", "the same `late`"),
        ("barrier.caps_s=3.0", "barrier.caps_s", "unknown key", "Did you mean 'cap_s'?"),
        ("barrier={kind: buffered}", "barrier.size", "missing", "Add this key"),
        ("barrier={kind: fedcompass, min_steps: 9, max_steps: 8}", "barrier", "max_steps 8", "Raise max_steps"),
        ("aggregation={kind: fedbuff, staleness: {kind: hinges}}", "aggregation.staleness.kind", "hinges", "'hinge'"),
        ("aggregation={kind: fedasync, mixing: 1.5}", "aggregation.mixing", "1.5 is not allowed", "at most 1"),
        ("local.proximal=-0.1", "local.proximal", "-0.1 is not allowed", "at least 0"),
        ("stop.relative_change=2.0", "stop.relative_change", "2.0 is not allowed", "at most 1"),
    ],
)
def test_mistakes_are_explained(tmp_path: Path, override: str, place: str, problem: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, override)
    assert caught.value.place.endswith(f" {place}")
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy


def test_a_proximal_term_that_makes_silos_swing_is_refused_where_it_is_normalised(tmp_path: Path) -> None:
    load(tmp_path, "local.proximal=5.0", "aggregation.kind=fedavg")
    with pytest.raises(ConfigError, match=r"5 times local\.learning_rate 0\.2 is not below 1"):
        load(tmp_path, "local.proximal=5.0", "aggregation.kind=fednova")


def test_fedcompass_and_a_balancer_do_not_both_set_the_steps(tmp_path: Path) -> None:
    barrier = "barrier.inner={kind: fedcompass}"
    load(tmp_path, barrier, "balancer={kind: proportional}")
    with pytest.raises(ConfigError, match="fedcompass sets the steps"):
        load(tmp_path, barrier, "balancer={kind: proportional, scale: steps}")


@pytest.mark.parametrize("kind", EXAMPLES["barrier"])
def test_unequal_steps_are_normalised_unless_the_file_says_otherwise(tmp_path: Path, kind: str) -> None:
    def section(more: dict[str, Any]) -> str:
        return str({"kind": kind, **more}).replace("'", "")

    inner = section(EXAMPLES["barrier"][kind])
    for override in (f"barrier={inner}", f"barrier={{kind: capped, cap_s: 1.0, inner: {inner}}}"):
        expected = "fednova" if kind in UNEQUAL_STEPS else "fedavg"
        assert load(tmp_path, override).aggregation.kind == expected
        assert load(tmp_path, override, "aggregation.kind=fedavg").aggregation.kind == "fedavg"


def test_fednova_knows_how_the_silos_train(tmp_path: Path) -> None:
    config = load(tmp_path, "local.momentum=0.5", "local.proximal=0.3", "aggregation={kind: fednova, weight: examples}")
    assert config.policies().weigher == FedNova(WeightedMean("examples"), momentum=0.5, pull=pytest.approx(0.06))


@pytest.mark.parametrize(("proximal", "pull"), [(0.0, 0.2), (1.0, 0.4)])
def test_a_running_mean_comes_less_far_with_each_step(tmp_path: Path, proximal: float, pull: float) -> None:
    """s <- s - 0.2 (s - t) - 0.2 mu (s - s_0): of the way to t, a step leaves 1 - 0.2 (1 + mu)."""
    task = "task={kind: k-means, clusters: 3, data: {kind: blobs}}"
    rest = ["local.momentum=0.0", f"local.proximal={proximal}", "aggregation={kind: fednova}"]
    assert load(tmp_path, task, *rest).policies().weigher == FedNova(WeightedMean(), pull=pytest.approx(pull))


def test_aggregations_are_built_from_parts(tmp_path: Path) -> None:
    buff = load(tmp_path, "aggregation={kind: fedbuff, server_rate: 0.5}").policies().weigher
    assert buff == Scaled(Stale(WeightedMean("silo"), Polynomial(0.5)), 0.5)
    hinge = "aggregation={kind: fedasync, mixing: 0.4, staleness: {kind: hinge, slope: 2.0, grace: 3}}"
    assert load(tmp_path, hinge).policies().weigher == Toward(Scaled(Stale(WeightedMean(), Hinge(2.0, 3)), 0.4))
    plain = load(tmp_path, "aggregation={kind: fedbuff, staleness: {kind: constant}}").policies().weigher
    assert plain == WeightedMean("silo"), "eta_g = 1 and s = 1 change nothing"


def test_stop_rules_are_read(tmp_path: Path) -> None:
    stop = "stop={rounds: 9, seconds: 60.0, target_accuracy: 0.9, patience: 3, relative_change: 0.01}"
    assert load(tmp_path, stop).policies().stop == StopRules(9, 60.0, 0.9, 3, 0.01)
