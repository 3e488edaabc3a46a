"""What the coordinator does with the answers of policies, and what it does when they break their contract."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError, PolicyError, ProtocolError
from fedsync.core.actions import Commit, Discard, Dispatch, HaltEarly, Note, Probe, Rollback, Savepoint, WakeAt
from fedsync.core.coordinator import Coordinator
from fedsync.core.events import TimerFired
from fedsync.core.orders import UpdateMeta, Window
from fedsync.core.protocols import Bounds, MachineLoad, SpeedSample
from fedsync.core.report_checks import MAX_SPEED
from fedsync.core.speed.curve import Curve
from fedsync.core.speed.sizing import Sizing
from fedsync.core.stopping import StopRules
from fedsync.core.views import ClusterView, Verdict
from fedsync.policies.aggregate.weighers import WeightedMean
from fedsync.policies.balance.by_forecast import ProportionalBalancer
from tests.core.make import WORK, Scripted, answer, begin, joined, of_type, orders, policies

BALANCED = Sizing(WORK, ProportionalBalancer())  # 8 samples a silo on average


def release_idle(view: ClusterView) -> Verdict:
    return Verdict(release=view.idle)


def test_budget_steps_and_overrun_become_part_of_the_order() -> None:
    verdicts = [lambda view: Verdict(release=view.idle, budget_s={"b": 2.5}, steps={"b": 9}, overrun=0.5)]
    _, first = begin("a", "b", barrier=Scripted(verdicts))
    assert [(o.budget_s, o.max_steps, o.overrun) for o in first.values()] == [(None, 4, 0.5), (2.5, 9, 0.5)]


def test_stop_now_and_probe_become_actions_on_the_order_in_work() -> None:
    barrier = Scripted([lambda view: Verdict(release=("a",)), lambda view: Verdict(stop_now=("a",), probe=("a",))])
    coordinator, _ = begin("a", "b", barrier=barrier)
    assert coordinator.handle([], 1.0).actions == (HaltEarly("a", "a/1"), Probe("a", "a/1"))


def test_a_verdict_is_carried_out_in_the_order_of_its_fields() -> None:
    """Back to the remembered model, then the commit on top of it, then remembered again; orders start from that."""
    barrier = Scripted(
        [
            release_idle,
            lambda view: Verdict(
                rollback=True, commit=("a/1",), discard=("b/1",), savepoint=True, release=("a",), reason="why"
            ),
        ]
    )
    coordinator, first = begin("a", "b", barrier=barrier)
    entry = coordinator.handle([answer(name, order) for name, order in first.items()], 1.0)
    order = orders(entry)["a"]
    assert entry.actions == (
        Rollback(1),
        Commit(2, {"a/1": 1.0}),
        Discard("b/1", "why"),
        Savepoint(2),
        Dispatch("a", order),
    )
    assert (order.base_version, coordinator.version) == (2, 2)


def test_a_wake_up_that_another_comes_before_is_not_asked_for() -> None:
    """At 4.5 s the barrier is asked anyway, and says then when the next is due."""
    wakes = iter([4.5, 6.0, 3.0, 4.0, 4.0])
    barrier = Scripted([lambda view: Verdict(wake_at_s=next(wakes))] * 5)
    coordinator = Coordinator(policies(barrier=barrier))
    said = [coordinator.handle(joined("a"), 0.0)]
    said += [coordinator.handle([TimerFired(now_s)], now_s) for now_s in (1.0, 2.0, 2.5, 3.0)]
    assert [of_type(entry, WakeAt) for entry in said] == [[WakeAt(4.5)], [], [WakeAt(3.0)], [], [WakeAt(4.0)]]


def test_weights_are_normalised_and_sorted_by_id() -> None:
    coordinator, first = begin("b", "a", weigher=WeightedMean("samples"))
    entry = coordinator.handle(
        [answer("b", first["b"], steps=3, samples=24), answer("a", first["a"], steps=1, samples=8)], 1.0
    )
    (commit,) = of_type(entry, Commit)
    assert list(commit.weights.items()) == [("a/1", 8 / 32), ("b/1", 24 / 32)]


def test_a_silo_that_comes_back_keeps_its_forecast() -> None:
    coordinator, first = begin("a", "b", sizing=BALANCED)
    coordinator.handle([answer("a", first["a"], compute_s=32 / 300)], 1.0)
    coordinator.handle(joined("a", at_s=2.0), 2.0)
    entry = coordinator.handle([answer("b", first["b"], compute_s=32 / 100)], 3.0)
    assert {name: order.batch_size for name, order in orders(entry).items()} == {"a": 12, "b": 4}


def test_declared_speeds_count_from_the_first_order_and_are_never_overruled() -> None:
    coordinator = Coordinator(policies(sizing=BALANCED, declared_speeds=True))
    events = [*joined("a", declared_speed=300.0), *joined("b", declared_speed=100.0)]
    first = orders(coordinator.handle(events, 0.0))
    assert [order.batch_size for order in first.values()] == [12, 4]
    entry = coordinator.handle([answer(name, order) for name, order in first.items()], 1.0)  # both measure 100
    assert [order.batch_size for order in orders(entry).values()] == [12, 4]


def test_declared_speeds_need_a_declaration() -> None:
    coordinator = Coordinator(policies(sizing=BALANCED, declared_speeds=True))
    with pytest.raises(ConfigError, match=r"balancer\.speeds.*'b' declares no speed"):
        coordinator.handle([*joined("a", declared_speed=3.0), *joined("b")], 0.0)


def test_a_silo_without_a_declaration_does_not_end_a_run_that_has_begun() -> None:
    coordinator = Coordinator(policies(sizing=BALANCED, declared_speeds=True))
    first = orders(coordinator.handle(joined("a", declared_speed=3.0), 0.0))
    entry = coordinator.handle(joined("b", at_s=1.0), 1.0)
    (note,) = of_type(entry, Note)
    assert note.text.startswith("b takes no part: ") and "declares no speed" in note.text
    entry = coordinator.handle([answer("a", first["a"], 2.0)], 2.0)
    assert list(orders(entry)) == ["a"]


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf"), 1e12])
def test_a_declared_speed_that_no_machine_has_is_not_balanced_on(speed: float) -> None:
    """Hostile input like a report's speed: it is refused by name or not used, but never reaches a balancer."""

    class Careful(ProportionalBalancer):
        def plan(self, curves: Sequence[Curve], total: int, bounds: Bounds) -> NDArray[np.int64]:
            assert all(0 < curve.speed <= MAX_SPEED for curve in curves)
            return super().plan(curves, total, bounds)

    coordinator = Coordinator(policies(sizing=Sizing(WORK, Careful()), declared_speeds=True))
    events = [*joined("liar", declared_speed=speed), *joined("honest", declared_speed=100.0)]
    try:
        entry = coordinator.handle(events, 0.0)
    except (ConfigError, ProtocolError) as error:
        assert "liar" in str(error)
    else:
        assert "honest" in orders(entry)


