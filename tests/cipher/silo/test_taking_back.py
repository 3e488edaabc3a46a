"""A server that adds twice, takes back what was not added, or leaves out versions: silos refuse, as if nothing came."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedsync.cipher.encoding.catch_up import CatchUp, Link, Start
from fedsync.model.transfer import OtherVersion
from tests.cipher.lying_server import entry_of, one_more, rewritten
from tests.cipher.make import INITIAL, Federation, change, close, plan
from tests.cipher.silo.chains import ADD, EMPTY, THREE, holding, refused, to, undo

# Taking back.


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


def test_what_is_taken_back_twice_in_one_link_or_message_is_refused(three_rounds: Federation, tmp_path: Path) -> None:
    silo, last = holding(three_rounds, tmp_path, 3), entry_of(three_rounds, 3)
    for links in ([undo(last, last)], [undo(last), undo(last)]):
        with refused(silo, "undo"):
            silo.receive(to(3, *links), 3 + len(links))


@pytest.mark.parametrize("versions", [(2,), (1,), (3, 1), (2, 3), (2, 1)])
def test_only_what_is_left_of_the_newest_is_taken_back(
    versions: tuple[int, ...], three_rounds: Federation, tmp_path: Path
) -> None:
    silo = holding(three_rounds, tmp_path, 3)
    with refused(silo, "undo"):
        silo.receive(to(3, undo(*(entry_of(three_rounds, version) for version in versions))), 4)


def test_something_else_is_not_taken_back(three_rounds: Federation, tmp_path: Path) -> None:
    """Another version's sum, one that was never added, and with other values in the clear."""
    silo = holding(three_rounds, tmp_path, 2)
    other = rewritten(three_rounds, entry_of(three_rounds, 1), 2)
    never = rewritten(three_rounds, entry_of(three_rounds, 3), 2)
    for entry in (other, never):
        with refused(silo, "undo"):
            silo.receive(to(2, undo(entry)), 3)


def test_what_is_taken_back_with_other_words_is_refused(three_rounds: Federation, tmp_path: Path) -> None:
    silo = holding(three_rounds, tmp_path, 2)
    with refused(silo, "tag"):
        silo.receive(to(2, undo(rewritten(three_rounds, entry_of(three_rounds, 2), 2, one_more))), 3)


def test_what_is_taken_back_with_other_values_in_the_clear_is_refused(tmp_path: Path) -> None:
    federation = Federation(plan("pad", only=("head.*",)), tmp_path, THREE)
    federation.run_round(0)
    silo, entry = holding(federation, tmp_path, 1), entry_of(federation, 1)
    with refused(silo, "undo"):
        silo.receive(to(1, undo(replace(entry, clear=bytes(len(entry.clear))))), 2)


# Adding.


def test_an_update_is_added_once(three_rounds: Federation, tmp_path: Path) -> None:
    """As the next version, and twice in one message."""
    silo = holding(three_rounds, tmp_path, 1)
    again = Link(ADD, (rewritten(three_rounds, entry_of(three_rounds, 1), 2),))
    with refused(silo, "members"):
        silo.receive(to(1, again), 2)
    twice = [Link(ADD, (rewritten(three_rounds, entry_of(three_rounds, 2), version),)) for version in (2, 3)]
    with refused(silo, "members"):
        silo.receive(to(1, *twice), 3)


def test_each_link_is_the_next_version(three_rounds: Federation, tmp_path: Path) -> None:
    silo = holding(three_rounds, tmp_path, 1)
    second, third = three_rounds.aggregator._chain.links[1:]
    with refused(silo, "catch-up"):
        silo.receive(CatchUp(Start.HELD, 1, 3, (third,)).encode(), 3)
    with refused(silo, "version"):
        silo.receive(to(1, third, second), 3)
    with refused(silo, "version"):
        silo.receive(to(1, Link(EMPTY), second), 3)
    with pytest.raises(OtherVersion):
        silo.receive(to(2, third), 3)


def test_an_honest_server_commits_nothing_that_silos_would_refuse(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation = Federation(plan("pad", members=2), tmp_path, THREE)
    for version in range(2):
        federation.begin("a", version)
        federation.commit(version + 1, [federation.answer("a", change(1))])
    assert "would disclose too much" in caplog.text
    np.testing.assert_array_equal(federation.begin("b", 2), INITIAL)
