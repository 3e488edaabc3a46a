"""Every case through every corner, and what the laws of `promises` say of it; see `tests.laws.law`."""

from collections import Counter

import pytest

from fedsync.core.actions import Discard
from tests.laws.law import keep
from tests.laws.watched import NAMES, Run, runs


@pytest.mark.parametrize("case", range(len(NAMES)), ids=NAMES)
def test_laws(case: int) -> None:
    keep(case)


def test_the_corners_bring_about_every_kind_of_mishap() -> None:
    """The net has no hole: the scenarios do bring about what the laws are meant to survive."""
    seen: Counter[str] = Counter()
    for run in runs(NAMES.index("bsp")).values():
        assert isinstance(run, Run)
        for entry in run.entries:
            seen.update(type(event).__name__ for event in entry.events)
            seen.update(a.reason.split(":")[0] for a in entry.actions if isinstance(a, Discard))
    expected = ["SiloJoined", "SiloLost", "WorkFailed", "UpdateArrived", "Progressed", "Evaluated", "TimerFired"]
    expected += ["disk full", "the silo joined again", "the silo was lost", "nobody waits for it", "the run is over"]
    assert [name for name in expected if seen[name] < 3] == []
    assert sum(count for reason, count in seen.items() if "failed the check" in reason) >= 5
