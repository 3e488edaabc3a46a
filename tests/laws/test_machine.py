"""Every barrier under a coordinator that is told whatever a driver can tell it, in any order and at any time."""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from fedsync.core import coordinator
from fedsync.core.events import (
    Evaluated,
    Event,
    Progressed,
    SiloJoined,
    SiloLost,
    Spare,
    TimerFired,
    UpdateArrived,
    WorkFailed,
)
from fedsync.core.orders import Evaluation, SiloFacts, UpdateMeta, Window, WorkOrder, WorkReport
from fedsync.core.protocols import AnyBarrier
from fedsync.core.state import CoordinatorState, Policies
from fedsync.core.views import ClusterView, Verdict
from tests.laws.calm import SERVED, calm
from tests.laws.kinds import cases, name_of
from tests.laws.script import told
from tests.laws.watch import LAWS, Case, Change, Watch, unchanged

NAMES = ["a", "b", "c", "d"]

names = st.sampled_from(NAMES)
picks = st.integers(0, 30)
pauses = st.sampled_from([0.0, 0.0, 0.25, 1.0, 0.01, 7.0, 60.0])
held = st.sampled_from([False, False, False, True])
"""Whether what happens next is seen together with this."""

facts = st.builds(
    SiloFacts,
    examples=st.sampled_from([5000, 1, 7, 50, 10**6]),
    memory_samples=st.sampled_from([None, None, 1, 30, 10**6]),
    declared_speed=st.sampled_from([100.0, 1.0, 30.0, 1000.0]),
)
evaluations = st.sampled_from(
    [Evaluation(100.0, 25.0, 50), None, Evaluation(1.0, 1.0, 1), Evaluation(0.0, 0.0, 0), Evaluation(math.nan, 1.0, 5)]
)
NONSENSE: list[dict[str, Any]] = [
    *({"samples": 0}, {"samples": 10**9}, {"steps": 0}, {"steps": 10**6}, {"base_version": -1}, {"base_version": 99}),
    *({"loss": math.nan}, {"loss": math.inf}, {"compute_s": 0.0}, {"compute_s": math.nan}, {"compute_s": 1e-12}),
    *({"windows": (Window(1e12, 0.5, 0.5),)}, {"overhead_s": {"load": -1.0}}, {"batch_cap": 0}),
]
Trouble = Callable[["Driver", str, WorkOrder], Event]


def failing(late: bool) -> Trouble:
    """A failure, of the order before if it is late."""
    return lambda at, name, order: WorkFailed(
        at.now_s, name, f"{name}/{order.round - 1}" if late else order.update_id, "disk full"
    )


def lying(changed: dict[str, Any]) -> Trouble:
    return lambda at, name, order: at.arrival(name, order, **changed)


def telling(steps: int, late: bool = False) -> Trouble:
    """How far a silo is, perhaps in the order before."""
    return lambda at, name, order: Progressed(
        at.now_s, name, f"{name}/{order.round - 1}" if late else order.update_id, steps, steps
    )


TROUBLES = [failing(late=False), failing(late=True), *map(telling, [1, 2, 3, 0, -1, 10**9]), telling(2, late=True)]
troubles = st.sampled_from(TROUBLES) | st.sampled_from(NONSENSE).map(lying)


