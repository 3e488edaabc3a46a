"""What the papers' barriers can be told, and what is said when it makes no sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedsync.config.strategy import StrategyConfig
from fedsync.core.errors import ConfigError
from fedsync.policies.barrier.climbing import ClimbingInterval
from fedsync.policies.barrier.intervals import FittedInterval, FixedInterval, HalvingInterval
from fedsync.policies.barrier.kinds.absp import Absp
from fedsync.policies.barrier.kinds.bsp import Bsp
from fedsync.policies.barrier.kinds.elastic import Elastic
from fedsync.policies.barrier.kinds.fsp import Fsp, Late, WaitFor
from fedsync.policies.barrier.kinds.sampled import Sampled, Sampling
from fedsync.policies.barrier.kinds.ssp import Asp, Ssp

GOOD = """\
name: mine
stop: {rounds: 4}
balancer: {kind: fixed}
barrier: {kind: bsp}
task: {kind: digits}
"""
FIXED = "interval: {kind: fixed, interval_s: 2.0}"


def load(folder: Path, barrier: str, *overrides: str) -> StrategyConfig:
    path = folder / "mine.yaml"
    path.write_text(GOOD, encoding="utf-8")
    return StrategyConfig.load(path, [f"barrier={{{barrier}}}", *overrides])


@pytest.mark.parametrize(
    ("barrier", "expected"),
    [
        ("kind: bsp", Bsp()),
        ("kind: asp", Asp()),
        ("kind: ssp, staleness: 0", Ssp(0)),
        ("kind: ssp", Ssp(3)),
        ("kind: sampled, sample_size: 0", Sampled(0, 0, Sampling.DYNAMIC)),
        ("kind: sampled, sample_size: 4, staleness: 2, sampling: grouped", Sampled(4, 2, Sampling.GROUPED)),
        ("kind: a-bsp", Absp(0.5, 1.0)),
        ("kind: a-bsp, sync_ratio: 1.0, report_s: 0.5", Absp(1.0, 0.5)),
        ("kind: elastic", Elastic(None, None, "sweep")),
        ("kind: elastic, lookahead: 15, floor: 1, method: zipline", Elastic(15, 1, "zipline")),
        (f"kind: fsp, {FIXED}", Fsp(FixedInterval(2.0), 0.5, 0.5, 1.0, Late.NEXT, None, 0.5)),
        (
            f"kind: fsp, {FIXED}, overrun: 0.0, grace: 0.0, passes: 2.5, late: drop, smoothing: 1.0",
            Fsp(FixedInterval(2.0), 0.0, 0.0, 2.5, Late.DROP, None, 1.0),
        ),
        (
            f"kind: fsp, {FIXED}, wait_for: {{sample_size: 2, sampling: basic}}",
            Fsp(FixedInterval(2.0), wait_for=WaitFor(2, Sampling.BASIC)),
        ),
        ("kind: fsp, interval: {kind: binary, interval_s: 8.0}", Fsp(HalvingInterval(8.0, 2, 0.1))),
        ("kind: fsp, interval: {kind: linear, interval_s: 2.0}", Fsp(FittedInterval(2.0, 60.0, 0.5, 8.0, 0.5))),
        ("kind: fsp, interval: {kind: climb}", Fsp(ClimbingInterval(0.1, 60.0))),
        (
            "kind: fsp, interval: {kind: climb, floor_s: 2.0, ceiling_s: 9.0, factor: 2, gains: 2, trials: 4, rest: 1}",
            Fsp(ClimbingInterval(2.0, 9.0, 2.0, 2, 4, rest=1)),
        ),
        (
            "kind: fsp, interval: {kind: linear, interval_s: 2.0, stage_s: 9.0, floor_s: 2.0, ceiling_s: 4.0}",
            Fsp(FittedInterval(2.0, 9.0, 2.0, 4.0, 0.5)),
        ),
    ],
)
def test_a_section_becomes_the_policy(tmp_path: Path, barrier: str, expected: Any) -> None:
    config = load(tmp_path, barrier)
    assert config.barrier.build() == expected
    assert StrategyConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("barrier", "place", "told"),
    [
        ("kind: ssp, staleness: -1", "barrier.staleness", "at least 0"),
        ("kind: ssp, stalenes: 1", "barrier.stalenes", "Did you mean 'staleness'?"),
        ("kind: sampled", "barrier.sample_size", "missing"),
        ("kind: sampled, sample_size: 2, sampling: dynamik", "barrier.sampling", "Did you mean 'dynamic'?"),
        ("kind: a-bsp, sync_ratio: 1.1", "barrier.sync_ratio", "at most 1"),
        ("kind: a-bsp, report_s: 0.0", "barrier.report_s", "greater than 0"),
        ("kind: elastic, lookahead: 0", "barrier.lookahead", "at least 1"),
        ("kind: elastic, lookahead: 4, floor: 5", "barrier", "floor 5 exceeds lookahead 4"),
        ("kind: elastic, method: naive", "barrier.method", "sweep"),
        ("kind: fsp", "barrier.interval", "missing"),
        ("kind: fsp, interval: 2.0", "barrier.interval", "a section is expected"),
        ("kind: fsp, interval: {kind: fixt, interval_s: 2.0}", "barrier.interval.kind", "Did you mean 'fixed'?"),
        ("kind: fsp, interval: {kind: fixed, interval_s: 0.0}", "barrier.interval.interval_s", "greater than 0"),
        ("kind: fsp, interval: {kind: binary, interval_s: 1.0, factor: 1}", "barrier.interval.factor", "at least 2"),
        ("kind: fsp, interval: {kind: binary, interval_s: 0.05}", "barrier.interval", "floor_s 0.1 exceeds"),
        ("kind: fsp, interval: {kind: linear, interval_s: 3.0, ceiling_s: 2.0}", "barrier.interval", "outside"),
        ("kind: fsp, interval: {kind: climb, floor_s: 3.0, ceiling_s: 2.0}", "barrier.interval", "floor_s 3 exceeds"),
        ("kind: fsp, interval: {kind: climb, trials: 1}", "barrier.interval.trials", "at least 2"),
        (f"kind: fsp, {FIXED}, overrun: 1.5", "barrier.overrun", "at most 1"),
        (f"kind: fsp, {FIXED}, passes: 0.0", "barrier.passes", "greater than 0"),
        (f"kind: fsp, {FIXED}, late: drop, wait_for: {{sample_size: 2}}", "barrier", "throws away"),
        (f"kind: fsp, {FIXED}, late: stale", "barrier.late", "staleness: {kind: polynomial}"),
    ],
)
def test_mistakes_are_explained(tmp_path: Path, barrier: str, place: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, barrier)
    assert caught.value.place.endswith(place)
    assert told in str(caught.value)


def test_stale_updates_may_wait_where_they_are_discounted(tmp_path: Path) -> None:
    barrier = f"kind: fsp, {FIXED}, late: stale"
    load(tmp_path, barrier, "aggregation={kind: fednova, staleness: {kind: hinge}}")
    for aggregation in ("{kind: fedavg}", "{kind: fednova}", "{kind: fedbuff, staleness: {kind: constant}}"):
        with pytest.raises(ConfigError, match="discounted"):
            load(tmp_path, barrier, f"aggregation={aggregation}")