def test_a_batch_cap_that_a_silo_ran_into_is_kept_at_its_lowest() -> None:
    coordinator, work = begin("a", "b", stop=StopRules(rounds=9))
    for cap, expected in [(6, 6), (7, 6), (5, 5), (None, 5)]:
        entry = coordinator.handle([answer("a", work["a"], batch_cap=cap), answer("b", work["b"])], 1.0)
        work = orders(entry)
        assert (work["a"].batch_size, work["b"].batch_size) == (expected, 8)


@dataclass(frozen=True)
class Listening:
    """A predictor that keeps the samples it was shown."""

    learns: bool = False

    def init(self) -> tuple[SpeedSample, ...]:
        return ()

    def observe(self, state: tuple[SpeedSample, ...], sample: SpeedSample) -> tuple[SpeedSample, ...]:
        return (*state, sample)

    def forecast(self, state: tuple[SpeedSample, ...], drivers: MachineLoad | None = None) -> float | None:
        return None


def test_the_predictor_sees_speed_and_the_means_of_the_resources() -> None:
    seen: list[SpeedSample] = []

    class Watching(Listening):
        def observe(self, state: tuple[SpeedSample, ...], sample: SpeedSample) -> tuple[SpeedSample, ...]:
            seen.append(sample)
            return super().observe(state, sample)

    coordinator, first = begin("a", "b", predictor=Watching())
    windows = (Window(90.0, cpu=0.25, memory=0.5), Window(110.0, cpu=0.75, memory=1.0))
    silent = answer("b", first["b"], windows=(Window(100.0),))  # does not tell of its machine
    coordinator.handle([answer("a", first["a"], compute_s=0.5, windows=windows), silent], 1.0)
    assert seen == [SpeedSample(speed=32 / 0.5, cpu=0.5, memory=0.75), SpeedSample(speed=100.0, cpu=None, memory=None)]


