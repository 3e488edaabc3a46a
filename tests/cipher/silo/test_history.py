"""What a silo remembers of its run."""

from __future__ import annotations

import pytest

from fedsync.cipher.encoding.catch_up import WINDOW, LinkKind
from fedsync.cipher.encoding.sealed_wire import Kind
from fedsync.cipher.silo.history import History, LinkRecords, added_content, digest_of, run_digest
from fedsync.common.errors import ProtocolError
from tests.cipher.messages import head
from tests.cipher.sealers import member

ADD, UNDO, EMPTY = LinkKind.ADD, LinkKind.UNDO, LinkKind.EMPTY


def content(version: int) -> bytes:
    return digest_of(b"content", version.to_bytes(8, "little"))


def state(version: int) -> bytes:
    return digest_of(b"state", version.to_bytes(8, "little"))


def history_of(*kinds: LinkKind) -> History:
    history = History(bytes(32)).begin(content(0), state(0))
    for version, kind in enumerate(kinds, 1):
        entries = ((version, content(version)),) if kind is ADD else ()
        history = history.after(kind, entries, state(version))
    return history


def test_parts_do_not_run_into_each_other() -> None:
    assert len({digest_of(b"ab", b"c"), digest_of(b"a", b"bc"), digest_of(b"abc"), digest_of(b"abc", b"")}) == 4


def test_a_run_is_its_name_specification_epoch_and_group() -> None:
    given = [("a", bytes(32), 1, bytes(16)), ("b", bytes(32), 1, bytes(16)), ("a", b"1" * 32, 1, bytes(16))]
    given += [("a", bytes(32), 2, bytes(16)), ("a", bytes(32), 1, b"1" * 16)]
    assert len({run_digest(*one) for one in given}) == len(given)


def test_each_digest_is_of_all_before_it() -> None:
    usual = history_of(ADD, ADD, ADD).chain(3)
    begun = History(b"1" * 32).begin(content(0), state(0)).after(ADD, ((1, content(1)),), state(1))
    assert begun.chain(1) != history_of(ADD).chain(1), "of the run"
    assert history_of(ADD, EMPTY, ADD).chain(3) != usual, "of what was added"
    other = history_of(ADD).after(ADD, ((2, content(2)),), state(9)).after(ADD, ((3, content(3)),), state(3))
    assert other.chain(3) != usual, "of the states"


def test_the_beginning_is_of_calibration_and_first_model() -> None:
    run = History(bytes(32))
    begun = [run.begin(content(one), state(other)).chain(0) for one, other in ((0, 0), (1, 0), (0, 1))]
    assert len({*begun, History(b"1" * 32).begin(content(0), state(0)).chain(0)}) == 4


def test_what_a_version_adds_is_of_all_members_sums_and_values_in_the_clear() -> None:
    a, b, c = (head("pad", members=(member(0), member(at)), what=Kind.AGGREGATE) for at in (1, 2, 3))
    given = [([a, b], b"1"), ([a, c], b"1"), ([a], b"1"), ([b, a], b"1"), ([a, b], b"2"), ([a, b], b"")]
    assert len({added_content(*one) for one in given}) == len(given)


def test_the_last_versions_are_remembered() -> None:
    history = history_of(*(ADD,) * (WINDOW + 3))
    newest = WINDOW + 3
    assert len(history.chains) == len(history.records.last) == WINDOW
    assert history.chain(newest) == history.chains[-1] == history.known()[newest]
    assert history.chain(newest - WINDOW) is None and history.chain(newest - WINDOW + 1) == history.chains[0]
    assert history.chain(newest + 1) is None and history.chain(-1) is None


def test_taking_back_begins_with_the_newest_and_passes_over_versions_that_brought_nothing() -> None:
    records = history_of(ADD, ADD, EMPTY, ADD, EMPTY).records
    after = records.after(UNDO, ((4, content(4)), (2, content(2))))
    assert [one.kind for one in after.last] == [EMPTY, ADD, ADD, EMPTY, ADD, EMPTY, UNDO]
    with pytest.raises(ProtocolError, match="undo"):
        after.after(UNDO, ((1, content(1)),))
    for wrong in (((2, content(2)),), ((4, content(2)),), ((4, content(4)), (4, content(4))), ((0, content(0)),)):
        with pytest.raises(ProtocolError, match="undo"):
            records.after(UNDO, wrong)


def test_what_is_forgotten_is_not_taken_back() -> None:
    records = history_of(*(ADD,) * (WINDOW + 1)).records
    entries = tuple((version, content(version)) for version in range(WINDOW + 1, 0, -1))
    with pytest.raises(ProtocolError, match="no longer stored"):
        records.after(UNDO, entries)
    records.after(UNDO, entries[:-1])


def test_a_history_fits_one_state() -> None:
    for history in (history_of(), history_of(ADD), history_of(ADD, EMPTY)):
        assert history.fits(state(history.records.newest))
        assert not history.fits(state(99))
    assert not History(bytes(32)).fits(state(0))
    cut = history_of(ADD, ADD)
    cut = History(cut.run, LinkRecords(2, cut.records.last[-1:]), cut.chains[-1:])
    assert not cut.fits(state(2)), "without the version before nobody can tell"


def test_it_comes_back_from_bytes() -> None:
    history = history_of(ADD, ADD, EMPTY)
    history = history.after(UNDO, ((2, content(2)),), state(4))
    data = history.to_bytes()
    assert History.from_bytes(data + b"more") == (history, len(data))
    assert History.from_bytes(History(bytes(32)).to_bytes())[0] == History(bytes(32))


def test_half_of_it_or_more_versions_than_there_were_are_refused() -> None:
    whole = history_of(ADD, ADD).to_bytes()
    fewer, more = bytearray(whole), bytearray(whole)
    fewer[0] = 1
    more[44 + 8], more[8:12] = 9, (WINDOW + 1).to_bytes(4, "little")
    for data in (*(whole[:cut] for cut in (0, 10, 50, -1)), bytes(fewer), bytes(more)):
        with pytest.raises(ValueError, match="history"):
            History.from_bytes(data)
