"""From forecasts to work: three scales, and every limit on a batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedsync.common.errors import PolicyError
from fedsync.core.actions import Action, Dispatch, Note
from fedsync.core.events import SiloJoined, SiloLost
from fedsync.core.orders import LocalWork, SiloFacts, Window, WorkReport
from fedsync.core.protocols import Bounds
from fedsync.core.speed.curve import Curve
from fedsync.core.speed.sizing import Adaptation, Plan, Scale, Sizing
from fedsync.core.views import ClusterView, SiloView, Verdict
from fedsync.policies.balance.by_forecast import EqualisingBalancer, ProportionalBalancer
from fedsync.policies.balance.without_forecast import LeaderStraggler, MovePace
from tests.core.make import Scripted, begin, joined, of_type, orders

WORK = LocalWork(steps=20, batch_size=32, learning_rate=0.1)
PROPORTIONAL = ProportionalBalancer()


def silo(
    speed: float | Curve | None = None, examples: int = 1000, memory: int | None = None, **limits: int
) -> SiloView:
    """A silo that is forecast to be so fast, if it is."""
    forecast = Curve(speed) if isinstance(speed, int | float) else speed
    return SiloView(SiloFacts(examples, memory, **limits), forecast=forecast)


def plan(silos: list[SiloView], found: dict[str, int] | None = None, **sizing: Any) -> list[LocalWork]:
    """Work of silos a, b, c..."""
    names = "abcdefgh"[: len(silos)]
    work = Sizing(WORK, **sizing).plan(dict(zip(names, silos, strict=True)), found or {})
    assert list(work) == list(names) and len(work) == len(names)
    return list(work.values())


def batches(*args: Any, **sizing: Any) -> list[int]:
    return [work.batch_size for work in plan(*args, **sizing)]


@pytest.mark.parametrize(
    ("scale", "speeds", "expected"),
    [
        (Scale.BATCH, (300, 100), [(20, 48, 0.1), (20, 16, 0.1)]),  # LB-BSP: 3:1 share 64 samples
        (Scale.STEPS, (300, 100), [(30, 32, 0.1), (10, 32, 0.1)]),  # 3:1 share 40 steps
        (Scale.LEARNING_RATE, (300, 100), [(20, 48, 0.15), (20, 16, 0.05)]),  # 48/32 and 16/32 of 0.1
        (Scale.STEPS, (1e6, 1.0), [(39, 32, 0.1), (1, 32, 0.1)]),  # 0.00004 of 40 steps is one all the same
    ],
)
def test_a_scale_changes_one_thing(scale: Scale, speeds: tuple[float, float], expected: list[tuple[Any, ...]]) -> None:
    work = plan([silo(speed) for speed in speeds], balancer=PROPORTIONAL, scale=scale)
    assert [(w.steps, w.batch_size) for w in work] == [wanted[:2] for wanted in expected]
    assert [w.learning_rate for w in work] == pytest.approx([wanted[2] for wanted in expected], rel=1e-15)


@pytest.mark.parametrize(
    ("silos", "sizing", "expected"),
    [
        # Known 100, 200, 600: the newcomer counts 200, the median; of 128 samples 1100ths: 11.6, 23.3, 69.8, 23.3.
        # Two are left, and c ends 71 in 0.118 s, before a ends 12 and b ends 24 in 0.12.
        ([silo(100), silo(200), silo(600), silo()], {}, [11, 23, 71, 23]),
        ([silo(), silo(), silo()], {}, [32, 32, 32]),  # no forecast at all
        ([silo(300), silo(100), silo(100)], {"cap": 50}, [50, 23, 23]),  # of 96, a is cut to 50
        ([silo(300, examples=10), silo(100, examples=10)], {}, [10, 10]),  # two of 10 examples cannot take 64
        ([silo(3100), silo(100)], {"floor": 8}, [56, 8]),  # 31:1 of 64 would be 62 and 2
        ([silo(300), silo(100, examples=5)], {"floor": 8}, [59, 5]),  # a floor above what b can take gives way
        ([], {}, []),
    ],
)
def test_batches_by_hand(silos: list[SiloView], sizing: dict[str, int], expected: list[int]) -> None:
    assert batches(silos, balancer=PROPORTIONAL, **sizing) == expected


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (silo(5), (8, 2)),  # 310:5 of 128 are 126 and 2
        (silo(5, least_samples=18), (9, 2)),  # 2 steps of 9
        (silo(5, least_batch=12, least_samples=18), (12, 2)),
        (silo(5, least_batch=99), (32, 2)),  # it gets no more than the mean, and refuses that
        (silo(5, examples=3, least_samples=18), (3, 6)),  # 18 are 6 steps of all that it has
        (silo(5, examples=3, least_samples=65), (3, 2)),  # 65 are more than 2 steps of 32: it refuses
    ],
)
def test_no_silo_is_asked_for_less_than_its_owner_allows(last: SiloView, expected: tuple[int, int]) -> None:
    """An average silo does 2 steps of 32 samples; 8 is the strategy's floor."""
    sizing = Sizing(LocalWork(2, 32, 0.1), balancer=PROPORTIONAL, floor=8)
    work = sizing.plan({"a": silo(310), "b": silo(310), "c": silo(310), "d": last}, {})["d"]
    assert (work.batch_size, work.steps) == expected
    alone = Plan(Sizing(LocalWork(2, 32, 0.1)), {"d": last}, {})["d"]
    assert (alone.batch_size, alone.steps) == (min(32, last.facts.examples), expected[1])


