"""Nodes that refuse a run: when it goes on without them, and when it is over."""

import pytest

from fedsync.common.errors import RunError
from fedsync.server.nodes import Admission, Nodes
from fedsync.silo.protocol import Refusal, Refused
from tests.flower.named_nodes import join, named, silent
from tests.transport.memory_transport import MemoryTransport

OWNER, CONFIG, INTERNAL = (Refused(code) for code in (Refusal.OWNER, Refusal.CONFIG, Refusal.INTERNAL))
COLUMNS = Refused(Refusal.CONFIG, "silo 'b' failed the check 'columns'")


def refuse(nodes: Nodes, node: int, refused: Refused, times: int = 1) -> None:
    """A node answers its first question so, and again each time that it is asked."""
    for _ in range(times):
        nodes.refuses(node, refused)
        nodes.ask_again(node)


def refusing(expected: int | None, *names: str, needed: int = 0) -> tuple[MemoryTransport, Nodes]:
    """Nodes that were greeted, from 1 on."""
    silos = named(dict(enumerate(names, 1)))
    nodes = Nodes(silos, Admission(expected=expected, needed=needed))
    nodes.look()
    return silos, nodes


def test_a_run_that_all_refuse_is_over_with_the_last_refusal() -> None:
    _, nodes = refusing(3, "a", "b", "c")
    refuse(nodes, 2, OWNER)
    refuse(nodes, 1, Refused(Refusal.OWNER, "data is closed"))
    told = r"every silo refuses the run, OWNER: .* in silo.yaml. a: data is closed; b, c: its own log"
    with pytest.raises(RunError, match=told):
        refuse(nodes, 3, OWNER)


@pytest.mark.parametrize(
    ("names", "needed", "expected", "refusals"),
    [
        ("abc", 0, 4, [(1, OWNER), (2, OWNER), (3, OWNER)]),  # another is to come
        ("abc", 0, None, [(1, OWNER), (2, OWNER), (3, OWNER)]),  # a run that goes on: its silos took part before
        ("abc", 0, 2, [(1, OWNER), (2, OWNER)]),  # one has not answered
        ("abc", 0, 3, [(1, OWNER), (2, OWNER), (3, CONFIG)]),  # who knows what each would say next
        ("abc", 0, 3, [(1, OWNER), (2, OWNER), (3, INTERNAL)]),
        ("abc", 0, 3, [(1, INTERNAL), (2, INTERNAL), (3, INTERNAL)]),  # one may have died for want of memory, once
        ("abc", 0, 3, [(1, Refused(Refusal.LOADING)), (1, Refused(Refusal.BUSY))] * 9 + [(2, OWNER), (3, OWNER)]),
        ("ab", 1, 2, [(2, COLUMNS)] * 2),  # the other is enough
        ("ab", 2, 3, [(2, COLUMNS)] * 2),  # another is to come
        ("ab", 2, None, [(2, COLUMNS)] * 2),  # it goes on with silos that took part
        ("abc", 2, 2, [(2, COLUMNS)] * 2),
        ("ab", 2, 2, [(2, Refused(Refusal.LOCKED))] * 2),  # its owner may end that at any time
        ("ab", 2, 2, [(2, Refused(Refusal.APPROVAL))] * 2),
        ("ab", 2, 2, [(2, INTERNAL)] * 2),
    ],
)
def test_a_run_that_some_may_still_join_or_that_may_still_begin_goes_on(
    names: str, needed: int, expected: int | None, refusals: list[tuple[int, Refused]]
) -> None:
    _, nodes = refusing(expected, *names, needed=needed)
    for node, refused in refusals:
        refuse(nodes, node, refused)


def test_a_refusal_that_may_pass_is_final_when_it_comes_twice_in_a_row() -> None:
    _, nodes = refusing(2, "a", "b")
    refuse(nodes, 1, INTERNAL, times=2)
    refuse(nodes, 2, INTERNAL)
    with pytest.raises(RunError, match="INTERNAL"):
        refuse(nodes, 2, INTERNAL)


def test_a_run_that_a_silo_has_joined_is_not_given_up_for_refusals() -> None:
    silos, nodes = refusing(1, "a", "b")
    join(nodes, 1, "a")
    silos.leave(1)
    nodes.look()
    nodes.forget(1)
    refuse(nodes, 2, OWNER)


def test_a_run_whose_budgets_are_all_spent_is_over_though_it_has_begun() -> None:
    """It waited for silos that were there, until it had been idle for too long."""
    _, nodes = refusing(2, "a", "b")
    for node, name in enumerate("ab", 1):
        join(nodes, node, name)
    refuse(nodes, 1, Refused(Refusal.BUDGET))
    with pytest.raises(RunError, match="every silo refuses the run, BUDGET"):
        refuse(nodes, 2, Refused(Refusal.BUDGET))


@pytest.mark.parametrize("joined", [False, True])
def test_a_run_that_cannot_begin_without_a_silo_that_refuses_is_over_and_says_which_and_why(joined: bool) -> None:
    """One silo with a bad table made the other wait for ever."""
    _, nodes = refusing(2, "a", "b", needed=2)
    if joined:
        join(nodes, 1, "a")
    with pytest.raises(
        RunError, match=r"needs 2 silos, and at most 1 of .*b answers CONFIG: .*failed the check 'columns'"
    ):
        refuse(nodes, 2, COLUMNS)


def test_a_run_that_has_begun_is_not_given_up_for_one_that_comes_with_another_table() -> None:
    _, nodes = refusing(2, "a", "b", "c", needed=2)
    join(nodes, 1, "a")
    join(nodes, 3, "c")
    nodes.forget(3)
    refuse(nodes, 2, COLUMNS)


def test_who_is_turned_away_is_not_waited_for_and_who_left_does_not_count() -> None:
    silos = named({1: "a", 2: "b", 3: "stranger"})
    nodes = Nodes(silos, Admission(["a", "b"], expected=2))
    nodes.look()
    refuse(nodes, 1, OWNER)
    silos.leave(1)
    nodes.look()
    nodes.forget(1)
    refuse(nodes, 2, OWNER)
    silos.join(4, silent, "a")
    nodes.look()
    with pytest.raises(RunError, match="OWNER"):
        refuse(nodes, 4, OWNER)


def test_the_error_of_a_large_federation_stays_short() -> None:
    _, nodes = refusing(200, *(f"silo-{number}" for number in range(200)))
    with pytest.raises(RunError) as raised:
        for node in range(1, 201):
            refuse(nodes, node, Refused(Refusal.CONFIG, f"no folder {node}" if node < 100 else ""))
    assert str(raised.value).count("silo-") == 5 and "; 95 more" in str(raised.value)
