"""Bulk synchronous parallel, one view at a time."""

import pytest

from fedsync.core.views import ClusterView
from fedsync.policies.barrier.kinds.bulk import Bsp
from tests.policies.barrier.make import meta, silo, view


def seen(busy: str = "", idle: str = "", pending: str = "") -> ClusterView:
    """One silo a letter."""
    return view({name: silo(busy=name in busy) for name in sorted(busy + idle)}, *map(meta, pending))


@pytest.mark.parametrize(
    ("complete", "seen", "commit", "release"),
    [
        (False, seen(), "", ""),
        (False, seen(idle="ab"), "", "ab"),  # the beginning, or a round that everybody failed
        (False, seen(busy="ab"), "", ""),
        (False, seen(busy="b", idle="a", pending="a"), "", ""),
        (False, seen(busy="b", idle="a"), "", ""),  # a joined, or failed, in the middle of a round
        (False, seen(idle="ab", pending="ab"), "ab", "ab"),
        (False, seen(idle="ab", pending="ba"), "ba", "ab"),
        (False, seen(idle="abc", pending="a"), "a", "abc"),  # b failed, c joined
        (False, seen(idle="b", pending="ab"), "ab", "b"),  # a has left, what it sent counts
        (False, seen(pending="a"), "", ""),  # all have left: nobody is there to go on
        (True, seen(idle="ab"), "", "ab"),
        (True, seen(busy="b", idle="ac", pending="a"), "", ""),
        (True, seen(idle="abc", pending="a"), "", "bc"),  # b failed, c joined: both before the round ends
        (True, seen(idle="ab", pending="ab"), "ab", "ab"),
        (True, seen(idle="b", pending="ab"), "ab", "b"),  # a has left
    ],
)
def test_commits_and_releases_when_nobody_works(complete: bool, seen: ClusterView, commit: str, release: str) -> None:
    """Everybody; of a complete round, first those of whom no update is in."""
    state, verdict = Bsp(complete=complete).decide(None, seen)
    assert state is None
    assert (verdict.commit, verdict.release) == (tuple(f"{name}/1" for name in commit), tuple(release))
    assert (dict(verdict.budget_s), verdict.stop_now, verdict.wake_at_s) == ({}, (), None)
    assert verdict.reason