def test_no_barrier_asks_for_fewer_steps_than_an_owner_allows() -> None:
    """Of steps of 8, 18 samples are 3, and the barrier says 1; of 4 that the silo would do."""

    def one_step(view: ClusterView) -> Verdict:
        return Verdict(release=view.idle, steps=dict.fromkeys(view.idle, 1))

    facts = {"a": SiloFacts(1000, least_samples=18), "b": SiloFacts(1000)}
    coordinator, _ = begin(sizing=Sizing(LocalWork(4, 8, 0.1)), barrier=Scripted([one_step, one_step]))
    entry = coordinator.handle([SiloJoined(0.0, name, each) for name, each in facts.items()], 0.0)
    assert {action.silo: action.order.max_steps for action in entry.actions if isinstance(action, Dispatch)} == {
        "a": 3,
        "b": 1,
    }


def test_steps_are_not_capped_by_data_or_memory() -> None:
    """Steps of 10 at 300 a second and of 32 at 200: 30 and 6.25 a second share 40 as 33.1 and 6.9."""
    work = plan([silo(300, examples=10), silo(200)], balancer=PROPORTIONAL, scale=Scale.STEPS)
    assert [(w.steps, w.batch_size) for w in work] == [(33, 10), (7, 32)]


EQUALISING = EqualisingBalancer()


def test_whole_orders_are_equalised_overhead_included() -> None:
    """Of 64: 20 steps of x samples at 100 a second and 4 s; 4 + 0.2 x = 0.2 (64 - x): x = 22."""
    silos = [silo(Curve(100.0, overhead_s=4.0)), silo(100)]
    assert batches(silos, balancer=EQUALISING) == [22, 42]
    assert batches(silos, balancer=PROPORTIONAL) == [32, 32], "which looks at speeds alone"


@pytest.mark.parametrize("balancer", [PROPORTIONAL, EQUALISING])
def test_a_little_time_beside_a_long_overhead_is_not_balanced(balancer: Any) -> None:
    """20 steps of 32 samples took 30 and 70 ms beside 5 s: balance would save 0.5 % of a round, and cost 6 % of the
    rounds. Nearly equal sizes cost almost none."""
    silos = [silo(Curve(640 / 0.03, overhead_s=5.0)), silo(Curve(640 / 0.07, overhead_s=5.1))]
    sizing: dict[str, Any] = {"balancer": balancer, "noise": 0.3}
    assert batches(silos, **sizing) == pytest.approx([32, 32], abs=1)
    assert [w.steps for w in plan(silos, scale=Scale.STEPS, **sizing)] == pytest.approx([20, 20], abs=1)
    capped = batches([*silos, silo(640 / 0.03, examples=20)], **sizing)
    assert capped == pytest.approx([38, 38, 20], abs=3) and capped[2] == 20, "nearly equal, within caps"