# Broken contracts.


@dataclass(frozen=True)
class Constant:
    """Gives the same number as a coefficient and as a forecast."""

    number: float
    times: int = 1
    linear: bool = True
    toward: bool = False
    learns: bool = False

    def coefficients(self, metas: Sequence[UpdateMeta], version: int) -> list[float]:
        return [self.number] * self.times

    def init(self) -> None:
        return None

    def observe(self, state: None, sample: SpeedSample) -> None:
        return None

    def forecast(self, state: None, drivers: MachineLoad | None = None) -> float:
        return self.number


@pytest.mark.parametrize("number", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("role", "complaint"), [("weigher", "weigher gives 'a/1'"), ("predictor", r"predictor forecasts.*'a'")]
)
def test_a_weight_or_forecast_that_is_not_positive_and_finite_is_our_bug(
    role: str, complaint: str, number: float
) -> None:
    coordinator, first = begin("a", **{role: Constant(number)})
    with pytest.raises(PolicyError, match=complaint):
        coordinator.handle([answer("a", first["a"])], 1.0)


def test_coefficients_are_taken_as_they_are() -> None:
    """They need not sum to 1: that is the weigher's business."""
    coordinator, first = begin("a", "b", weigher=Constant(0.75, times=2, toward=True))
    entry = coordinator.handle([answer(name, order) for name, order in first.items()], 1.0)
    assert of_type(entry, Commit) == [Commit(1, {"a/1": 0.75, "b/1": 0.75}, toward=True)]


@pytest.mark.parametrize(
    ("verdict", "complaint"),
    [
        (Verdict(commit=("a/1",)), "commits 'a/1', which is not pending"),  # still at work
        (Verdict(commit=("b/1", "b/1")), "commits 'b/1', which is not pending"),  # twice
        (Verdict(release=("a",)), "releases 'a', which is not an idle silo"),
        (Verdict(release=("b", "b")), "releases 'b', which is not an idle silo"),
        (Verdict(release=("ghost",)), "releases 'ghost', which is not an idle silo"),
        (Verdict(stop_now=("ghost",)), "stops 'ghost', which is not at work"),
        (Verdict(stop_now=("b",)), "stops 'b', which is not at work"),
        (Verdict(probe=("ghost",)), "probes 'ghost', which is not at work"),
        (Verdict(discard=("a/1",)), "discards 'a/1', which is not pending"),
        (Verdict(commit=("b/1",), discard=("b/1",)), "discards 'b/1', which is not pending"),
    ],
)
def test_an_impossible_verdict_is_our_bug_and_says_what_came_before(verdict: Verdict, complaint: str) -> None:
    coordinator, first = begin("a", "b", barrier=Scripted([release_idle, lambda view: verdict]))
    with pytest.raises(PolicyError, match=complaint) as caught:
        coordinator.handle([answer("b", first["b"])], 1.0)
    assert len(caught.value.recent) == 1
    assert "SiloJoined" in str(caught.value)
