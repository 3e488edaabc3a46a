"""Whoever is lost between upload and reveal, the sum opens, if enough silos are left; and nothing else opens."""

import contextlib
import hashlib
import itertools
from dataclasses import replace

import numpy as np
import pytest

from fedsync.cipher.encoding.fields import unpack_frames, unpack_named
from fedsync.cipher.masking.annex import Annex, Seeds, join, open_shares
from fedsync.cipher.masking.mask_round import (
    MaskRound,
    RevealAnswer,
    RevealQuestion,
    SignAnswer,
    Survivors,
    read_answer,
    read_question,
)
from fedsync.cipher.masking.unmask import Unmasking
from fedsync.common.errors import ProtocolError
from tests.cipher.masking.rounds import CONTEXT, MEMBERS, NAMES, PAIRS, WORK, Carried, answer, rounds, survivors_of

SIGNING = {name: keys.signing for name, keys in MEMBERS.items()}
FOUR = NAMES[:4]


def seeds_in(opening: bytes | None, name: str) -> Seeds:
    assert opening is not None
    return Seeds.unpack(unpack_frames(unpack_named(opening, "server")[name], "server", 2)[1], "server")


def expected(of: dict[str, MaskRound], name: str, survivors: tuple[str, ...]) -> Seeds:
    return of[name]._seeds.only(sorted(set(of) - set(survivors)))


@pytest.mark.parametrize("survivors", [NAMES, FOUR, NAMES[1:]])
def test_all_seeds_come_together_without_a_word_too_many(survivors: tuple[str, ...]) -> None:
    of = rounds()
    carried = Carried(of, survivors)
    opening = carried.run()
    assert [seeds_in(opening, name) for name in survivors] == [expected(of, name, survivors) for name in survivors]
    asked = [kind for _, kind in carried.asked]
    assert asked.count(Survivors) == len(survivors) and asked.count(RevealQuestion) == 4


@pytest.mark.parametrize("victim", NAMES)
@pytest.mark.parametrize("kind", [Survivors, RevealQuestion])
def test_one_of_five_lost_before_it_signs_or_before_it_reveals_costs_nothing(victim: str, kind: type) -> None:
    of = rounds()
    opening = Carried(of, lost=lambda name, question: name == victim and isinstance(question, kind)).run()
    assert all(seeds_in(opening, name) == expected(of, name, NAMES) for name in NAMES)


def test_lost_after_another_helper_revealed_shares_are_asked_for_again() -> None:
    """The first four signed; the fourth is lost when the others have answered: the fifth, who signed since, helps."""
    of = rounds()
    server = Carried(of).server
    for name, question in server.questions().items():
        server.answer(name, answer(of[name], question))
    first = server.questions()
    assert sorted(first) == list(FOUR)
    for name in NAMES[:3]:
        server.answer(name, answer(of[name], first[name]))
    server.give_up(NAMES[3])
    again = server.questions()
    assert sorted(again) == [*NAMES[:3], NAMES[4]]
    question = read_question(again[NAMES[0]])
    assert isinstance(question, RevealQuestion) and question.lost.keys() == {NAMES[3]}
    for name, payload in again.items():
        server.answer(name, answer(of[name], payload))
    assert server.done
    assert all(seeds_in(server.opening(), name) == expected(of, name, NAMES) for name in NAMES)


def test_two_of_five_or_one_of_three_are_too_many() -> None:
    for lost in ({"silo1", "silo4"}, {"silo0", "silo1"}):
        for kind in (Survivors, RevealQuestion):
            of = rounds()
            carried = Carried(of, lost=lambda name, question: name in lost and isinstance(question, kind))  # noqa: B023
            assert carried.run() is None
            assert carried.server.closed and carried.server.questions() == {}
    three = rounds(NAMES[:3])
    assert Carried(three, NAMES[:3]).run() is not None
    assert Carried(rounds(NAMES[:3]), NAMES[:3], lost=lambda name, question: name == "silo0").run() is None


def test_who_is_lost_after_it_told_all_is_not_missed() -> None:
    of = rounds(NAMES[:3])
    server = Carried(of, NAMES[:3]).server
    for told in (False, True):
        for name, question in server.questions().items():
            server.answer(name, answer(of[name], question))
            if told:
                server.give_up(name)
    assert server.done and server.opening() is not None


