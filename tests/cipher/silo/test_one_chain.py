"""A server that lies about what was added: silos refuse before they open anything, and nothing has changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedsync.cipher.encoding import catch_up, wire
from fedsync.cipher.encoding.catch_up import CatchUp, Link, LinkEntry, LinkKind, Start
from fedsync.cipher.silo.replica import EncryptedReplica
from fedsync.core.errors import ConfigError, ProtocolError, SpoiledSum
from fedsync.core.layout import Vector
from fedsync.core.transfer import OtherVersion, Payload
from tests.cipher.lying_server import entry_of, envelope_of, one_more, rewritten
from tests.cipher.make import INITIAL, LAYOUT, Federation, change, close, order, plan, report

THREE = {"a": 10, "b": 10, "c": 10}
ADD, UNDO, EMPTY = LinkKind.ADD, LinkKind.UNDO, LinkKind.EMPTY


def a_round(federation: Federation, version: int, names: str = "abc") -> None:
    for name in names:
        federation.begin(name, version)
    federation.commit(version + 1, [federation.answer(name, change(100 * version + ord(name))) for name in names])


@pytest.fixture(scope="module")
def three_rounds(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """Three versions, the last of which all silos hold; nobody is to change it."""
    federation = Federation(plan("pad"), tmp_path_factory.mktemp("rounds"), THREE)
    for version in range(3):
        a_round(federation, version)
    for name in "abc":
        federation.begin(name, 3)
    return federation


def holding(federation: Federation, tmp_path: Path, version: int) -> EncryptedReplica:
    """A silo that holds this version."""
    silo = federation.copy("c", tmp_path / f"{version}.bin")
    federation.aggregator.holds("c", -1)
    whole = catch_up.decode(federation.aggregator.outgoing("c"))
    silo.receive(replace(whole, version=version, links=whole.links[:version]).encode(), version)
    return silo


def to(version: int, *links: Link) -> Payload:
    """What leads from ``version`` on."""
    return CatchUp(Start.HELD, version, version + len(links), links).encode()


@contextmanager
def refused(
    silo: EncryptedReplica, check: str, *, opened: bool = False, by: type[ProtocolError] = ProtocolError
) -> Iterator[None]:
    """The check fails, nothing is decrypted unless it may be, and the silo is as before, also on disk."""
    calls = []
    opens, before, kept = (
        silo._sealer.open,
        silo._state,
        silo._file.read_bytes() if silo._file and silo.holds >= 0 else b"",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(silo._sealer, "open", lambda *given: calls.append(1) or opens(*given))
        with pytest.raises(by) as caught:
            yield
    assert caught.value.check == check, str(caught.value)
    assert bool(calls) == opened
    assert silo._state is before
    if kept and silo._file is not None:
        assert silo._file.read_bytes() == kept


def undo(*entries: LinkEntry) -> Link:
    return Link(UNDO, entries)


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
    a_round(federation, 0)
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


def test_sums_that_overlap_are_refused(tmp_path: Path) -> None:
    """Their difference would be one silo's update."""
    federation = Federation(plan("pad"), tmp_path, THREE)
    for name in "abc":
        federation.begin(name, 0)
    ids = [federation.answer(name, change(ord(name))) for name in "abc"]
    pending = dict(federation.aggregator._inbox._pending)
    federation.commit(1, ids[:2])
    silo = holding(federation, tmp_path, 1)
    federation.aggregator._inbox._pending.update(pending)
    federation.commit(2, ids)
    with refused(silo, "members"):
        silo.receive(to(1, federation.aggregator._chain.links[1]), 2)


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


def test_fewer_silos_than_the_plan_says_are_refused(tmp_path: Path) -> None:
    federation = Federation(plan("pad", members=1), tmp_path, THREE)
    for name in "ab":
        federation.begin(name, 0)
    federation.commit(1, [federation.answer("a", change(1))])
    federation.aggregator.holds("c", -1)
    one = federation.aggregator.outgoing("c")
    silo = federation.copy("c", plan=plan("pad", members=2))
    with refused(silo, "members"):
        silo.receive(one, 1)
    federation.copy("c").receive(one, 1)