class Driver(RuleBasedStateMachine):
    """Tells a coordinator what may happen; afterwards, in the calm, everybody has to be served.

    Args:
        case: the policies.
        change: of them.
    """

    def __init__(self, case: Case, change: Change) -> None:
        super().__init__()
        self.watch = Watch(case, change)
        self.now_s = 0.0
        self.batch: list[Event] = []

    def told(self, event: Event, hold: bool) -> None:
        self.batch.append(event)
        if not hold:
            self.seen()

    def seen(self) -> None:
        batch, self.batch = self.batch, []
        self.watch.step(self.now_s, batch)

    def busy(self, pick: int) -> tuple[str, WorkOrder] | None:
        orders = [(name, silo.order) for name, silo in self.watch.books.silos.items() if silo.order is not None]
        return orders[pick % len(orders)] if orders else None

    def arrival(
        self, name: str, order: WorkOrder, steps: int = 1, speed: float = 100.0, **changed: Any
    ) -> UpdateArrived:
        """A good report, but for what is ``changed``."""
        samples = steps * order.batch_size
        report = replace(
            WorkReport(order.base_version, steps, samples, samples / speed, 1.0 / order.round),
            **{"evaluation": Evaluation(100.0, 25.0, 50), **changed},
        )
        silo = self.watch.books.silos.get(name)
        examples = silo.facts.examples if silo is not None else 1
        return UpdateArrived(self.now_s, UpdateMeta.of(name, order, report, examples, 40), report)

    @initialize(silos=st.lists(facts, min_size=1, max_size=len(NAMES)))
    def begin(self, silos: list[SiloFacts]) -> None:
        for name, each in zip(NAMES, silos, strict=False):
            self.batch.append(SiloJoined(self.now_s, name, each))
        self.seen()

    @rule(name=names, facts=facts, how=st.sampled_from(["join", "lose", "join, unusable"]), hold=held)
    def come_or_go(self, name: str, facts: SiloFacts, how: str, hold: bool) -> None:
        if how == "lose":
            self.told(SiloLost(self.now_s, name, "gone"), hold)
        else:
            said = facts if how == "join" else replace(facts, examples=0)
            self.told(SiloJoined(self.now_s, name, said), hold)

    @precondition(lambda self: self.busy(0))
    @rule(
        picks=st.lists(picks, min_size=1, max_size=5),
        after_s=pauses,
        share=st.sampled_from([1.0, 0.5, 0.01]),
        speed=st.sampled_from([100.0, 10.0, 1e5, 1.0]),
        evaluation=evaluations,
        cap=st.sampled_from([None, None, None, None, 3]),
        together=held,
        hold=held,
    )
    def finish(
        self,
        picks: list[int],
        after_s: float,
        share: float,
        speed: float,
        evaluation: Evaluation | None,
        cap: int | None,
        together: bool,
        hold: bool,
    ) -> None:
        """Some silos finish, one after the other or at once; a silo may do so twice, with new orders or the same."""
        for number, pick in enumerate(picks, start=1):
            found = self.busy(pick)
            if found is None:
                return
            name, order = found
            self.now_s += after_s
            steps = max(1, round(share * min(order.max_steps, 500)))
            event = self.arrival(name, order, steps, speed, evaluation=evaluation, batch_cap=cap)
            self.told(event, together and (hold or number < len(picks)))

    @precondition(lambda self: self.busy(0))
    @rule(pick=picks, what=troubles, hold=held)
    def trouble(self, pick: int, what: Trouble, hold: bool) -> None:
        """Of an order in work: it fails, or its report makes no sense, or somebody tells of another order."""
        name, order = self.busy(pick) or ("", None)
        assert order is not None
        self.told(what(self, name, order), hold)

    @precondition(lambda self: self.watch.books.orders)
    @rule(pick=picks, hold=held)
    def repeat(self, pick: int, hold: bool) -> None:
        """A report of any order there ever was: late, or a duplicate."""
        orders = list(self.watch.books.orders.values())
        self.told(self.arrival(*orders[pick % len(orders)]), hold)

    @precondition(lambda self: self.watch.books.closing)
    @rule(name=names, back=st.integers(0, 1), evaluation=evaluations)
    def evaluated(self, name: str, back: int, evaluation: Evaluation | None) -> None:
        self.told(Evaluated(self.now_s, name, self.watch.books.version - back, evaluation), False)

    @rule(what=st.sampled_from(["alarm", "time", "spare", "checkpoint"]), after_s=pauses, epochs=st.integers(0, 20))
    def meanwhile(self, what: str, after_s: float, epochs: int) -> None:
        """Nothing happens that a silo would do."""
        if what == "checkpoint":
            self.watch.checkpoint()
        elif what == "spare":
            self.told(Spare(self.now_s, epochs), False)
        else:
            self.now_s = min(self.watch.alarms) if what == "alarm" and self.watch.alarms else self.now_s + after_s
            self.told(TimerFired(self.now_s), False)

    def teardown(self) -> None:
        """What was held is seen; then comes the calm."""
        if self.watch.broken is None:
            if self.batch:
                self.seen()
            calm(self.watch)