@pytest.mark.parametrize("balancer", [PROPORTIONAL, EQUALISING])
@pytest.mark.parametrize("noise", [0.1, 0.3])
@pytest.mark.parametrize("overhead_s", [0.0, 0.5, 5.0, 50.0])
def test_sizes_promise_the_least_time_to_a_target(balancer: Any, noise: float, overhead_s: float) -> None:
    """Three silos share 96 samples. All sizes whose round is at most 8 % longer than the shortest are tried here."""
    speeds = np.array([1280.0, 640.0, 160.0])

    def round_s(sizes: Any) -> Any:
        return overhead_s + (20 * sizes / speeds).max(axis=-1)

    def target_s(sizes: Any) -> Any:
        return round_s(sizes) * (1 + noise * ((32 / sizes).mean(axis=-1) - 1))

    pairs = np.array([(a, b, 96 - a - b) for a in range(1, 95) for b in range(1, 96 - a)])
    allowed = pairs[round_s(pairs) <= 1.08 * round_s(pairs).min()]
    silos = [silo(Curve(float(speed), overhead_s=overhead_s)) for speed in speeds]
    found = np.array(batches(silos, balancer=balancer, noise=noise))
    assert target_s(found) <= 1.015 * target_s(allowed).min()
    if overhead_s == 0:
        assert found.tolist() == batches(silos, balancer=balancer), "the balancer's"


def test_steps_are_equalised_overhead_included() -> None:
    """Of 40 steps of 32 samples at 100 a second: 3.2 + 0.32 k = 0.32 (40 - k): k = 15."""
    silos = [silo(Curve(100.0, overhead_s=3.2)), silo(100)]
    work = plan(silos, balancer=EQUALISING, scale=Scale.STEPS)
    assert [(w.steps, w.batch_size) for w in work] == [(15, 32), (25, 32)]


def test_a_silo_nobody_has_measured_counts_as_the_median_in_every_part_of_its_curve() -> None:
    """Median of each part: 200 a second, 0.5 s a step, 40 samples, 4 s an order: it gets what a silo like it gets."""
    curves = [Curve(100.0, 0.5, 10, 9.0), Curve(200.0, 0.25, 40, 4.0), Curve(300.0, 0.75, 80, 2.0)]
    known = [silo(curve) for curve in curves]
    usual = silo(Curve(200.0, 0.5, 40, 4.0))
    assert batches([*known, silo()], balancer=EQUALISING) == batches([*known, usual], balancer=EQUALISING)


@dataclass
class Counting:
    """Shares equally and counts how often it is asked."""

    calls: list[int] = field(default_factory=list)

    def plan(self, curves: Sequence[Curve], total: int, bounds: Bounds) -> NDArray[np.int64]:
        self.calls.append(len(curves))
        return PROPORTIONAL.plan([Curve(1.0)] * len(curves), total, bounds)


def test_without_a_balancer_a_plan_looks_at_one_silo_at_a_time() -> None:
    """The other one has no facts that could be read; whoever goes through all of them notices."""
    broken: Any = None
    work = Plan(Sizing(WORK), {"a": silo(300, examples=10), "b": broken}, {})
    assert work["a"] == LocalWork(20, 10, 0.1)
    with pytest.raises(AttributeError):
        list(work)


def look(view: ClusterView) -> Verdict:
    """Release whoever is idle, if the barrier may look at the work of all without being asked to."""
    assert {name: view.work[name].batch_size for name in view.silos} == dict.fromkeys(view.silos, 8)
    return Verdict(release=view.idle)


def test_a_view_shows_the_work_that_a_release_would_give() -> None:
    balancer = Counting()
    _, first = begin("a", "b", sizing=Sizing(LocalWork(4, 8, 0.1), balancer), barrier=Scripted([look]))
    assert {name: order.batch_size for name, order in first.items()} == {"a": 8, "b": 8}
    assert balancer.calls == [2], "what the barrier saw is what was sent"


def test_the_work_in_a_view_is_worked_out_anew_once_a_silo_has_gone() -> None:
    balancer = Counting()
    barrier = Scripted([look, look])
    coordinator, _ = begin("a", "b", sizing=Sizing(LocalWork(4, 8, 0.1), balancer), barrier=barrier)
    coordinator.handle([SiloLost(1.0, "b", "gone")], 1.0)
    assert balancer.calls == [2, 1]


# An adaptive balancer is asked once a round.

SEARCH = LeaderStraggler(fast=MovePace(5, 1), fine=MovePace(1, 2))
ADAPTIVE = Sizing(LocalWork(4, 8, 0.1), adaptive=SEARCH)


def report(memory: float | None = None) -> WorkReport:
    windows = (Window(1.0, 0.5, 0.1), Window(1.0, 0.5, memory)) if memory is not None else ()
    return WorkReport(base_version=0, steps=1, samples=8, compute_s=1.0, loss=0.0, windows=windows)


