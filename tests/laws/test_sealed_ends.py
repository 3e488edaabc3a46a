"""How a run ends whose silos tell the server nothing but sums: under every barrier, the last version has a score."""

from dataclasses import replace

import pytest

from fedsync.core.actions import Commit, Discard, Dispatch, Evaluate, Stop
from fedsync.core.coordinator import Coordinator
from tests.laws.corners import applies, corners
from tests.laws.fake_cluster import FakeCluster
from tests.laws.kinds import cases, configuration, name_of
from tests.laws.scenario import Scenario

CASES = [case for case in cases() if case[0] == "barrier"]
IDS = [*map(name_of, CASES)]
CORNER = corners(5)["sealed"]
AT_ONCE = replace(corners(5)["at once"].scenario, sealed=True)
"""Updates are left over where a commit takes fewer than are in."""
ROUNDS = {"rounds": 9}


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [CORNER.scenario, AT_ONCE], ids=["one by one", "at once"])
@pytest.mark.parametrize("tally", [2, 4], ids=["two of four are heard", "all are heard"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_last_version_of_sealed_figures_has_a_score(
    case: tuple[str, str, dict[str, object]], tally: int, scenario: Scenario
) -> None:
    """One more version, of orders that only score, of as many silos as one sum takes; then nothing but the end."""
    config = configuration(case, ROUNDS)
    if not applies(CORNER, config.policies(), config.barrier.innermost.needs_losses):
        pytest.skip("looks at losses")
    outcome = FakeCluster(Coordinator(replace(config.policies(), tally=tally)), scenario).run()
    assert outcome.faults == []
    actions = [action for entry in outcome.entries for action in entry.actions]
    orders = [action for action in actions if isinstance(action, Dispatch)]
    scoring = [action for action in orders if action.order.scores_only]
    *_, trained, last = (action for action in actions if isinstance(action, Commit))
    assert trained.version == last.version - 1
    assert len({action.silo for action in scoring}) == len(scoring) == tally
    assert {action.order.base_version for action in scoring} == {trained.version}
    assert orders[-tally:] == scoring, "nobody trains any more"
    assert set(last.weights) == {action.order.update_id for action in scoring}
    fates = [update for action in actions if isinstance(action, Commit) for update in action.weights]
    fates += [action.update_id for action in actions if isinstance(action, Discard)]
    assert len(fates) == len(set(fates)), "an update has one fate"
    assert set(fates) >= {action.order.update_id for action in orders if action.silo in {s.silo for s in scoring}}
    assert isinstance(actions[-1], Stop) and not actions[-1].failed
    assert all(action.version == last.version for action in actions if isinstance(action, Evaluate))
