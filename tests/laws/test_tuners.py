"""The tuner through every corner, and what the laws of `promises` say of it; see `tests.laws.law`."""

from fedsync.core.actions import Note
from tests.laws.law import keep
from tests.laws.watched import Run, cases_of, runs


@cases_of("auto")
def test_laws(case: int) -> None:
    keep(case)


@cases_of("auto")
def test_it_changes_its_choice_in_most_corners(case: int) -> None:
    """Otherwise laws would say nothing of it."""
    changes = {
        corner: sum(
            isinstance(action, Note) and action.text.startswith("auto: ")
            for entry in run.entries
            for action in entry.actions
        )
        for corner, run in runs(case).items()
        if isinstance(run, Run)
    }
    assert 2 * sum(count > 0 for count in changes.values()) > len(changes), changes
