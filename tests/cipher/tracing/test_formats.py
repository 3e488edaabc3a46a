"""Slips, notices, files of updates and consents: what was written is read, and anything else is refused."""

import contextlib
import random
from dataclasses import replace
from pathlib import Path

import pytest

from fedsync.cipher.encoding import sealed_wire as wire
from fedsync.cipher.masking.annex import SECRET_BYTES
from fedsync.common.errors import ProtocolError
from fedsync.extras.tracing.consent import Consent, Consents, give_consent, needed
from fedsync.extras.tracing.disclosure import Disclosure, KeptUpdate, disclose
from fedsync.extras.tracing.notice import Notice
from tests.cipher.messages import KEYS, expected, head, message

HEAD = head("pad")
UPDATE = wire.decode(message(HEAD), expected(HEAD))
SENDERS = {KEYS.name: KEYS.public.signing}
NOTICE = Notice(
    "run-1", 8, 2, (replace(UPDATE, words=UPDATE.words[:0]),), b"clear", b"roster", {"a": bytes(SECRET_BYTES)}
)


def test_an_envelope_gives_its_message_and_its_slip_back() -> None:
    assert b"".join(wire.pieces(UPDATE)) == message(HEAD)
    slip = wire.slip(UPDATE)
    read = wire.read_slip(slip, expected(HEAD))
    assert (read.head, read.tag, read.signature) == (UPDATE.head, UPDATE.tag, UPDATE.signature)
    assert len(slip) < 500
    for at in range(0, len(slip), 7):
        with pytest.raises(ProtocolError):
            wire.read_slip(slip[:at] + bytes([slip[at] ^ 1]) + slip[at + 1 :], expected(HEAD))


def test_a_notice_comes_back_and_says_what_it_is_about() -> None:
    read = Notice.read(NOTICE.encode(), SENDERS)
    assert (read.run, read.version, read.members, read.clear, read.roster, read.seeds) == (
        *("run-1", 8, 2, b"clear", b"roster"),
        {"a": bytes(SECRET_BYTES)},
    )
    assert read.matter == NOTICE.matter
    assert replace(NOTICE, clear=b"other").matter != NOTICE.matter
    twice = replace(NOTICE, updates=NOTICE.updates * 2).encode()
    for data, senders in ((twice, SENDERS), (NOTICE.encode(), {}), (NOTICE.encode(), {KEYS.name: bytes(32)})):
        with pytest.raises(ProtocolError):
            Notice.read(data, senders)


def kept_in(file: Path) -> KeptUpdate:
    """An update as it came, with values in the clear behind it."""
    file.write_bytes(message(HEAD) + b"in the clear")
    return KeptUpdate(UPDATE.head.members[0].update_id, UPDATE.head.nbytes, file)


def test_an_update_takes_no_room_twice_on_its_way_to_the_examiner(tmp_path: Path) -> None:
    disclose(tmp_path / "out", NOTICE.encode(), [b"one", b"two"], [kept_in(tmp_path / "8.0.updates")] * 2)
    read = Disclosure.open(tmp_path / "out")
    assert read.notice == NOTICE.encode() and read.consents == (b"one", b"two")
    name = UPDATE.head.members[0].update_id
    assert [(found, bytes(data)) for found, data in read.updates] == [(name, message(HEAD))] * 2


@pytest.mark.parametrize("seed", range(40))
def test_hostile_bytes_are_refused_and_nothing_else_happens(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    disclose(tmp_path / "out", NOTICE.encode(), [b"one"], [kept_in(tmp_path / "kept")])
    whole = (tmp_path / "out").read_bytes()
    for data in (NOTICE.encode(), whole):
        at = rng.randrange(min(len(data), 700))
        cut = rng.choice([data[: at + 1], data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at + 8 :], data[at:]])
        (tmp_path / "lie").write_bytes(cut)
        for read in (lambda cut=cut: Notice.read(cut, SENDERS), lambda: Disclosure.open(tmp_path / "lie")):
            with contextlib.suppress(ProtocolError):
                read()


@pytest.mark.parametrize(
    ("silos", "members", "wanted"), [(1, 1, 1), (2, 1, 2), (3, 2, 2), (4, 2, 3), (5, 2, 3), (5, 5, 5)]
)
def test_more_than_half_and_no_fewer_than_a_version_has_updates(silos: int, members: int, wanted: int) -> None:
    assert needed(silos, members) == wanted


def test_a_consent_comes_back_and_counts_once() -> None:
    matter = NOTICE.matter
    mine = give_consent(KEYS, matter, {KEYS.name: KEYS.public}, {"silo1": bytes(SECRET_BYTES)})
    again = Consent.read(mine.canonical())
    assert again == mine and again.pair_seeds(KEYS) == {"silo1": bytes(SECRET_BYTES)}
    found = Consents.read([("a", mine.canonical()), ("b", mine.canonical())], matter, SENDERS, KEYS.name)
    assert list(found.by_silo) == [KEYS.name] and not found.refused
    with pytest.raises(ProtocolError, match="1 of 3"):
        found.check(3, 1)
    for field in ("masks", "examiners", "content", "version"):
        other = {"masks": {}, "examiners": ("silo1",), "content": bytes(32), "version": 9}[field]
        lie = mine.model_copy(update={field: other}).canonical()
        assert "not signed" in Consents.read([("a", lie)], matter, SENDERS, KEYS.name).refused[0]
