"""What a silo refuses of sums that are authentic: of whom they are, on what they build, and where they belong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsync.cipher.encoding import sealed_wire as wire
from fedsync.cipher.encoding.catch_up import WINDOW, CatchUp, LinkEntry, LinkKind, Start
from fedsync.cipher.encoding.tally import Contribution, build
from fedsync.cipher.keys.keyring import Ring
from fedsync.cipher.keys.material import SiloKeys
from fedsync.cipher.silo.catch_up_checks import CatchUpReader, ReadEntry, ReadLink, alike_members
from fedsync.cipher.silo.history import History, digest_of
from fedsync.cipher.silo.replica_state import SEEN, ReplicaState, Scales
from fedsync.cipher.silo.sealing import Serial, seal_pieces
from fedsync.cipher.suites.suite import PAD, Member
from fedsync.common.errors import ProtocolError, SpoiledSum
from tests.cipher.given_keys import group_of
from tests.cipher.make import Federation, plan
from tests.cipher.messages import head

A, B, C = (SiloKeys.generate(name) for name in "abc")
RUN = bytes(32)
WORDS = np.zeros((2, PAD.words), dtype=np.uint64)


# Where links belong: no key is needed to see it.


def reader(kind: str = "pad", members: int = 2) -> CatchUpReader:
    nobody: Any = None
    return CatchUpReader(plan(kind, members=members), Ring(A, group_of(A, B, C)), nobody, RUN)


def chain_of(version: int) -> bytes:
    return digest_of(version.to_bytes(8, "little"))


def state(version: int, added: dict[str, tuple[int, ...]] | None = None) -> ReplicaState:
    """A silo's after so many versions that brought nothing; D of each is made up."""
    history = History(RUN).begin(RUN, RUN)
    for _ in range(version):
        history = history.after(LinkKind.EMPTY, (), RUN)
    first = version + 1 - len(history.chains)
    history = replace(history, chains=tuple(chain_of(at) for at in range(first, version + 1)))
    return ReplicaState(version, np.zeros(1, np.float32), Scales(((0,),)), added or {}, history)


def adding(version: int, *members: Member) -> ReadLink:
    envelope = wire.Envelope(head("pad", members=members, what=wire.Kind.AGGREGATE), WORDS, wire.NO_TAG)
    entry = ReadEntry(version, RUN, (envelope,), np.empty(0, np.float32), None, envelope.head.members)
    return ReadLink(LinkKind.ADD, (entry,))


def of(update_id: str, base: int = 3, chain: bytes | None = None) -> Member:
    return Member(update_id, base, update_id.encode().ljust(16)[:16], chain_of(base) if chain is None else chain)


def refuses(links: list[ReadLink], base: ReplicaState | None, members: int = 2) -> str:
    try:
        reader(members=members)._place(links, base)
    except ProtocolError as error:
        return error.check
    return ""


@pytest.mark.parametrize(
    ("members", "check"),
    [
        ((of("a/1"), of("b/1")), ""),
        ((of("a/1"), of("b/1", 0)), ""),
        ((of("a/1"),), "members"),
        ((of("a/1"), of("a/2")), "members"),  # two updates of one silo
        ((of("a/1"), of("z/1")), "members"),  # of a stranger
        ((of("a/1"), of("b/x")), "members"),
        ((of("a/1"), of("b/-1")), "members"),
        ((of("a/1"), of("b/0")), "members"),  # a calibration
        ((of("a/1"), of("b/7")), "members"),  # added before
        ((of("a/1"), of("b/07")), "members"),  # the same under another name
        ((of("a/1"), of("b/1", 4)), "chain"),  # from the version that it leads to
        ((of("a/1"), of("b/1", 9)), "chain"),
        ((of("a/1"), of("b/1", 2, RUN)), ""),  # from another past: one silo may lie, which is seen in the end
    ],
)
def test_who_is_in_a_version(members: tuple[Member, ...], check: str) -> None:
    assert refuses([adding(4, *members)], state(3, {"b": (7,)})) == check


def test_serials_of_late_are_remembered_and_older_ones_count_as_added() -> None:
    links = [adding(4, of("a/1"), of("b/8")), adding(5, of("a/2"), of("b/5"))]
    assert refuses(links, state(3, {"b": (5, 7)})) == "members"
    seen = tuple(range(10, 10 + SEEN))
    assert refuses([adding(4, of("a/1"), of("b/9"))], state(3, {"b": seen})) == "members"
    assert refuses([adding(4, of("a/1"), of("b/9"))], state(3, {"b": seen[1:]})) == ""


