"""A silo opens nothing of a message that is not what silos sealed, on any path: the suite is not even called."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsync.cipher.encoding import catch_up
from fedsync.cipher.encoding import sealed_wire as wire
from fedsync.cipher.encoding.catch_up import CatchUp, Link, Piece
from fedsync.cipher.server.inbox import Gathered
from fedsync.cipher.silo.replica import EncryptedReplica
from fedsync.common.errors import ProtocolError
from tests.cipher.lying_server import Change, one_more
from tests.cipher.make import INITIAL, Federation, change, close, order, plan, report
from tests.cipher.sealers import KINDS
from tests.cipher.silo.chains import openings, refused

OTHER = bytes(range(32))


def header(**fields: object) -> Change:
    return lambda envelope: replace(envelope, head=replace(envelope.head, **fields))  # type: ignore[arg-type]


def member(**fields: object) -> Change:
    """The last member is told otherwise."""

    def changed(envelope: wire.Envelope) -> wire.Envelope:
        *others, last = envelope.head.members
        named = (*others, replace(last, **fields))  # type: ignore[arg-type]  # one field at a time
        return replace(envelope, head=replace(envelope.head, members=named))

    return changed


# Other changes are in `tests.cipher.encoding.test_integrity`.
CHANGES: dict[str, Change] = {
    "the last word": one_more,
    "the tag": lambda of: replace(of, tag=(of.tag[0] ^ 1, of.tag[1])),
    "another attempt": header(attempt=1),
    "a member's chain": member(chain=OTHER),
    "a member's annex": member(annex=OTHER),
    "a member is left out": lambda of: replace(of, head=replace(of.head, members=of.head.members[:-1])),
}


EARLIER = {
    "another attempt": "calibration",
    "a member's chain": "chain",
    "a member is left out": "members",
    "a member's annex": "reveals",
}
"""What is noticed before tags are looked at, in some messages."""


def rewritten(piece: Piece, change: Change, silo: EncryptedReplica, version: int, chunks: int) -> bytes:
    """A sum's message after a change, as a server with the code can write it."""
    envelope = change(silo._reader._decode(piece, version, chunks))
    return wire.encode(envelope.head, envelope.words, envelope.tag, None)


@pytest.fixture(scope="module", params=KINDS)
def federation(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """Three silos after one commit, of which none has been sent the sum."""
    made = Federation(plan(request.param), tmp_path_factory.mktemp("authentic"), dict.fromkeys("abc", 10))
    made.begin_all("abc", 0)
    made.commit(1, made.answer_all("abc"))
    made.unmask()
    return made


def with_sum(received: CatchUp, *sums: Piece) -> CatchUp:
    (link,) = received.links
    return replace(received, links=(Link(link.kind, (replace(link.entries[0], sums=sums),)),))


@pytest.mark.parametrize("place", ["sum", "calibration"])
@pytest.mark.parametrize("what", CHANGES)
def test_nothing_is_opened_of_what_was_changed(federation: Federation, what: str, place: str) -> None:
    if place == "sum":
        silo = federation.silos["a"]
        received = catch_up.decode(federation.aggregator.outgoing("a"))
        (honest,) = received.links[0].entries[0].sums
        sent = with_sum(received, rewritten(honest, CHANGES[what], silo, 1, federation.plan.chunks))
    else:
        silo = federation.copy("a")
        received = catch_up.decode(federation.aggregator.outgoing("nobody yet"))
        sent = replace(received, calibration=rewritten(received.calibration, CHANGES[what], silo, 0, 1))
    with refused(silo, "tag", EARLIER.get(what, "tag")):
        silo.receive(sent.encode(), 1)


def test_every_sum_of_a_version_is_authenticated_and_not_only_the_first(federation: Federation) -> None:
    silo = federation.silos["a"]
    received = catch_up.decode(federation.aggregator.outgoing("a"))
    (link,) = received.links
    (honest,) = link.entries[0].sums

    def strange(envelope: wire.Envelope) -> wire.Envelope:
        named = tuple(replace(one, update_id=f"{one.silo}/9") for one in envelope.head.members)
        return replace(envelope, head=replace(envelope.head, members=named))

    changed = rewritten(honest, strange, silo, 1, federation.plan.chunks)
    with refused(silo, "tag"):
        silo.receive(with_sum(received, honest, changed).encode(), 1)


@pytest.mark.parametrize(
    "update_id", ["b/9", "a/0", "a/09", "a/-9", "a/x", "a/", "a", "/9", "9", "b/a/9", "a/9/9", "a/\u0669"]
)
def test_a_silo_seals_under_its_own_name_only(federation: Federation, update_id: str) -> None:
    """Else three updates of one silo would pass for those of three: the sum of one silo seems to be of enough."""
    silo = federation.silos["a"]
    with pytest.raises(ProtocolError) as caught:
        silo.send(change(1), order(update_id, 0), report(0))
    assert caught.value.check == "update id"


def test_what_was_not_changed_is_opened(federation: Federation) -> None:
    """The spy sees it, and what is refused above is refused for its change."""
    silo = federation.copy("b")
    received = catch_up.decode(federation.aggregator.outgoing("nobody yet"))
    (link,) = received.links
    same = rewritten(link.entries[0].sums[0], lambda envelope: envelope, silo, 1, federation.plan.chunks)
    with openings(silo) as calls:
        silo.receive(with_sum(received, same).encode(), 1)
    assert calls and silo.holds == 1


@pytest.mark.parametrize("cut", [("a", "b", "c"), ("ab", "c")])
def test_sums_of_too_few_are_not_opened(cut: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version had enough, in one sum for each silo: every silo decrypted each update alone."""
    federation, gather = Federation(plan("pad", members=2), tmp_path, dict.fromkeys("abc", 10)), Gathered.of

    def parts(*given: Any) -> Gathered:
        (envelopes,) = gather(*given).by_grid.values()
        sums = {names.encode(): [one for one in envelopes if one.head.sender in names] for names in cut}
        return replace(gather(*given), by_grid=sums)

    monkeypatch.setattr(Gathered, "of", parts)
    federation.run_round(0)
    opened = [change(ord(name)) for names in cut for name in names if len(names) > 1]
    with openings(federation.silos["a"]) as calls:
        close(federation.begin("a", 1), INITIAL + np.mean(opened, axis=0) if opened else INITIAL)
    assert bool(calls) == bool(opened)
