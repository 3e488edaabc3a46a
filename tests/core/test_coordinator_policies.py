"""What the coordinator does with the answers of policies, and what it does when they break their contract."""

from dataclasses import dataclass, field

import pytest

from fedsync.common.errors import ConfigError, PolicyError
from fedsync.core.actions import Commit, Discard, Dispatch, Note, Rollback, Savepoint, WakeAt
from fedsync.core.coordinator import Coordinator
from fedsync.core.events import TimerFired
from fedsync.core.orders import Window
from fedsync.core.protocols import MachineLoad, SpeedSample
from fedsync.core.speed.sizing import Sizing
from fedsync.core.stopping import StopRules
from fedsync.core.views import ClusterView, Verdict
from fedsync.policies.balance.by_forecast import ProportionalBalancer
from tests.core.make import WORK, Scripted, answer, begin, joined, of_type, orders, policies

BALANCED = Sizing(WORK, ProportionalBalancer())  # 8 samples a silo on average


def release_idle(view: ClusterView) -> Verdict:
    return Verdict(release=view.idle)


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


def test_a_batch_cap_that_a_silo_ran_into_is_kept_at_its_lowest() -> None:
    coordinator, work = begin("a", "b", stop=StopRules(rounds=9))
    for cap, expected in [(6, 6), (7, 6), (5, 5), (None, 5)]:
        entry = coordinator.handle([answer("a", work["a"], batch_cap=cap), answer("b", work["b"])], 1.0)
        work = orders(entry)
        assert (work["a"].batch_size, work["b"].batch_size) == (expected, 8)


@dataclass(frozen=True)
class Forecasting:
    """A predictor that forecasts one number, and keeps what it was shown."""

    number: float | None
    seen: list[SpeedSample] = field(default_factory=list)
    learns: bool = False

    def init(self) -> None:
        return None

    def observe(self, state: None, sample: SpeedSample) -> None:
        self.seen.append(sample)

    def forecast(self, state: None, drivers: MachineLoad | None = None) -> float | None:
        return self.number


def test_the_predictor_sees_speed_and_the_means_of_the_resources() -> None:
    predictor = Forecasting(None)
    coordinator, first = begin("a", "b", predictor=predictor)
    windows = (Window(90.0, cpu=0.25, memory=0.5), Window(110.0, cpu=0.75, memory=1.0))
    silent = answer("b", first["b"], windows=(Window(100.0),))  # does not tell of its machine
    coordinator.handle([answer("a", first["a"], compute_s=0.5, windows=windows), silent], 1.0)
    assert predictor.seen == [SpeedSample(32 / 0.5, cpu=0.5, memory=0.75), SpeedSample(100.0, cpu=None, memory=None)]


# Broken contracts.


@pytest.mark.parametrize("number", [0.0, -1.0, float("nan"), float("inf")])
def test_a_forecast_that_is_not_positive_and_finite_is_our_bug(number: float) -> None:
    coordinator, first = begin("a", predictor=Forecasting(number))
    with pytest.raises(PolicyError, match=r"predictor forecasts.*'a'"):
        coordinator.handle([answer("a", first["a"])], 1.0)


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
