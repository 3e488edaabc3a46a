"""What changes with the time, the names of silos or the speed of everything, and what does not.

A journal is made once, its events are changed, and a new coordinator is told them: its actions have to be those of the
journal, changed likewise. Times are multiples of 2^-20 s, so that shifting and halving them is exact.
"""

import dataclasses
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from fedsync.core.actions import Action, Attested, Dispatch, Evaluate, Note, Stop, WakeAt
from fedsync.core.coordinator import Coordinator
from fedsync.core.events import Event, SiloJoined, UpdateArrived
from fedsync.core.journal import JournalEntry
from fedsync.core.state import Policies
from fedsync.policies.balance.without_forecast import SpendEvenly
from fedsync.policies.barrier.kinds.fsp import WaitFor
from fedsync.policies.barrier.kinds.sampled import Sampled
from fedsync.policies.barrier.wrappers.fraction import Fraction
from fedsync.policies.schema import Settings
from tests.laws.corners import corners
from tests.laws.fake_cluster import FakeCluster
from tests.laws.kinds import cases, configuration, name_of
from tests.laws.watch import Case, law

STOP: dict[str, Any] = {"seconds": 12.0}
TICK_S = 2.0**-20
LATER_S = 4096.0
CORNERS = ("quiet", "chaos")

SECTIONS = ("predictor", "balancer", "barrier", "aggregation")
EVERY = cases()


NAMES_COUNT: dict[type[Settings], Callable[[Any], bool]] = {
    Sampled: lambda policy: policy.sample_size > 0,
    WaitFor: lambda policy: True,
    Fraction: lambda policy: policy.share < 1,
    SpendEvenly: lambda policy: True,
}
"""Conditions under which a policy's actions depend on the names of silos, because it draws or has budgets by name."""


def within(value: object) -> Iterator[Settings]:
    """A policy and all policies in its settings."""
    if isinstance(value, Settings):
        yield value
        for field in dataclasses.fields(value):  # type: ignore[arg-type]
            yield from within(getattr(value, field.name))
    elif isinstance(value, tuple):
        for each in value:
            yield from within(each)


def settings_of(case: Case) -> list[Settings]:
    config = configuration(case, STOP)
    return [each for section in SECTIONS for each in within(getattr(config, section))]


def symmetric(case: Case) -> bool:
    """Whether permuting silos permutes the actions; ties may follow the order of joining."""
    return not any(NAMES_COUNT.get(type(each), lambda policy: False)(each) for each in settings_of(case))


def scale_free(case: Case) -> bool:
    """Whether no setting is in seconds (``*_s``), or all of these are 0."""
    fields = ((each, field.name) for each in settings_of(case) for field in dataclasses.fields(each))  # type: ignore[arg-type]
    return not any(name.endswith("_s") and getattr(each, name) for each, name in fields)


def policies_in(case: Case, seconds: float = STOP["seconds"]) -> Policies:
    """The case's policies; the barrier without the wrapper whose rests have a length in seconds."""
    config = configuration(case, {"seconds": seconds})
    return replace(config.policies(), barrier=config.barrier)


@cache
def journal(case: int, corner: str) -> list[JournalEntry]:
    scenario = replace(corners(seed=case)[corner].scenario, poll_s=TICK_S)
    return FakeCluster(Coordinator(policies_in(EVERY[case])), scenario).run().entries


@pytest.fixture(autouse=True, scope="module")
def _nothing_stays() -> Iterator[None]:
    """Whoever collects garbage in this process later does not look at journals."""
    yield
    journal.cache_clear()


@dataclass(frozen=True)
class Change:
    """What is done to a journal.

    Args:
        event: an event, changed.
        at_s: a time, changed.
        action: an action, changed.
    """

    event: Callable[[Event], Event]
    at_s: Callable[[float], float]
    action: Callable[[Action], Action]


def later() -> Change:
    return Change(
        event=lambda event: replace(event, at_s=event.at_s + LATER_S),
        at_s=lambda at_s: at_s + LATER_S,
        action=lambda action: replace(action, at_s=action.at_s + LATER_S) if isinstance(action, WakeAt) else action,
    )


def faster() -> Change:
    """Everything twice as fast."""

    def event(each: Event) -> Event:
        each = replace(each, at_s=each.at_s / 2)
        if isinstance(each, SiloJoined) and each.facts.declared_speed is not None:
            return replace(each, facts=replace(each.facts, declared_speed=2 * each.facts.declared_speed))
        if isinstance(each, UpdateArrived):
            report = each.report
            return replace(
                each,
                report=replace(
                    report,
                    compute_s=report.compute_s / 2,
                    overhead_s={kind: seconds / 2 for kind, seconds in report.overhead_s.items()},
                    windows=tuple(replace(window, speed=2 * window.speed) for window in report.windows),
                ),
            )
        return each

    def action(each: Action) -> Action:
        if isinstance(each, WakeAt):
            return WakeAt(each.at_s / 2)
        if isinstance(each, Dispatch) and each.order.budget_s is not None:
            return replace(each, order=replace(each.order, budget_s=each.order.budget_s / 2))
        return each

    return Change(event, lambda at_s: at_s / 2, action)


