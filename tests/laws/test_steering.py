"""An operator's hand under every barrier: nothing is decided in a pause, and afterwards the run goes on and ends."""

import pickle

import pytest

from fedsync.core.actions import Commit, Dispatch, HaltEarly, Rollback
from fedsync.core.coordinator import Coordinator
from fedsync.core.events import OperatorAsked
from fedsync.core.journal import JournalEntry, replay
from fedsync.core.operator.operator_commands import (
    ChangeStop,
    ContinueRun,
    DropSilo,
    OperatorQuestion,
    PauseRun,
    ReadmitSilo,
)
from tests.laws.corners import corners
from tests.laws.fake_cluster import FakeCluster, Outcome
from tests.laws.kinds import COMBINED, VARIANTS, cases, name_of, policies_of
from tests.laws.watch import Case

VARIED = (*VARIANTS, *COMBINED)
BARRIERS = [
    pytest.param(case, marks=[pytest.mark.slow] * (case in VARIED), id=name_of(case))
    for case in cases()
    if case[0] == "barrier"
]
PAUSE_S, CONTINUE_S, DROP_S, READMIT_S, END_S = 4.0, 9.0, 11.0, 15.0, 24.0
OUT = "silo-4"
ASKED: dict[float, OperatorQuestion] = {
    PAUSE_S: PauseRun(),
    CONTINUE_S: ContinueRun(),
    DROP_S: DropSilo(OUT),
    DROP_S + 1: ChangeStop(seconds=END_S),
    READMIT_S: ReadmitSilo(OUT),
}


class Operator:
    """A cluster in which somebody asks for things."""

    def __init__(self, case: Case, corner: str) -> None:
        self.policies = policies_of(case, {"seconds": 400.0})
        self.restored: list[Coordinator] = []
        self._coordinator = Coordinator(self.policies)
        self.cluster = FakeCluster(self._coordinator, corners(5)[corner].scenario, self._compare)
        for at_s, question in ASKED.items():
            self.cluster._at(at_s, lambda now_s, q=question: [OperatorAsked(now_s, str(q), q)])

    def run(self) -> Outcome:
        return self.cluster.run()

    def _compare(self, entry: JournalEntry) -> None:
        """From the pause on, a coordinator that was restored then decides the same."""
        for one in self.restored:
            assert one.handle(entry.events, entry.at_s) == entry
        if any(isinstance(event, OperatorAsked) for event in entry.events):
            saved = pickle.dumps(self._coordinator.state())
            self.restored.append(Coordinator(self.policies))
            self.restored[-1].restore(pickle.loads(saved))


def between(entries: list[JournalEntry], begin_s: float, end_s: float) -> list[object]:
    return [action for entry in entries if begin_s < entry.at_s < end_s for action in entry.actions]


@pytest.mark.parametrize("case", BARRIERS)
@pytest.mark.parametrize("corner", [pytest.param("quiet", marks=pytest.mark.full), "chaos"])
def test_a_run_is_steered_under_every_barrier(case: Case, corner: str) -> None:
    operator = Operator(case, corner)
    outcome = operator.run()
    assert outcome.faults == []
    assert len(operator.restored) == len(ASKED)
    paused = between(outcome.entries, PAUSE_S, CONTINUE_S)
    assert not [each for each in paused if isinstance(each, Commit | Dispatch | Rollback | HaltEarly)]
    without = between(outcome.entries, DROP_S, READMIT_S)
    assert not [each for each in without if isinstance(each, Dispatch) and each.silo == OUT]
    after = between(outcome.entries, CONTINUE_S, END_S)
    assert [each for each in after if isinstance(each, Commit)], "the run goes on"
    assert outcome.entries[-1].at_s >= END_S
    assert f"{END_S:g} s are over" in [entry.reason.rpartition("; ")[2] for entry in outcome.entries]
    again = list(replay(outcome.entries, Coordinator(operator.policies)))
    assert again == outcome.entries
