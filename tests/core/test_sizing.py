"""From forecasts to work: three scales, and every limit on a batch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsync.balance.proportional import ProportionalBalancer
from fedsync.core.curve import Curve
from fedsync.core.orders import SiloFacts
from fedsync.core.sizing import LocalWork, Scale, Sizing
from fedsync.core.views import SiloView

WORK = LocalWork(steps=20, batch_size=32, learning_rate=0.1)
PROPORTIONAL = ProportionalBalancer()


def silo(speed: float | None = None, examples: int = 1000, memory: int | None = None) -> SiloView:
    return SiloView(SiloFacts(examples, memory), forecast=None if speed is None else Curve(speed))


def plan(silos: list[SiloView], found: dict[str, int] | None = None, **sizing: Any) -> list[LocalWork]:
    """Work of silos a, b, c..."""
    names = "abcdefgh"[: len(silos)]
    work = Sizing(WORK, **sizing).plan(dict(zip(names, silos, strict=True)), found or {})
    assert list(work) == list(names)
    return list(work.values())


def batches(*args: Any, **sizing: Any) -> list[int]:
    return [work.batch_size for work in plan(*args, **sizing)]


def test_without_a_balancer_everybody_does_the_same() -> None:
    assert plan([silo(300), silo(100)]) == [WORK, WORK]


def test_scale_batch_keeps_steps_and_learning_rate() -> None:
    """LB-BSP: speeds 3:1 share 64 samples as 48 and 16."""
    assert plan([silo(300), silo(100)], balancer=PROPORTIONAL) == [
        LocalWork(20, 48, 0.1),
        LocalWork(20, 16, 0.1),
    ]


def test_scale_steps_keeps_batch_and_learning_rate() -> None:
    """Speeds 3:1 share 40 steps as 30 and 10."""
    assert plan([silo(300), silo(100)], balancer=PROPORTIONAL, scale=Scale.STEPS) == [
        LocalWork(30, 32, 0.1),
        LocalWork(10, 32, 0.1),
    ]


def test_scale_learning_rate_lets_it_follow_the_batch() -> None:
    """48/32 and 16/32 of 0.1."""
    work = plan([silo(300), silo(100)], balancer=PROPORTIONAL, scale=Scale.LEARNING_RATE)
    assert [(w.steps, w.batch_size) for w in work] == [(20, 48), (20, 16)]
    assert [w.learning_rate for w in work] == pytest.approx([0.15, 0.05], rel=1e-15)


def test_everybody_does_a_step_however_slow() -> None:
    """Speeds 10^6:1: of 40 steps the slow silo would get 0.00004."""
    work = plan([silo(1e6), silo(1.0)], balancer=PROPORTIONAL, scale=Scale.STEPS)
    assert [w.steps for w in work] == [39, 1]


def test_a_silo_nobody_has_measured_counts_as_the_median() -> None:
    """Known 100, 200, 600: the newcomer counts 200; of 128 samples 1100ths: 11.6, 23.3, 69.8, 23.3."""
    assert batches([silo(100), silo(200), silo(600), silo()], balancer=PROPORTIONAL) == [12, 23, 70, 23]


def test_with_no_forecast_at_all_the_batch_is_equal() -> None:
    assert batches([silo(), silo(), silo()], balancer=PROPORTIONAL) == [32, 32, 32]


@pytest.mark.parametrize(
    ("limited", "found", "cap"),
    [
        (silo(300, examples=40), {}, None),
        (silo(300, memory=40), {}, None),
        (silo(300), {"a": 40}, None),
        (silo(300, examples=500, memory=60), {"a": 40}, 50),  # the lowest of all counts
        (silo(300, examples=40, memory=60), {"a": 50}, 70),
        (silo(300, examples=50, memory=40), {"a": 70}, 60),
    ],
)
def test_each_limit_caps_the_batch_and_the_others_take_the_rest(
    limited: SiloView, found: dict[str, int], cap: int | None
) -> None:
    """Of 96, speeds 300:100:100 would take 58, 19, 19; capped at 40, the other two share 56."""
    assert batches([limited, silo(100), silo(100)], found, balancer=PROPORTIONAL, cap=cap) == [40, 28, 28]


def test_the_configured_cap_holds_for_everybody() -> None:
    """Of 96: a is cut to 50, the rest 46 goes 23:23."""
    assert batches([silo(300), silo(100), silo(100)], balancer=PROPORTIONAL, cap=50) == [50, 23, 23]


def test_the_total_is_lowered_if_the_silos_cannot_take_it() -> None:
    """Two of 10 examples each cannot take 64."""
    assert batches([silo(300, examples=10), silo(100, examples=10)], balancer=PROPORTIONAL) == [10, 10]


def test_caps_hold_without_a_balancer_too() -> None:
    assert batches([silo(300, examples=10), silo(100, memory=20), silo(100)], {"c": 30}) == [10, 20, 30]


def test_the_floor_holds() -> None:
    """Of 64, speeds 31:1 would take 62 and 2."""
    assert batches([silo(3100), silo(100)], balancer=PROPORTIONAL, floor=8) == [56, 8]


def test_a_floor_above_what_a_silo_can_take_gives_way() -> None:
    assert batches([silo(300), silo(100, examples=5)], balancer=PROPORTIONAL, floor=8) == [59, 5]


def test_steps_are_not_capped_by_data_or_memory() -> None:
    work = plan([silo(300, examples=10), silo(100)], balancer=PROPORTIONAL, scale=Scale.STEPS)
    assert [(w.steps, w.batch_size) for w in work] == [(30, 10), (10, 32)]


def test_no_silo_no_work() -> None:
    assert plan([], balancer=PROPORTIONAL) == []


speeds = st.none() | st.floats(1e-3, 1e9)
memories = st.none() | st.integers(1, 100)


@given(
    silos=st.lists(st.builds(silo, speeds, st.integers(1, 2000), memories), min_size=1, max_size=8),
    floor=st.integers(1, 32),
    scale=st.sampled_from(Scale),
)
def test_work_is_within_bounds_and_sums_to_the_total(silos: list[SiloView], floor: int, scale: Scale) -> None:
    work = plan(silos, balancer=PROPORTIONAL, floor=floor, scale=scale)
    caps = [min(s.facts.examples, s.facts.memory_samples or 2000) for s in silos]
    assert all(1 <= w.batch_size <= cap and w.steps >= 1 for w, cap in zip(work, caps, strict=True))
    if scale is Scale.STEPS:
        assert sum(w.steps for w in work) == 20 * len(silos)
    else:
        assert sum(w.batch_size for w in work) == min(32 * len(silos), sum(caps))
        assert all(w.batch_size >= min(floor, cap) for w, cap in zip(work, caps, strict=True))