def test_an_adaptation_is_asked_once_for_each_version_that_somebody_is_released_from() -> None:
    silos = {"a": silo(), "b": silo()}
    adaptation, actions = Adaptation(ADAPTIVE), list[Action]()
    assert adaptation.advance(0, silos, {}, actions)
    assert not adaptation.advance(0, silos, {}, actions), "it is the same round"
    adaptation.observe("a", report(), seconds=1.0)
    adaptation.observe("b", report(), seconds=2.0)
    assert not adaptation.advance(0, silos, {}, actions)
    assert adaptation.advance(1, silos, {}, actions)
    assert {name: work.batch_size for name, work in adaptation.plan(silos, {}).items()} == {"a": 13, "b": 3}
    assert actions == []
    adaptation.advance(2, silos, {}, actions)
    assert adaptation.state.rounds == ({"a": 1.0, "b": 2.0},), "what a round took is forgotten after it"


def test_a_silo_whose_memory_was_full_in_any_window_is_given_no_more() -> None:
    silos = {"a": silo(), "b": silo(), "c": silo()}
    adaptation = Adaptation(ADAPTIVE)
    adaptation.advance(0, silos, {}, [])
    for name, seconds, memory in [("a", 1.0, 0.96), ("b", 2.0, 0.5), ("c", 3.0, None)]:
        adaptation.observe(name, report(memory), seconds)
    adaptation.advance(1, silos, {}, [])
    assert {name: work.batch_size for name, work in adaptation.plan(silos, {}).items()} == {"a": 8, "b": 13, "c": 3}


def test_what_the_user_ought_to_know_becomes_an_action() -> None:
    silos = {"a": silo(), "b": silo()}
    adaptation, actions = Adaptation(ADAPTIVE), list[Action]()
    for version in range(3):
        adaptation.advance(version, silos, {}, actions)
        adaptation.observe("a", report(), seconds=1.0)
        adaptation.observe("b", report(), seconds=2.0)
    assert actions == [Note("b is the slowest, and its 3 samples a step cannot be 5 fewer: leave it out")]


def test_a_newcomer_in_mid_round_gets_the_mean_and_does_not_begin_a_round() -> None:
    anyone = Scripted([lambda view: Verdict(release=view.idle)] * 2)
    coordinator, _ = begin("a", "b", sizing=ADAPTIVE, barrier=anyone)
    entry = coordinator.handle(joined("c", at_s=0.5), 0.5)
    assert {name: order.batch_size for name, order in orders(entry).items()} == {"c": 8}
    assert of_type(entry, Note) == []


@pytest.mark.slow
@pytest.mark.parametrize("scale", [Scale.BATCH, Scale.STEPS])
@pytest.mark.parametrize("balancer", [PROPORTIONAL, EqualisingBalancer()], ids=["proportional", "equalise"])
@given(speeds=st.lists(st.floats(1, 1e4), min_size=2, max_size=6))
def test_work_stays_comparable_where_masks_want_that(scale: Scale, balancer: Any, speeds: list[float]) -> None:
    work = plan([silo(speed) for speed in speeds], balancer=balancer, scale=scale, within=4.0)
    amounts = [each.steps * each.batch_size for each in work]
    assert max(amounts) <= 4 * min(amounts)
    assert sum(amounts) == 20 * 32 * len(speeds)


def test_a_slow_silo_gets_a_quarter_and_no_less() -> None:
    """Of 128 samples 12.4, 12.4, 12.4 and 90.8 would be even. The fast one has four times as many at most."""
    assert batches([silo(30), silo(30), silo(30), silo(220)], balancer=PROPORTIONAL, within=4.0) == [19, 19, 18, 72]
    assert batches([silo(100), silo(300)], balancer=PROPORTIONAL, within=4.0) == [16, 48]


@pytest.mark.parametrize("sizes", [[64, 64], [32.0, 32.0], [64, 0], [-1, 65], [64], None])
def test_a_balancer_of_the_users_own_keeps_the_total_and_the_bounds(sizes: Any) -> None:
    class Own:
        def plan(self, curves: object, total: int, bounds: Bounds) -> Any:
            return None if sizes is None else np.array(sizes)

    with pytest.raises(PolicyError, match="must give 2 whole numbers within its bounds, with the sum 64"):
        plan([silo(1.0), silo(2.0)], balancer=Own())
