"""A server that adds twice, takes back what was not added, or leaves out versions: silos refuse, as if nothing came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fedsync.cipher.encoding.catch_up import CatchUp, Link, Start
from fedsync.model.transfer import OtherVersion
from tests.cipher.lying_server import entry_of, one_more, rewritten
from tests.cipher.make import Federation, close, plan
from tests.cipher.silo.chains import ADD, EMPTY, THREE, holding, refused, to, undo


def test_what_was_added_last_is_taken_back_once(three_rounds: Federation, tmp_path: Path) -> None:
    silo = holding(three_rounds, tmp_path, 3)
    before = holding(three_rounds, tmp_path, 1).model
    both = undo(entry_of(three_rounds, 3), entry_of(three_rounds, 2))
    close(silo.receive(to(3, Link(EMPTY), both), 5), before, 3)
    for again in (both, undo(entry_of(three_rounds, 2)), undo(entry_of(three_rounds, 3))):
        with refused(silo, "undo"):
            silo.receive(to(5, again), 6)
    left = undo(entry_of(three_rounds, 1))
    with refused(silo, "undo"):  # what took back is not passed over
        silo.receive(to(5, left), 6)


Lie = Callable[[Federation], list[Link]]


def taking_back(*versions: int) -> Lie:
    """One link that takes back the additions of these versions, in this order."""
    return lambda rounds: [undo(*(entry_of(rounds, version) for version in versions))]


def adding(version: int, *under: int) -> Lie:
    """Links that add the sum of one version under other numbers."""
    return lambda rounds: [Link(ADD, (rewritten(rounds, entry_of(rounds, version), other),)) for other in under]


LIES: dict[str, tuple[int, Lie, str]] = {
    "taken back twice in one link": (3, taking_back(3, 3), "undo"),
    "taken back twice in one message": (3, lambda rounds: [undo(entry_of(rounds, 3))] * 2, "undo"),
    "the version before the newest": (3, taking_back(2), "undo"),
    "the first version": (3, taking_back(1), "undo"),
    "the newest, and not the one before": (3, taking_back(3, 1), "undo"),
    "in the wrong order": (3, taking_back(2, 3), "undo"),
    "all but the newest": (3, taking_back(2, 1), "undo"),
    "another version's sum": (2, lambda rounds: [undo(rewritten(rounds, entry_of(rounds, 1), 2))], "undo"),
    "a sum that was never added": (2, lambda rounds: [undo(rewritten(rounds, entry_of(rounds, 3), 2))], "undo"),
    "with other words": (2, lambda rounds: [undo(rewritten(rounds, entry_of(rounds, 2), 2, one_more))], "tag"),
    "added again as the next version": (1, adding(1, 2), "members"),
    "added twice in one message": (1, adding(2, 2, 3), "members"),
    "the next two in the wrong order": (1, lambda rounds: rounds.aggregator._chain.links[2:0:-1], "version"),
    "behind a version that brings nothing": (
        1, lambda rounds: [Link(EMPTY), rounds.aggregator._chain.links[1]], "version",
    ),
}  # fmt: skip
"""Version that a silo holds, links that it is sent then, and the check that fails."""


@pytest.mark.parametrize("what", LIES)
def test_links_that_do_not_continue_a_silos_are_refused(what: str, three_rounds: Federation, tmp_path: Path) -> None:
    version, lie, check = LIES[what]
    silo, links = holding(three_rounds, tmp_path, version), lie(three_rounds)
    with refused(silo, check):
        silo.receive(to(version, *links), version + len(links))


def test_what_is_taken_back_with_other_values_in_the_clear_is_refused(tmp_path: Path) -> None:
    federation = Federation(plan("pad", only=("head.*",)), tmp_path, THREE)
    federation.run_round(0)
    silo, entry = holding(federation, tmp_path, 1), entry_of(federation, 1)
    with refused(silo, "undo"):
        silo.receive(to(1, undo(replace(entry, clear=bytes(len(entry.clear))))), 2)


def test_a_message_begins_where_the_silo_is_with_a_link_a_version(three_rounds: Federation, tmp_path: Path) -> None:
    silo, third = holding(three_rounds, tmp_path, 1), three_rounds.aggregator._chain.links[2]
    with refused(silo, "catch-up"):
        silo.receive(CatchUp(Start.HELD, 1, 3, (third,)).encode(), 3)
    with pytest.raises(OtherVersion):
        silo.receive(to(2, third), 3)