EVERY = cases()


LEAST = {
    "a barrier sees what happened": 25,
    "who is released gets work, and was idle": 8,
    "a restored coordinator goes on as the first would have": 2,
    SERVED: 1,
}
"""How often a law has to be put to the test in a run, in the mean."""


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY, ids=name_of)
def test_whatever_a_driver_may_tell(case: Case) -> None:
    runs = 8 if case[0] == "barrier" else 4
    before = LAWS.copy()
    explored(case, runs)
    tested = LAWS - before
    assert {name: tested[name] for name, least in LEAST.items() if tested[name] < runs * least} == {}


def explored(case: Case, runs: int, change: Change = unchanged) -> None:
    """Let hypothesis drive; a failure is told with the smallest script that leads to it.

    The script is made smaller, not what hypothesis drew: that takes a second instead of minutes.
    """
    drivers: list[Driver] = []

    @seed(zlib.crc32(name_of(case).encode()))
    def driver() -> Driver:
        drivers[:] = [Driver(case, change)]
        return drivers[0]

    quick = settings(
        max_examples=runs,
        stateful_step_count=40,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    try:
        run_state_machine_as_test(driver, settings=quick)
    except Exception as error:
        error.add_note(told(drivers[0].watch))
        raise


def test_a_failure_prints_a_script_that_can_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a coordinator that does not count failures: the printed lines show it again, and nothing once it is mended."""
    plain = coordinator.fail_order

    def forgetful(state: CoordinatorState, name: str, at_s: float, *, away: bool = False) -> None:
        plain(state, name, at_s, away=away)
        state.silos[name] = replace(state.silos[name], failures=0)

    with monkeypatch.context() as broken:
        broken.setattr(coordinator, "fail_order", forgetful)
        with pytest.raises(AssertionError) as caught:
            explored(("barrier", "ssp", {"staleness": 1}), runs=20)
        law, script = caught.value.__notes__[-1].split("; to see it again:\n")
        assert law == "broken: a barrier sees what happened"
        assert script.count("at_s") <= 8, "a silo joins, and its order fails: two steps, and few events"
        with pytest.raises(AssertionError) as again:
            exec(script, {})
        assert law in again.value.__notes__
    exec(script, {})


def starving(policies: Policies) -> Policies:
    """As they are, but the silo ``a`` gets one order and never another."""
    return replace(policies, barrier=Starving(policies.barrier))


@dataclass(frozen=True)
class Starving:
    inner: AnyBarrier

    def init(self) -> Any:
        return self.inner.init()

    def decide(self, state: Any, view: ClusterView) -> tuple[Any, Verdict]:
        state, verdict = self.inner.decide(state, view)
        mine = view.silos.get("a")
        starves = mine is not None and mine.clock > 0
        return state, replace(verdict, release=tuple(name for name in verdict.release if name != "a" or not starves))


@pytest.mark.parametrize("kind", ["asp", "bsp", "a-bsp", "on-time"])
def test_the_machine_notices_a_silo_that_is_left_out_after_its_first_order(kind: str) -> None:
    """Both with others that go on for ever, and where all others wait for it."""
    with pytest.raises(AssertionError) as caught:
        explored(("barrier", kind, {}), runs=20, change=starving)
    law = caught.value.__notes__[-1].split(";")[0]
    assert law.split(": ")[1] in (SERVED, "somebody works, or an alarm is set")
