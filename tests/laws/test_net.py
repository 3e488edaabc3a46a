"""The net of laws has no hole: corners bring about what they are for, and every law is known to readers."""

from collections import Counter
from pathlib import Path

import pytest

from fedsync.core.actions import Discard
from tests.laws.law import laws
from tests.laws.watched import NAMES, Run, runs


@pytest.mark.slow
def test_the_corners_bring_about_every_kind_of_mishap() -> None:
    """The scenarios do bring about what the laws are meant to survive."""
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


def test_the_documentation_has_every_law_and_what_it_promises() -> None:
    page = (Path(__file__).parents[2] / "docs/internals/testing.md").read_text(encoding="utf-8")
    assert [law.name for law in laws() if f"| {law.name} | {law.promise} |" not in page] == []
    assert [law.name for law in laws() if len(law.promise) < 30] == []