def test_two_updates_of_one_silo_are_not_two_silos(tmp_path: Path) -> None:
    federation = Federation(plan("pad", members=2), tmp_path, THREE)
    silo = federation.copy("c")
    federation.begin("a", 0)
    ids = [federation.answer("a", change(1))]
    federation.begin("a", 0)
    ids.append(federation.answer("a", change(2)))
    federation.aggregator._plan = replace(federation.plan, members=1)  # the server knows better
    federation.commit(1, ids)
    federation.aggregator.holds("c", -1)
    with refused(silo, "members"):
        silo.receive(federation.aggregator.outgoing("c"), 1)


def test_an_honest_server_commits_nothing_that_silos_would_refuse(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation = Federation(plan("pad", members=2), tmp_path, THREE)
    for version in range(2):
        federation.begin("a", version)
        federation.commit(version + 1, [federation.answer("a", change(1))])
    assert "would tell too much" in caplog.text
    np.testing.assert_array_equal(federation.begin("b", 2), INITIAL)


# One run, one chain.


@pytest.mark.parametrize("other", [{"run": "another"}, {"specification": bytes(31) + b"1"}])
def test_what_was_sealed_in_another_run_is_refused(other: dict[str, object], tmp_path: Path) -> None:
    """The same keys, model and update ids; its messages are signed by whom they name."""
    federation, elsewhere = (Federation(plan("pad"), tmp_path, THREE) for _ in range(2))
    elsewhere.silos = {name: elsewhere.copy(name, **other) for name in "abc"}
    for name, silo in elsewhere.silos.items():
        elsewhere.aggregator.greet(name, -1, silo.greeting())
    for name in "abc":
        federation.begin(name, 0), elsewhere.begin(name, 0)
    ids = [federation.answer(name, change(ord(name))) for name in "ab"]
    ids.append(elsewhere.answer("c", change(ord("c"))))
    update_id, sealed = elsewhere.seal("c", change(9))
    federation.aggregator.put("c", update_id, sealed)
    with pytest.MonkeyPatch.context() as lying:
        lying.setattr(federation.aggregator._inbox, "_agree", lambda *given: None)
        federation.commit(1, ids)
    for name in "abc":
        with refused(federation.silos[name], "chain", by=SpoiledSum):
            federation.silos[name].receive(federation.aggregator.outgoing(name), 1)
    # So is its beginning, by who has nothing yet.
    elsewhere.aggregator.holds("a", -1)
    fresh = federation.copy("a")
    with refused(fresh, "chain"):
        fresh.receive(elsewhere.aggregator.outgoing("a"), 0)


def test_one_silo_that_names_another_past_does_not_count(tmp_path: Path) -> None:
    """It can: it has the key. The others' update counts, and no silo refuses anything."""
    federation = Federation(plan("pad"), tmp_path, THREE)
    for name in "abc":
        federation.begin(name, 0)
    ids = [federation.answer(name, change(ord(name))) for name in "ab"]
    liar = federation.silos["c"]
    history = liar._state.history
    liar._state = replace(liar._state, history=replace(history, chains=(bytes(32),)))
    ids.append(federation.answer("c", change(ord("c"))))
    liar._state = replace(liar._state, history=history)
    federation.commit(1, ids)
    for silo in federation.silos.values():
        silo.receive(federation.aggregator.outgoing(silo._ring.own.name), 1)
        assert set(silo._state.added) == {"a", "b"}


def test_silos_that_were_told_different_stories_cannot_be_added_up(tmp_path: Path) -> None:
    federation = Federation(plan("pad"), tmp_path, THREE)
    for name in "abc":
        federation.begin(name, 0)
    ids = [federation.answer(name, change(ord(name))) for name in "abc"]
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
        with refused(silo, "chain"):
            silo.receive(to(1, second), 2)
    # Nor does who begins anew get over it, on either side.
    federation.aggregator.holds("c", -1)
    whole = catch_up.decode(federation.aggregator.outgoing("c"))
    for links in ((first, second), whole.links):
        fresh = federation.copy("c")
        with refused(fresh, "chain"):
            fresh.receive(replace(whole, links=links).encode(), 2)


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
    three_rounds.aggregator.holds("c", -1)
    whole = catch_up.decode(three_rounds.aggregator.outgoing("c"))
    silo = three_rounds.copy("c")
    silo._initial = lambda: np.nextafter(INITIAL, np.float32(9))
    with refused(silo, "chain", opened=True):
        silo.receive(replace(whole, version=1, links=whole.links[:1]).encode(), 1)


def test_a_model_that_is_made_anew_comes_to_what_was_here(tmp_path: Path, three_rounds: Federation) -> None:
    silo = holding(three_rounds, tmp_path, 2)
    three_rounds.aggregator.holds("c", -1)
    whole = catch_up.decode(three_rounds.aggregator.outgoing("c"))
    first = whole.links[0]
    with refused(silo, "version"):
        silo.receive(replace(whole, version=1, links=(first,)).encode(), 1)
    for links in ((Link(EMPTY), Link(EMPTY), Link(EMPTY)), (first, Link(EMPTY), Link(EMPTY))):
        with refused(silo, "chain", opened=True):
            silo.receive(replace(whole, links=links).encode(), 3)
    np.testing.assert_array_equal(silo.receive(whole.encode(), 3), three_rounds.silos["a"].model)


def test_a_silo_that_lost_its_folder_still_follows_one_chain(three_rounds: Federation, tmp_path: Path) -> None:
    """Another trainer, with a folder of its own or after the first one's is gone; the keys are where they were."""
    three_rounds.aggregator.holds("c", -1)
    whole = catch_up.decode(three_rounds.aggregator.outgoing("c"))
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
    three_rounds.aggregator.holds("c", -1)
    whole = three_rounds.aggregator.outgoing("c")
    silo = three_rounds.copy("a", remembers=True)
    silo.receive(whole, 3)
    (file,) = (three_rounds.keys.silos["a"] / "chains").iterdir()
    assert file.stat().st_mode & 0o077 == 0
    file.write_text("3 00")
    with pytest.raises(ConfigError, match="damaged"):
        three_rounds.copy("a", remembers=True).receive(whole, 3)


# All is authenticated before anything is opened.


@pytest.mark.parametrize("bad", ["calibration", 1, 2, 3])
def test_nothing_is_opened_if_one_piece_is_not_what_silos_sealed(
    bad: str | int, three_rounds: Federation, tmp_path: Path
) -> None:
    """Also where it is the last."""
    three_rounds.aggregator.holds("c", -1)
    whole = catch_up.decode(three_rounds.aggregator.outgoing("c"))
    if isinstance(bad, int):
        changed = Link(ADD, (rewritten(three_rounds, entry_of(three_rounds, bad), bad, one_more),))
        whole = replace(whole, links=(*whole.links[: bad - 1], changed, *whole.links[bad:]))
    else:
        envelope = one_more(envelope_of(three_rounds, whole.calibration, 0, chunks=1))
        whole = replace(whole, calibration=wire.encode(envelope.head, envelope.words, envelope.tag, None))
    silo = three_rounds.copy("c")
    with refused(silo, "tag"):
        silo.receive(whole.encode(), 3)


# What a silo may seal.


def _beyond(silo: EncryptedReplica, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """The silo seals integers so many times as large as clipping allows."""
    packing = type(silo._plan.packing)
    pack = packing.pack
    monkeypatch.setattr(packing, "pack", lambda self, integers: pack(self, integers * np.int32(times)))


def test_values_beyond_the_clipping_range_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = Federation(plan("bfv"), tmp_path, THREE)
    for name in "abc":
        federation.begin(name, 0)
    ids = [federation.answer(name, change(ord(name))) for name in "ab"]
    with monkeypatch.context() as patch:
        _beyond(federation.silos["c"], patch, 100)
        ids.append(federation.answer("c", np.full(LAYOUT.size, 3.0, dtype=np.float32)))
    federation.commit(1, ids)
    with refused(federation.silos["a"], "clipping", opened=True, by=SpoiledSum):
        federation.silos["a"].receive(federation.aggregator.outgoing("a"), 1)


def _on_its_own_grid(silo: EncryptedReplica) -> None:
    silo._state = replace(silo._state, scales=replace(silo._state.scales, exponents=((9, 9, 9),)))


@pytest.mark.parametrize("members", [1, 2])
def test_a_silo_with_a_grid_of_its_own_brings_nothing_and_the_run_goes_on(
    members: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With one honest silo beside it the server cannot tell which grid is the liar's."""
    federation = Federation(plan("pad", members=members), tmp_path, THREE)
    for name in "abc":
        federation.begin(name, 0)
    _on_its_own_grid(federation.silos["c"])
    federation.commit(1, [federation.answer(name, change(ord(name))) for name in "ac"])
    models = [federation.begin(name, 1) for name in "ab"]
    np.testing.assert_array_equal(models[0], models[1])
    close(models[0], INITIAL + (change(ord("a")) if members == 1 else 0))
    assert "c sealed on a grid that nobody agreed on" in caplog.text
    federation.commit(2, [federation.answer(name, change(ord(name))) for name in "ab"])
    models += [federation.begin(name, 2) for name in "ab"]
    np.testing.assert_array_equal(models[2], models[3])
    close(models[2], models[0] + (change(ord("a")) + change(ord("b"))) / 2)


@pytest.mark.parametrize(("liars", "colluding", "spoiled"), [(1, 1, False), (2, 1, True), (2, 2, False)])
def test_so_many_bogus_votes_as_silos_may_lie_change_nothing(
    liars: int, colluding: int, spoiled: bool, tmp_path: Path
) -> None:
    five = dict.fromkeys("abcde", 10)
    federation = Federation(replace(plan("pad", quorum=5), colluding=colluding), tmp_path, five)
    for name in five:
        federation.begin(name, 0)
    ids = []
    for index, name in enumerate(five):
        update = change(ord(name)) * np.float32(1e6 if index < liars else 1)
        ids.append(federation.answer(name, update))
    federation.commit(1, ids)
    federation.begin("e", 1)
    (first, second) = federation.silos["e"]._state.scales.exponents
    assert (max(np.subtract(second, first)) > 10) == spoiled


def test_one_liar_does_not_choose_the_first_grid(tmp_path: Path) -> None:
    federation = Federation(plan("pad"), tmp_path, THREE)
    federation.begin("a", 0)
    honest = federation.silos["a"]._state.scales.exponents
    lied = Federation(plan("pad"), tmp_path, THREE)
    lied.silos["b"]._measure = lambda: (np.full(LAYOUT.size, 1e6, dtype=np.float32), 5, 40)
    lied.aggregator.greet("b", -1, lied.silos["b"].greeting())
    lied.begin("a", 0)
    assert lied.silos["a"]._state.scales.exponents == honest


# The first model.


@pytest.mark.parametrize("pinned", [None, "00" * 32])
def test_a_first_model_that_the_owner_did_not_pin_is_refused(pinned: str | None, tmp_path: Path) -> None:
    federation = Federation(plan("pad"), tmp_path, THREE)
    given: Vector = change(1, size=1.0)
    federation.aggregator._initial = given
    silo = federation.copy("a", first_model=pinned)
    with refused(silo, "first model"):
        silo.receive(federation.aggregator.outgoing("a"), 0)
    for allowed in (hashlib.sha256(given.tobytes()).hexdigest(), "any"):
        np.testing.assert_array_equal(
            federation.copy("a", first_model=allowed).receive(federation.aggregator.outgoing("a"), 0), given
        )


def test_an_order_that_starts_from_a_version_that_is_not_here_is_refused(three_rounds: Federation) -> None:
    with pytest.raises(ProtocolError, match="version 7, which is not here"):
        three_rounds.silos["a"].send(change(1), order("a/9", 7), report(7))
