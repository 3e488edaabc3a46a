"""The roster knows who is idle, in order of joining, whatever happened."""

from types import MappingProxyType

from hypothesis import given
from hypothesis import strategies as st

from fedsync.core.orders import SiloFacts, WorkOrder
from fedsync.core.speed.curve import Curve
from fedsync.core.views import ClusterView, Roster, SiloView

FACTS = SiloFacts(100)
IDLE, BUSY = SiloView(FACTS), SiloView(FACTS, order=WorkOrder("a/1", 0, 1, 8, 4, 0.1, seed=1))


def view(roster: Roster, *, looked_for: bool) -> ClusterView:
    return ClusterView(0.0, 0, MappingProxyType(roster), {}, index=None if looked_for else roster)


happenings = st.tuples(st.sampled_from("abcdefghij"), st.sampled_from(["idle", "busy", "gone"]))


@given(st.lists(happenings, max_size=60))
def test_what_it_knows_is_what_one_finds(story: list[tuple[str, str]]) -> None:
    roster = Roster()
    for name, what in story:
        if what == "gone":
            roster.pop(name, None)
        else:
            roster[name] = IDLE if what == "idle" else BUSY
        told, found = view(roster, looked_for=False), view(roster, looked_for=True)
        assert told.idle == found.idle
        assert told.anyone_busy == found.anyone_busy
        assert list(told.names) == list(found.names) == list(roster)


def test_the_revision_tells_what_a_plan_depends_on() -> None:
    """Who is here, their facts and their forecasts; not their orders."""
    roster = Roster()
    seen = [roster.revision]

    def changed() -> bool:
        seen.append(roster.revision)
        return seen[-1] != seen[-2]

    roster["a"] = IDLE
    assert changed()
    roster["a"] = BUSY
    assert not changed()
    roster["a"] = SiloView(FACTS, forecast=Curve(3.0))
    assert changed()
    roster["a"] = SiloView(SiloFacts(200), forecast=roster["a"].forecast)
    assert changed()
    roster.pop("nobody", None)
    assert not changed()
    roster.pop("a")
    assert changed()