@pytest.mark.parametrize("colluding", [0, 2])
def test_other_numbers_of_silos_on_the_server_s_side(colluding: int) -> None:
    """k = 0: t = 3 of 5, two may be lost. k = 2: t = 4."""
    of = rounds(colluding=colluding)
    carried = Carried(of, lost=lambda name, question: name in NAMES[3 + colluding // 2 :], colluding=colluding)
    assert seeds_in(carried.run(), "silo4") == expected(of, "silo4", NAMES)


def test_shares_of_too_few_silos_say_nothing() -> None:
    of = rounds()
    annex = Annex.unpack(of["silo4"].annex, "silo4", "silo4")
    shares = {n: open_shares(annex, "silo4", PAIRS["silo4"].public, PAIRS[name]) for n, name in enumerate(FOUR, 1)}
    assert join({n: one.own for n, one in shares.items()}) == of["silo4"]._seeds.own
    for few in itertools.combinations(shares, 3):
        with contextlib.suppress(ValueError):
            assert join({n: shares[n].own for n in few}) != of["silo4"]._seeds.own


def test_shares_are_read_by_the_silo_that_they_are_for() -> None:
    """Not even those that silo0 dealt to silo4 come back as silo4's, though the two agree on one secret."""
    of = rounds()
    annex, dealt = (Annex.unpack(of[name].annex, name, name) for name in ("silo4", "silo0"))
    swapped, mirrored = (
        replace(annex, sealed={**annex.sealed, "silo0": other})
        for other in (annex.sealed["silo1"], dealt.sealed["silo4"])
    )
    elsewhere = replace(annex, context=bytes(32))
    for bad, own in ((swapped, "silo0"), (mirrored, "silo0"), (elsewhere, "silo0"), (annex, "silo4")):
        with pytest.raises(ProtocolError, match="not for this silo"):
            open_shares(bad, "silo4", PAIRS["silo4"].public, PAIRS[own])


# What a silo refuses to sign and to reveal.


def signed(of: dict[str, MaskRound], names: tuple[str, ...], signers: tuple[str, ...]) -> dict[str, bytes]:
    survivors = survivors_of(of, names)
    return {name: of[name].sign(survivors) for name in signers}


def reveal(of: dict[str, MaskRound], name: str, signatures: dict[str, bytes], *lost: str) -> RevealAnswer:
    return of[name].reveal(RevealQuestion(CONTEXT, signatures, {one: of[one].annex for one in lost}))


def test_a_silo_signs_one_list_for_ever() -> None:
    of = rounds()
    one = of["silo0"].sign(survivors_of(of, NAMES))
    assert of["silo0"].sign(survivors_of(of, NAMES)) == one
    with pytest.raises(ProtocolError, match="second list"):
        of["silo0"].sign(survivors_of(of, FOUR))
    # The same names, and another update of one of them.
    with pytest.raises(ProtocolError, match="second list"):
        of["silo0"].sign(survivors_of({**of, "silo1": rounds()["silo1"]}, NAMES))


@pytest.mark.parametrize("names", [(), ("silo0", "silo1"), ("silo1", "silo2", "silo3")])
def test_lists_that_would_tell_too_much_are_not_signed(names: tuple[str, ...]) -> None:
    of = rounds()
    with pytest.raises(ProtocolError, match="survivors"):
        of["silo0"].sign(survivors_of(of, names))


def test_lists_of_strangers_other_contexts_or_another_own_update_are_not_signed() -> None:
    of = rounds()
    good = survivors_of(of, NAMES)
    other = {**good.annexes, "silo0": bytes(32)}
    stranger = {**good.annexes, "stranger": bytes(32)}
    for bad in (Survivors(CONTEXT, other), Survivors(CONTEXT, stranger), replace(good, context=bytes(32))):
        with pytest.raises(ProtocolError, match="survivors"):
            of["silo0"].sign(bad)


def test_nothing_is_revealed_without_enough_signatures_of_the_list_that_was_signed() -> None:
    of = rounds()
    with pytest.raises(ProtocolError, match="before a list was signed"):
        reveal(of, "silo0", {})
    signatures = signed(of, NAMES, NAMES)
    elsewhere = rounds(context=hashlib.sha256(b"another").digest())
    forged = elsewhere["silo3"].sign(survivors_of(elsewhere, NAMES))
    three = {name: signatures[name] for name in NAMES[:3]}
    assert reveal(of, "silo0", {**three, "silo4": signatures["silo4"]}).seeds.own == of["silo0"]._seeds.own
    for bad, reason in (
        (three, "3 signatures, 4 are needed"),
        ({**three, "silo3": signatures["silo2"]}, "'silo3' did not sign the same list"),
        ({**three, "silo3": forged}, "'silo3' did not sign the same list"),
        ({**three, "stranger": signatures["silo3"]}, "'stranger' did not sign"),
    ):
        with pytest.raises(ProtocolError, match=reason):
            reveal(of, "silo0", bad)


def test_seeds_and_shares_of_one_kind_are_told_of_one_silo() -> None:
    of = rounds()
    told = reveal(of, "silo0", signed(of, FOUR, FOUR), "silo2", "silo3")
    assert told.seeds == Seeds(of["silo0"]._seeds.own, {"silo4": of["silo0"]._seeds.pairs["silo4"]})
    assert told.shares.keys() == {"silo2", "silo3"}
    assert all(one.pairs.keys() == {"silo4"} for one in told.shares.values())


@pytest.mark.parametrize("lost", ["silo4", "silo0", "stranger"])
def test_no_shares_of_who_is_not_in_the_list_are_told(lost: str) -> None:
    of = rounds()
    signatures = signed(of, FOUR, FOUR)
    annexes = {lost: of[lost].annex if lost in of else b""}
    with pytest.raises(ProtocolError, match="shares"):
        of["silo0"].reveal(RevealQuestion(CONTEXT, signatures, annexes))


def test_a_silo_whose_book_was_set_back_masks_twice_alike_and_the_second_update_stays_masked() -> None:
    """The pair masks are the same. But the others signed the list with the first update, and sign no other."""
    of = rounds()
    signatures = signed(of, NAMES, NAMES)
    again = MaskRound(PAIRS["silo0"], of["silo0"]._roster, CONTEXT, *WORK)
    assert again._seeds.pairs == of["silo0"]._seeds.pairs and again._seeds.own != of["silo0"]._seeds.own
    second = survivors_of({**of, "silo0": again}, NAMES)
    again.sign(second)
    with pytest.raises(ProtocolError, match="did not sign the same list"):
        again.reveal(RevealQuestion(CONTEXT, signatures, {}))
    for name in NAMES[1:]:
        with pytest.raises(ProtocolError, match="second list"):
            of[name].sign(second)
        with pytest.raises(ProtocolError, match="not the one in the list"):
            of[name].reveal(RevealQuestion(CONTEXT, signatures, {"silo0": again.annex}))


# What the server does not believe.


def test_the_server_does_without_a_silo_that_tells_nonsense() -> None:
    of = rounds()
    server = Carried(of).server
    questions = server.questions()
    wrong = SignAnswer(CONTEXT, bytes(64)).encode()
    with pytest.raises(ProtocolError, match="not that of the list"):
        server.answer("silo0", wrong)
    server.give_up("silo0")
    for name in NAMES[1:]:
        server.answer(name, answer(of[name], questions[name]))
    reveals = server.questions()
    assert sorted(reveals) == list(NAMES[1:])
    good = read_answer("silo1", answer(of["silo1"], reveals["silo1"]))
    assert isinstance(good, RevealAnswer)
    for bad in (
        replace(good, seeds=Seeds(bytes(32), {})),
        replace(good, seeds=Seeds(good.seeds.own, {"silo0": bytes(32)})),
        replace(good, shares={}),
        replace(good, shares={"silo0": Seeds(good.shares["silo0"].own, {"silo2": bytes(33)})}),
    ):
        with pytest.raises(ProtocolError, match="silo1"):
            server.answer("silo1", bad.encode())
    for name in NAMES[1:]:
        server.answer(name, answer(of[name], reveals[name]))
    assert seeds_in(server.opening(), "silo0") == expected(of, "silo0", NAMES)


def test_answers_about_another_sum_change_nothing_and_others_are_refused() -> None:
    of = rounds()
    server = Carried(of, FOUR).server
    server.questions()
    server.answer("silo0", SignAnswer(bytes(32), bytes(64)).encode())
    with pytest.raises(ProtocolError, match="nobody asked"):
        server.answer("silo4", SignAnswer(CONTEXT, bytes(64)).encode())
    for nonsense in (b"", b"{}", bytes(100), survivors_of(of, FOUR).encode().tobytes()):
        with pytest.raises(ProtocolError):
            server.answer("silo0", np.frombuffer(nonsense, dtype=np.uint8))
        if nonsense[4:8] != b"sign":
            with pytest.raises(ProtocolError):
                read_question(np.frombuffer(nonsense, dtype=np.uint8))
    with pytest.raises(ProtocolError, match="instead of bytes"):
        read_question(np.zeros(3))


def test_shares_that_fit_nothing_leave_the_sum_closed(caplog: pytest.LogCaptureFixture) -> None:
    """A silo deals shares of another seed, and is lost; or a helper tells a wrong share."""
    of = rounds()
    carried = Carried(of, lost=lambda name, question: name == "silo4")
    annex = Annex.unpack(of["silo4"].annex, "silo4", "silo4")
    again = Annex.unpack(MaskRound(PAIRS["silo4"], of["silo4"]._roster, CONTEXT, *WORK).annex, "silo4", "silo4")
    of["silo4"].annex = replace(annex, sealed=again.sealed).pack()
    carried = Carried(of, lost=carried.lost)
    assert carried.run() is None
    assert "silo4's masks" in caplog.text and "are not of what it committed to" in caplog.text


@pytest.mark.parametrize("at", [0, 40, 100, 300, 700])
def test_a_changed_annex_is_no_annex_or_another(at: int) -> None:
    sent = rounds()["silo0"].annex
    data = bytearray(sent)
    data[at] ^= 0x81
    try:
        assert Annex.unpack(bytes(data), "silo0", "silo0") != Annex.unpack(sent, "silo0", "silo0")
    except ProtocolError as error:
        assert error.sender == "silo0"
    with pytest.raises(ProtocolError):
        Unmasking({"silo0": bytes(data[:-1])}, SIGNING, 1)
