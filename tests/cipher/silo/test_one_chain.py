"""A server that shows silos another past: they refuse before they open anything, and nothing has changed."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedsync.cipher.encoding.catch_up import Link
from fedsync.common.errors import ConfigError, ProtocolError, SpoiledSum
from fedsync.model.layout import Vector, as_bytes
from tests.cipher.lying_server import entry_of, one_more, rewritten
from tests.cipher.make import INITIAL, Federation, change, order, plan, report
from tests.cipher.silo.chains import ADD, EMPTY, THREE, holding, refused, to, without_opening


@pytest.mark.parametrize("foreign", ["c", "bc"])
@pytest.mark.parametrize("other", [{"run": "another"}, {"specification": bytes(31) + b"1"}])
def test_what_was_sealed_in_another_run_is_not_opened(other: dict[str, object], foreign: str, tmp_path: Path) -> None:
    """The same keys, model and update ids; its messages are signed by whom they name. One silo may lie, not two."""
    federation, elsewhere = (Federation(plan("pad"), tmp_path, THREE) for _ in range(2))
    elsewhere.silos = {name: elsewhere.copy(name, **other) for name in "abc"}
    for name, silo in elsewhere.silos.items():
        elsewhere.aggregator.greet(name, -1, silo.greeting())
    federation.begin_all("abc", 0)
    elsewhere.begin_all("abc", 0)
    ids = federation.answer_all(sorted({*"abc"} - {*foreign}))
    for name in foreign:
        update_id, sealed = elsewhere.seal(name, change(9))
        federation.aggregator.put(name, update_id, sealed)
        ids.append(update_id)
    with pytest.MonkeyPatch.context() as lying:
        lying.setattr(federation.aggregator._inbox, "_agree", lambda *given: None)
        federation.commit(1, ids)
    for name in "abc":
        federation.aggregator.holds(name, 0)
        sent = federation.aggregator.outgoing(name)
        if len(foreign) > 1:
            with refused(federation.silos[name], "chain", by=SpoiledSum):
                federation.silos[name].receive(sent, 1)
        else:
            np.testing.assert_array_equal(without_opening(federation.silos[name], sent, 1), INITIAL)
    # So is its beginning, by who has nothing yet.
    elsewhere.aggregator.holds("a", -1)
    fresh = federation.copy("a")
    with refused(fresh, "chain"):
        fresh.receive(elsewhere.aggregator.outgoing("a"), 0)


def of_another_past(federation: Federation) -> str:
    """Update of c, which names a history that nobody has."""
    liar = federation.silos["c"]
    history = liar._state.history
    liar._state = replace(liar._state, history=replace(history, chains=(bytes(32),)))
    update_id = federation.answer("c", change(ord("c")))
    liar._state = replace(liar._state, history=history)
    return update_id


def test_one_silo_that_names_another_past_does_not_count(tmp_path: Path) -> None:
    """It can: it has the key. The others' update counts, and no silo refuses anything."""
    federation = Federation(plan("pad"), tmp_path, THREE)
    federation.begin_all("abc", 0)
    ids = federation.answer_all("ab")
    federation.commit(1, [*ids, of_another_past(federation)])
    for silo in federation.silos.values():
        silo.receive(federation.aggregator.outgoing(silo._ring.own.name), 1)
        assert set(silo._state.added) == {"a", "b"}


def test_beside_two_updates_of_one_silo_it_makes_no_sum_that_others_take_for_a_forgery(tmp_path: Path) -> None:
    """Two updates are left, of one silo. The server counted updates, and the others locked themselves."""
    federation = Federation(plan("pad", members=2), tmp_path, THREE)
    federation.begin_all("abc", 0)
    ids = [federation.answer("a", change(1))]
    federation.begin("a", 0)
    federation.commit(1, [*ids, federation.answer("a", change(2)), of_another_past(federation)])
    for silo in federation.silos.values():
        silo.receive(federation.aggregator.outgoing(silo._ring.own.name), 1)
        assert not silo._state.added


def test_silos_that_were_told_different_stories_cannot_be_added_up(tmp_path: Path) -> None:
    federation = Federation(plan("pad"), tmp_path, THREE)
    federation.begin_all("abc", 0)
    ids = federation.answer_all("abc")
    pending, chain = dict(federation.aggregator._inbox._pending), federation.aggregator._chain
    federation.commit(1, ids[:2])
    federation.begin("a", 1)
    first = chain.links.pop()
    federation.aggregator._inbox._pending.update(pending)
    federation.aggregator._made.clear()
    federation.commit(1, ids)
    federation.begin("b", 1)
    silos = federation.silos
    assert silos["a"]._state.history.chain(1) != silos["b"]._state.history.chain(1)
    federation.commit(2, [federation.answer(name, change(7 + ord(name))) for name in "ab"])
    ours, theirs = silos["a"], silos["b"]
    second = chain.links[1]
    for silo in (ours, theirs):
        np.testing.assert_array_equal(without_opening(silo, to(1, second), 2), silo.model)
    assert silos["a"]._state.history.chain(2) != silos["b"]._state.history.chain(2)
    # Nor does it open to who begins anew, on either side.
    whole = federation.all_for("c")
    for links in ((first, second), whole.links):
        fresh = federation.copy("c")
        begun = fresh.receive(replace(whole, version=1, links=links[:1]).encode(), 1)
        np.testing.assert_array_equal(without_opening(fresh, to(1, second), 2), begun)


