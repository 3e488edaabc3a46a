"""The server believes what more than half of the silos say, once."""

from dataclasses import replace
from math import nan

import pytest

from fedsync.core.actions import Action, Attested, Note
from fedsync.core.orders import PooledFigures, Score
from fedsync.evaluation.metric_votes import KEPT, Claims

TRUE = PooledFigures(3, 0.5, Score(2, 0.9, 0.3))
LIE = PooledFigures(3, 0.1, Score(2, 1.0, 0.0))


def said(*claims: tuple[str, PooledFigures], silos: int = 5, version: int = 3) -> list[Action]:
    actions: list[Action] = []
    heard = Claims()
    for silo, claim in claims:
        heard.hear(silo, [claim], silos, version, actions)
    return actions


def test_three_of_five_are_believed_once() -> None:
    assert said(("a", TRUE), ("b", TRUE)) == []
    assert said(*((name, TRUE) for name in "abcde")) == [Attested(TRUE)]


@pytest.mark.parametrize("order", ["zabcd", "azbcd", "abczd", "abcdz"])
def test_one_that_lies_changes_nothing_and_is_noted_once(order: str) -> None:
    """Not if it is the first, and not if it says so again and again."""
    claims = [(name, LIE if name == "z" else TRUE) for name in order]
    actions = said(*claims, *[("z", LIE)] * 5)
    assert [action for action in actions if isinstance(action, Attested)] == [Attested(TRUE)]
    assert len([action for action in actions if isinstance(action, Note)]) == 1


def test_one_silo_alone_is_never_believed() -> None:
    assert said(("a", LIE), silos=1) == []
    assert said(("a", TRUE), ("b", TRUE), silos=2) == [Attested(TRUE)]


@pytest.mark.parametrize(
    "claim",
    [
        PooledFigures(4, 0.5),  # of a version that is yet to be
        PooledFigures(0, 0.5),
        PooledFigures(3, nan),
        PooledFigures(3, 1e31),
        PooledFigures(3, 0.5, Score(3, 0.9, 0.3)),  # updates of a version cannot have evaluated it
        PooledFigures(3, 0.5, Score(2, nan, 0.3)),
        PooledFigures(3, 0.5, Score(2, 0.9, 1e31)),
    ],
)
def test_what_no_silo_can_have_found_is_left_out(claim: PooledFigures) -> None:
    assert said(*((name, claim) for name in "abcde")) == []


def test_few_versions_are_remembered() -> None:
    heard = Claims()
    for version in range(1, 5 * KEPT):
        for name in "ab":
            heard.hear(name, [PooledFigures(version, 0.5)], 2, version, [])
    assert len(heard.said) <= KEPT and len(heard.believed) <= KEPT
    assert heard.hear("a", [PooledFigures(1, 0.1)], 2, version, []) == []


def test_what_all_say_alike_is_kept_once() -> None:
    """So a checkpoint does not have it for each silo."""
    heard = Claims()
    for name in "abcdefgh":
        heard.hear(name, [LIE if name == "c" else replace(TRUE)], 8, 3, [])
    assert len({id(claim) for claim in heard.said[3].values()}) == 2
    assert heard.said[3] == {name: LIE if name == "c" else TRUE for name in "abcdefgh"}