@pytest.mark.parametrize(("base", "check"), [(WINDOW + 10 - WINDOW + 1, ""), (WINDOW + 10 - WINDOW, "chain")])
def test_an_update_from_a_version_that_is_not_remembered_is_refused(base: int, check: str) -> None:
    newest = WINDOW + 10
    assert refuses([adding(newest + 1, of("a/1", newest), of("b/1", base))], state(newest)) == check


def test_more_silos_than_may_lie_came_another_way() -> None:
    links = [adding(5, of("a/2", 4, b"1" * 32), of("b/2", 4, RUN))]
    assert refuses(links, state(4)) == ""
    members = [member for link in links for entry in link.entries for member in entry.members]
    alike_members(members, {4: RUN}, 1)
    with pytest.raises(SpoiledSum, match="a computed another version"):
        alike_members(members, {4: RUN}, 0)
    alike_members(members, {3: RUN}, 0)  # of a version that it does not know it says nothing


def test_masks_of_one_round_are_on_one_sum() -> None:
    masked = reader("masked")
    sums = tuple(envelope for _ in range(2) for envelope in adding(1, of("a/1")).entries[0].sums)
    with pytest.raises(ProtocolError, match="2 sums under masks"):
        masked._unmasker(LinkEntry(1, (b"", b""), reveals=b""), sums)


# Calibrations, which silos that lie have sealed.


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return Federation(plan("pad", members=2), tmp_path_factory.mktemp("reading"), dict.fromkeys("abc", 10))


def calibration(federation: Federation, names: str = "ab", **changes: Any) -> bytes:
    """That of these silos; all of them change the same."""
    server, envelopes = federation.aggregator, []
    grid = federation.plan.grid(changes.pop("exponents", federation.plan.first_exponents))
    attempt = changes.pop("attempt", 0)
    for number, name in enumerate(names):
        silo = federation.silos[name]
        member = Member(
            f"{name}{changes.get('suffix', '/0')}", changes.get("round", 0), bytes([number] * 16), silo._run
        )
        header = build(Contribution(1, federation.plan.first_exponents), federation.plan.cap)
        slots = next(grid.pack(header, np.zeros(0, np.int32)))
        sealer = Serial(silo._sealer)
        made = bytearray(
            b"".join(seal_pieces(silo._head(member, grid, 1, attempt), [slots], sealer, silo._authenticator, None))
        )
        expected = wire.Expected(
            wire.Kind.UPDATE, PAD, federation.plan.packing, name, member.round, attempt, server._keys.epoch,
            server._keys.fingerprint, None, 1,
        )  # fmt: skip
        envelopes.append(wire.decode(bytes(made), expected))
    return server._total(envelopes, 0, 1)


Lie = Callable[[Federation], bytes]
LIES: dict[str, tuple[Lie, str]] = {
    "of another model": (lambda f: calibration(f, exponents=(5, 5, 5)), "calibration"),
    "of an attempt": (lambda f: calibration(f, attempt=1), "calibration"),
    "of updates": (lambda f: calibration(f, suffix="/1"), "members"),
    "of a later version": (lambda f: calibration(f, round=1), "members"),
    "of strangers": (lambda f: calibration(f, suffix="z/0"), "members"),
    "of one silo": (lambda f: calibration(f, "a"), "members"),
}


def begin(federation: Federation, sealed: bytes) -> None:
    federation.copy("c").receive(CatchUp(Start.HELD, -1, 0, (), b"", sealed).encode(), 0)


@pytest.mark.parametrize("lie", LIES)
def test_a_calibration_that_is_none_is_not_opened(lie: str, federation: Federation) -> None:
    make, check = LIES[lie]
    begin(federation, calibration(federation))  # an honest one is
    with pytest.raises(ProtocolError) as caught:
        begin(federation, make(federation))
    assert caught.value.check == check


def test_what_travels_in_the_clear_is_taken_back_too(tmp_path: Path) -> None:
    federation = Federation(plan("pad", only=("head.*",)), tmp_path, dict.fromkeys("ab", 10))
    before = federation.begin("a", 0).copy()
    federation.begin("b", 0)
    ones = np.ones(len(before), dtype=np.float32)
    federation.aggregator.savepoint()
    federation.commit(1, [federation.answer(name, ones) for name in "ab"])
    federation.aggregator.rollback()
    np.testing.assert_allclose(federation.begin("a", 2), before, atol=1e-3)
