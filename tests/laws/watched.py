"""A run of one case in one corner, and what was seen of it."""

import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from zlib import crc32

import pytest

from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Dispatch
from fedsync.core.coordinator import Coordinator
from fedsync.core.journal import JournalEntry
from fedsync.core.orders import LocalWork
from fedsync.core.protocols import AnyBarrier
from fedsync.core.state import Policies
from fedsync.core.views import ClusterView, Verdict
from fedsync.observe.ledger import Ledger
from tests.laws.corners import Corner, applies, corners
from tests.laws.fake_cluster import FakeCluster, Outcome
from tests.laws.kinds import COMBINED, FURTHER, cases, configuration, name_of
from tests.laws.scenario import Scenario

CASES = cases()
NAMES = [*map(name_of, CASES)]


@dataclass(frozen=True, slots=True)
class Decision:
    """One answer of a barrier.

    Args:
        verdict: what it said.
        work: what a silo would have been given just then, by name; None where nobody was released.
    """

    verdict: Verdict
    work: Mapping[str, LocalWork] | None


@dataclass(slots=True)
class Spy:
    """A barrier that says what ``inner`` says, and keeps it."""

    inner: AnyBarrier
    decisions: list[Decision]

    def init(self) -> Any:
        return self.inner.init()

    def decide(self, state: Any, view: ClusterView) -> tuple[Any, Verdict]:
        state, verdict = self.inner.decide(state, view)
        self.decisions.append(Decision(verdict, dict(view.work) if verdict.release else None))
        return state, verdict


@dataclass(frozen=True, slots=True)
class StateSize:
    """Bytes of a coordinator's state by name, once ``entries`` entries were written and ``silos`` were here."""

    entries: int
    silos: int
    bytes: Mapping[str, int]


@dataclass(frozen=True)
class Run:
    """A finished run.

    Args:
        config: the strategy.
        corner: what happened.
        policies: what decided.
        outcome: what came of it.
        decisions: the barrier's answers, for each entry.
        sizes: of the state, now and then.
    """

    config: StrategyConfig
    corner: Corner
    policies: Policies
    outcome: Outcome
    decisions: list[tuple[Decision, ...]]
    sizes: list[StateSize]

    @property
    def clock_end_s(self) -> float:
        """When the clock ends the run, counted from the first order; infinite without such a rule."""
        seconds = self.policies.stop.seconds
        begun = (entry.at_s for entry in self.entries if any(isinstance(a, Dispatch) for a in entry.actions))
        return math.inf if seconds is None else next(begun) + seconds

    @property
    def entries(self) -> list[JournalEntry]:
        return self.outcome.entries

    @property
    def scenario(self) -> Scenario:
        return self.corner.scenario

    @cached_property
    def books(self) -> Ledger:
        ledger = Ledger(model_bytes=100)
        for entry in self.entries:
            ledger.add(entry)
        return ledger

    def coordinator(self) -> Coordinator:
        """A new one with the same policies."""
        return Coordinator(self.policies)


def run(config: StrategyConfig, corner: Corner) -> Run:
    policies = config.policies()
    spy = Spy(policies.barrier, [])
    coordinator = Coordinator(replace(policies, barrier=spy))
    decisions: list[tuple[Decision, ...]] = []
    sizes: list[StateSize] = []

    def watch(entry: JournalEntry) -> None:
        decisions.append(tuple(spy.decisions))
        spy.decisions.clear()
        number = len(decisions)
        if number & (number - 1) == 0 and number >= 16:
            state = coordinator.state()
            measured = {name: len(pickle.dumps(value)) for name, value in state.items()}
            sizes.append(StateSize(number, len(state["silos.views"]), measured))

    outcome = FakeCluster(coordinator, corner.scenario, watch).run()
    return Run(config, corner, policies, outcome, decisions, sizes)


def configured(case: int) -> StrategyConfig:
    """A case, with any end."""
    return configuration(CASES[case], {"rounds": 1})


def cases_of(section: str, *, wraps: bool = False) -> pytest.MarkDecorator:
    """The cases of a section; of barriers those that are around others, or those that are not.

    Examples of barriers go through all corners, and of other kinds the first, the last and one in the middle. All
    others go through a fourth of them, and through all with ``make full``.
    """
    chosen = [
        case
        for case, (each, _, _) in enumerate(CASES)
        if each == section
        and wraps == (each == "barrier" and (barrier := configured(case).barrier) is not barrier.innermost)
    ]
    own = [case for case in chosen if CASES[case] not in FURTHER]
    whole = own if section == "barrier" else [own[0], own[len(own) // 2], own[-1]]
    every = [
        pytest.param(case, False, id=NAMES[case], marks=() if case in whole else pytest.mark.full) for case in chosen
    ]
    some = [
        pytest.param(case, True, id=f"{NAMES[case]}-some")
        for case in chosen
        if case not in whole and CASES[case] not in COMBINED
    ]
    return pytest.mark.parametrize(("case", "some"), every + some)


def runs(case: int, some: bool = False) -> dict[str, Run | Exception]:
    """The runs of a case by corner, all that apply to it or a fourth of them; or what kept one from being made.

    Each corner is in the fourth of every fourth case.
    """
    found: dict[str, Run | Exception] = {}
    for number, (name, corner) in enumerate(corners(crc32(NAMES[case].encode())).items()):
        if some and (number + case) % 4:
            continue
        config = configuration(CASES[case], dict(corner.stop), corner.min_silos)
        if applies(corner, config.policies(), config.barrier.innermost.needs_losses):
            try:
                found[name] = run(config, corner)
            except Exception as error:
                found[name] = error
    return found
