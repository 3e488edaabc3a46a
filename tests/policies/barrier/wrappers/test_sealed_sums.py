"""No commit of fewer silos than a sum needs; the run waits for them."""

from typing import Any

from fedsync.core.views import ClusterView, Verdict
from fedsync.policies.barrier.kinds.bulk import Bsp
from fedsync.policies.barrier.wrappers.default_wrappers import OpenableSums
from tests.policies.barrier.make import meta, silo, view


def asked(barrier: OpenableSums, idle: str, busy: str = "", sent: str = "") -> Verdict:
    """A fresh barrier's answer where these silos are idle or busy, and those have sent."""
    silos = {name: silo(busy=name in busy) for name in idle + busy}
    return barrier.decide(barrier.init(), view(silos, *map(meta, sent)))[1]


TWO = OpenableSums(Bsp(), 2)


def test_one_silo_waits_for_another_one_whether_it_has_sent_or_not() -> None:
    for sent in ("", "a"):
        verdict = asked(TWO, "a", sent=sent)
        assert verdict == Verdict(reason="a sum needs 2 silos, 1 can take part: the run waits")


def test_an_update_of_a_silo_that_is_gone_counts() -> None:
    assert set(asked(TWO, "a", sent="ab").commit) == {"a/1", "b/1"}


def test_a_silo_that_comes_back_gets_an_order_before_anything_is_committed() -> None:
    verdict = asked(TWO, "ab", sent="a")
    assert (verdict.commit, verdict.release) == ((), ("b",))
    assert verdict.reason == "a sum needs the updates of 2 silos, 1 are in"
    assert not asked(TWO, "a", busy="b", sent="a").commit
    assert set(asked(TWO, "ab", sent="ab").commit) == {"a/1", "b/1"}


class OneByOne(Bsp):
    """Commits the first update that is there."""

    def decide(self, state: None, view: ClusterView) -> tuple[None, Verdict]:
        return None, Verdict(commit=tuple(view.pending)[:1], release=view.idle, reason="one")


def test_a_barrier_that_would_commit_each_alone_commits_all_that_can_come() -> None:
    barrier: Any = OpenableSums(OneByOne(), 2)
    assert asked(barrier, "ab", sent="a").release == ("b",)
    assert asked(barrier, "a", busy="b", sent="a") == Verdict(reason="a sum needs the updates of 2 silos, 1 are in")
    both = asked(barrier, "ab", sent="ab")
    assert (both.commit, both.release) == (("a/1", "b/1"), ("a", "b"))