def test_updates_that_build_on_a_version_on_its_way_are_compared_when_it_is_there(
    three_rounds: Federation, tmp_path: Path
) -> None:
    """All of the second link's members agree, on what the first does not lead to: silos of another fork."""
    silo = holding(three_rounds, tmp_path, 0)
    third = three_rounds.aggregator._chain.links[2]
    with refused(silo, "chain", opened=True):
        silo.receive(to(0, three_rounds.aggregator._chain.links[0], Link(EMPTY), third), 3)


def test_who_begins_with_another_model_than_the_others_is_told(three_rounds: Federation) -> None:
    """Its task makes another one, as with another version of a library."""
    whole = three_rounds.all_for("c")
    silo = three_rounds.copy("c")
    silo._initial = lambda: np.nextafter(INITIAL, np.float32(9))
    with refused(silo, "chain", opened=True):
        silo.receive(replace(whole, version=1, links=whole.links[:1]).encode(), 1)


def test_a_model_that_is_made_anew_comes_to_what_was_here(tmp_path: Path, three_rounds: Federation) -> None:
    silo = holding(three_rounds, tmp_path, 2)
    whole = three_rounds.all_for("c")
    first = whole.links[0]
    with refused(silo, "version"):
        silo.receive(replace(whole, version=1, links=(first,)).encode(), 1)
    for links in ((Link(EMPTY), Link(EMPTY), Link(EMPTY)), (first, Link(EMPTY), Link(EMPTY))):
        with refused(silo, "chain", opened=True):
            silo.receive(replace(whole, links=links).encode(), 3)
    np.testing.assert_array_equal(silo.receive(whole.encode(), 3), three_rounds.silos["a"].model)


def test_a_silo_that_lost_its_folder_still_follows_one_chain(three_rounds: Federation, tmp_path: Path) -> None:
    """Another trainer, with a folder of its own or after the first one's is gone; the keys are where they were."""
    whole = three_rounds.all_for("c")
    first, second, _ = whole.links
    two = replace(whole, version=2, links=(first, second)).encode()
    three_rounds.copy("b", tmp_path / "one.bin", remembers=True).receive(two, 2)
    again = three_rounds.copy("b", tmp_path / "other.bin", remembers=True)
    with refused(again, "version"):
        again.receive(replace(whole, version=1, links=(first,)).encode(), 1)
    with refused(again, "chain", opened=True):
        again.receive(replace(whole, version=2, links=(first, Link(EMPTY))).encode(), 2)
    begun = again._state
    again.receive(two, 2)
    again._state = begun
    again.receive(whole.encode(), 3)
    elsewhere = three_rounds.copy("b", remembers=True, run="another")
    with refused(elsewhere, "chain"):  # for it is another's; of its own chain it knows nothing yet
        elsewhere.receive(two, 2)


def test_a_log_that_is_damaged_counts_as_damaged_and_not_as_none(three_rounds: Federation) -> None:
    whole = three_rounds.all_for("c").encode()
    silo = three_rounds.copy("a", remembers=True)
    silo.receive(whole, 3)
    (file,) = (three_rounds.keys.silos["a"] / "chains").iterdir()
    assert file.stat().st_mode & 0o077 == 0
    file.write_text("3 00")
    with pytest.raises(ConfigError, match="damaged"):
        three_rounds.copy("a", remembers=True).receive(whole, 3)


@pytest.mark.parametrize("bad", [1, 2, 3])
def test_nothing_is_opened_if_one_sum_is_not_what_silos_sealed(bad: int, three_rounds: Federation) -> None:
    """Also where it is the last: all is authenticated before anything is opened."""
    whole = three_rounds.all_for("c")
    changed = Link(ADD, (rewritten(three_rounds, entry_of(three_rounds, bad), bad, one_more),))
    silo = three_rounds.copy("c")
    with refused(silo, "tag"):
        silo.receive(replace(whole, links=(*whole.links[: bad - 1], changed, *whole.links[bad:])).encode(), 3)


@pytest.mark.parametrize("pinned", [None, "00" * 32])
def test_a_first_model_that_the_owner_did_not_pin_is_refused(pinned: str | None, tmp_path: Path) -> None:
    federation = Federation(plan("pad"), tmp_path, THREE)
    given: Vector = change(1, size=1.0)
    federation.aggregator._initial = as_bytes(given)
    silo = federation.copy("a", first_model=pinned)
    with refused(silo, "first model"):
        silo.receive(federation.aggregator.outgoing("a"), 0)
    for allowed in (hashlib.sha256(given.tobytes()).hexdigest(), "any"):
        np.testing.assert_array_equal(
            federation.copy("a", first_model=allowed).receive(federation.aggregator.outgoing("a"), 0), given
        )


def test_an_order_that_starts_from_a_version_that_is_not_here_is_refused(three_rounds: Federation) -> None:
    with pytest.raises(ProtocolError, match="version 7, which it does not have"):
        three_rounds.silos["a"].send(change(1), order("a/9", 7), report(7))
