"""Bulk synchronous parallel, one view at a time."""

import pytest

from fedsync.core.orders import SiloFacts, UpdateMeta, WorkOrder
from fedsync.core.views import ClusterView, SiloView
from fedsync.policies.barrier.kinds.bulk import Bsp


def view(busy: str = "", idle: str = "", pending: str = "") -> ClusterView:
    """One silo a letter."""
    silos = {name: SiloView(SiloFacts(10), order=WorkOrder(f"{name}/1", 0, 1, 8, 4, 0.1, 1)) for name in busy}
    silos |= {name: SiloView(SiloFacts(10)) for name in idle}
    metas = {f"{name}/1": UpdateMeta(f"{name}/1", name, 0, 4, 32, 10, 40) for name in pending}
    return ClusterView(5.0, 0, dict(sorted(silos.items())), metas)


@pytest.mark.parametrize(
    ("seen", "commit", "release"),
    [
        (view(), (), ()),
        (view(idle="ab"), (), ("a", "b")),  # the beginning, or a round that everybody failed
        (view(busy="ab"), (), ()),
        (view(busy="b", idle="a", pending="a"), (), ()),
        (view(busy="b", idle="a"), (), ()),  # a joined, or failed, in the middle of a round
        (view(idle="ab", pending="ab"), ("a/1", "b/1"), ("a", "b")),
        (view(idle="ab", pending="ba"), ("b/1", "a/1"), ("a", "b")),
        (view(idle="abc", pending="a"), ("a/1",), ("a", "b", "c")),  # b failed, c joined
        (view(idle="b", pending="ab"), ("a/1", "b/1"), ("b",)),  # a has left, what it sent counts
        (view(pending="a"), (), ()),  # all have left: nobody is there to go on
    ],
)
def test_commits_and_releases_everybody_when_nobody_is_at_work(
    seen: ClusterView, commit: tuple[str, ...], release: tuple[str, ...]
) -> None:
    state, verdict = Bsp().decide(None, seen)
    assert state is None
    assert (verdict.commit, verdict.release) == (commit, release)
    assert (dict(verdict.budget_s), verdict.stop_now, verdict.wake_at_s) == ({}, (), None)
    assert verdict.reason


@pytest.mark.parametrize(
    ("seen", "commit", "release"),
    [
        (view(idle="ab"), (), ("a", "b")),
        (view(busy="b", idle="ac", pending="a"), (), ()),
        (view(idle="abc", pending="a"), (), ("b", "c")),  # b failed, c joined: both before the round ends
        (view(idle="ab", pending="ab"), ("a/1", "b/1"), ("a", "b")),
        (view(idle="b", pending="ab"), ("a/1", "b/1"), ("b",)),  # a has left
    ],
)
def test_a_complete_round_has_all_that_are_there(
    seen: ClusterView, commit: tuple[str, ...], release: tuple[str, ...]
) -> None:
    _, verdict = Bsp(complete=True).decide(None, seen)
    assert (verdict.commit, verdict.release) == (commit, release)
