"""What an annex hides, and shares that a server makes up out of other annexes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest

from fedsync.cipher.masking.annex import Annex
from fedsync.cipher.masking.mask_round import MaskRound, RevealAnswer, RevealQuestion, Survivors
from fedsync.common.errors import ProtocolError
from tests.cipher.masking.rounds import CONTEXT, LONG, NAMES, PAIRS, WORK, roster, rounds, survivors_of

OTHER = hashlib.sha256(b"another attempt").digest()


def test_no_seed_is_in_an_annex() -> None:
    """The server reads it: with a seed in it, it would take the mask off itself."""
    for one in rounds().values():
        assert one._seeds.own not in one.annex
        assert not any(seed in one.annex for seed in one._seeds.pairs.values())


def test_shares_of_no_two_updates_and_holders_are_sealed_alike() -> None:
    """Where a disk is set back, keys come again, and with them a nonce that followed from anything would."""
    annexes = [Annex.unpack(rounds()["silo0"].annex, "silo0", "silo0") for _ in range(2)]
    nonces = [sealed[:12] for annex in annexes for sealed in annex.sealed.values()]
    assert len(set(nonces)) == 2 * (len(NAMES) - 1)


def told(of: dict[str, MaskRound], other: MaskRound, dropped: Sequence[str] = ()) -> RevealAnswer:
    """What silo0 tells where the list has another annex of silo4: nobody but silo4 knows which it sealed."""
    names = [name for name in NAMES if name not in dropped]
    whole = survivors_of({**of, "silo4": other}, names)
    listed = Survivors(CONTEXT, whole.annexes)
    signatures = {name: of[name].sign(listed) for name in names if name != "silo4"}
    return of["silo0"].reveal(RevealQuestion(CONTEXT, signatures, {"silo4": other.annex}))


def test_shares_are_told_of_an_update_in_the_same_context_and_under_the_same_roster() -> None:
    """In another context the others may have told the other kind of mask. Fewer silos have a lower threshold."""
    of = rounds()
    assert told(of, of["silo4"]).shares.keys() == {"silo4"}
    elsewhere = MaskRound(PAIRS["silo4"], roster(), OTHER, *WORK)
    smaller = MaskRound(PAIRS["silo4"], roster(("silo0", "silo1", "silo4")), CONTEXT, *WORK)
    for other in (elsewhere, smaller):
        with pytest.raises(ProtocolError, match="of another context"):
            told(rounds(), other)


def test_a_signed_list_is_of_one_context() -> None:
    listed = survivors_of(rounds(), NAMES)
    signature = listed.sign(LONG["silo0"])
    assert listed.signed_by(LONG["silo0"].public.signing, signature)
    assert not Survivors(OTHER, listed.annexes).signed_by(LONG["silo0"].public.signing, signature)