def permuted(names: list[str]) -> Change:
    """Each silo has the name of the next."""
    other = dict(zip(names, [*names[1:], names[0]], strict=True))

    def renamed(value: Any) -> Any:
        """All names of silos and updates inside."""
        if isinstance(value, str):
            name, slash, serial = value.partition("/")
            return other.get(name, name) + slash + serial if (slash and serial.isdigit()) or name in other else value
        if isinstance(value, tuple):
            return tuple(map(renamed, value))
        if isinstance(value, dict):
            return {renamed(key): each for key, each in value.items()}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: renamed(getattr(value, field.name)) for field in dataclasses.fields(value)}
            return replace(value, **fields)
        return value

    return Change(renamed, lambda at_s: at_s, renamed)


SILENT = ("seed", "reason", "text")
"""Fields that may differ: seeds are drawn by name, and what is for people has times and names in it."""


def same(one: Any, other: Any) -> bool:
    """Whether two actions are the same but for rounding and what is `SILENT`."""
    if isinstance(one, float) or isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)
    if dataclasses.is_dataclass(one):
        named = [field.name for field in dataclasses.fields(one) if field.name not in SILENT]
        return type(one) is type(other) and all(same(getattr(one, name), getattr(other, name)) for name in named)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def sorted_actions(actions: tuple[Action, ...]) -> list[Action]:
    """Those that decide anything, in an order that permuted names do not change."""

    def key(action: Any) -> tuple[str, str, float]:
        name = getattr(action, "silo", "") or getattr(action, "update_id", "")
        return type(action).__name__, name, getattr(action, "at_s", 0.0)

    plain = [replace(each, silos=tuple(sorted(each.silos))) if isinstance(each, Evaluate) else each for each in actions]
    plain = [each for each in plain if not isinstance(each, Note | Attested | Stop)]
    return sorted(plain, key=key)


def follows(case: int, corner: str, change: Change) -> Counter[str]:
    """Tell a new coordinator the changed journal; how many actions of each type were as they had to be.

    Raises:
        AssertionError: one was not.
    """
    coordinator = Coordinator(policies_in(EVERY[case], change.at_s(STOP["seconds"]) - change.at_s(0.0)))
    told: Counter[str] = Counter()
    for number, entry in enumerate(journal(case, corner)):
        events = [change.event(event) for event in entry.events]
        found = sorted_actions(coordinator.handle(events, change.at_s(entry.at_s)).actions)
        wanted = sorted_actions(tuple(map(change.action, entry.actions)))
        assert len(found) == len(wanted) and all(map(same, found, wanted)), (
            f"{corner}, entry {number}: {found}, not {wanted}"
        )
        told.update(type(action).__name__ for action in found)
    return told


def kept(case: int, change: Change, broken: str) -> None:
    """In all runs, and often enough to mean something."""
    told: Counter[str] = Counter()
    for corner in CORNERS:
        with law(broken):
            told += follows(case, corner, change)
    assert told["Dispatch"] >= 25, f"put to the test too seldom: {told}"
    assert told["Commit"] >= 8, f"put to the test too seldom: {told}"


every_case = pytest.mark.parametrize("case", range(len(EVERY)), ids=map(name_of, EVERY))


@pytest.mark.slow
@every_case
def test_what_happens_later_is_decided_later(case: int) -> None:
    kept(case, later(), "time shifted by a constant shifts the actions")


@pytest.mark.slow
@every_case
def test_permuted_silos_permute_the_actions_of_what_is_symmetric(case: int) -> None:
    """Policies outside the claim must break the law; otherwise the claim is too narrow."""
    names = [silo.name for silo in corners(seed=case)["chaos"].scenario.silos]
    if symmetric(EVERY[case]):
        kept(case, permuted(names), "permuted silos permute the actions")
    else:
        with pytest.raises(AssertionError, match="entry"):
            kept(case, permuted(names), "")


@pytest.mark.slow
@every_case
def test_twice_the_speed_halves_the_times_of_what_is_scale_free(case: int) -> None:
    """Policies outside the claim must break the law; otherwise the claim is too narrow."""
    if scale_free(EVERY[case]):
        kept(case, faster(), "twice all speeds and half of all seconds halve the times")
    else:
        with pytest.raises(AssertionError, match="entry"):
            kept(case, faster(), "")


CLOCKS = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time")


@pytest.mark.slow
@every_case
def test_two_runs_in_one_process_know_nothing_of_each_other_nor_of_the_world(
    case: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told in turns, two coordinators decide as each did alone, read no clock and draw no global random number."""
    entries = [journal(case, corner) for corner in CORNERS]
    coordinators = [Coordinator(policies_in(EVERY[case])) for _ in CORNERS]
    luck, numpy_luck = random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[index,union-attr]
    with monkeypatch.context() as still:
        for clock in CLOCKS:
            still.setattr(time, clock, lambda: pytest.fail("a decision reads a clock"))
        found = [
            (coordinator.handle(entry.events, entry.at_s), entry)
            for turn in itertools.zip_longest(*entries)
            for coordinator, entry in zip(coordinators, turn, strict=True)
            if entry is not None
        ]
    with law("a decision depends on the run's events alone"):
        assert [one for one, _ in found] == [other for _, other in found]
    assert random.getstate() == luck
    assert np.random.get_state()[1].tobytes() == numpy_luck  # type: ignore[index,union-attr]
