"""With masks, server and one silo together see a sum of the others and no single update."""

import numpy as np
import pytest

from fedsync.cipher.encoding.packing import SLOTS, Slots
from fedsync.cipher.keys.material import SiloKeys
from fedsync.cipher.masking import masks
from fedsync.cipher.masking.masks import Masked, MaskRound, Reveal, Unmasker
from fedsync.cipher.suites.bfv import Bfv
from fedsync.cipher.suites.suite import BFV_PLAIN, MASKED, Member, Words
from fedsync.core.errors import PolicyError, ProtocolError
from tests.cipher.sealers import group, member, sealer, slots_of, summed

NAMES = tuple(f"silo{i}" for i in range(5))
KEYS = {name: SiloKeys(name, bytes([i + 1] * 32), bytes([i + 50] * 32)) for i, name in enumerate(NAMES)}
COHORT = {name: keys.public for name, keys in KEYS.items()}


def rounds(context: bytes = b"epoch 1, round 2, attempt 0") -> dict[str, MaskRound]:
    return {name: MaskRound(KEYS[name], COHORT, context) for name in NAMES}


def reveals(of: dict[str, MaskRound], survivors: tuple[str, ...]) -> list[Reveal]:
    signatures = {name: of[name].sign(survivors) for name in survivors}
    return [of[name].reveal(signatures) for name in survivors]


def updates() -> dict[str, Slots]:
    return {name: slots_of(2, 44, seed) for seed, name in enumerate(NAMES)}


def inner() -> Bfv:
    own = sealer("masked")
    assert isinstance(own, Bfv)
    return own


def looks_uniform(slots: Slots) -> bool:
    """Mean and mean square of numbers uniform within +-t/2, to six deviations, and eight equal shares."""
    unit = slots.reshape(-1) / BFV_PLAIN  # within +-1/2
    count = unit.size
    shares = np.bincount(((unit + 0.5) * 8).astype(int).clip(0, 7), minlength=8)
    flat = ((shares - count / 8) ** 2 / (count / 8)).sum() < 45  # chi-squared, 7 degrees of freedom: about 1e-7
    return bool(
        abs(unit.mean()) < 6 / np.sqrt(12 * count)
        and abs((unit**2).mean() - 1 / 12) < 6 / np.sqrt(180 * count)
        and flat
    )


@pytest.mark.parametrize("survivors", [NAMES, NAMES[1:], ("silo0", "silo3", "silo4"), ("silo0", "silo1", "silo2")])
def test_the_sum_of_survivors_is_exact(survivors: tuple[str, ...]) -> None:
    of, slots = rounds(), updates()
    members = {name: member(i) for i, name in enumerate(NAMES)}
    words: dict[str, Words] = {}
    for name in NAMES:
        masked = Masked(inner(), round=of[name])
        # In portions, as messages are sealed.
        parts = [masked.seal(slots[name][:1], members[name]), masked.seal(slots[name][1:], members[name], 1)]
        words[name] = np.concatenate(parts)
    total = summed("masked", [words[name] for name in survivors])
    opener = Masked(inner(), unmasker=Unmasker(NAMES, reveals(of, survivors)))
    named = [members[name] for name in survivors]
    expected = np.asarray(sum(slots[name] for name in survivors))
    np.testing.assert_array_equal(opener.open(total, named), expected)
    np.testing.assert_array_equal(opener.open(total[1:], named, 1), expected[1:])


class Collusion:
    """Server and silo0 together: every message, the group's secret, silo0's own keys, and all that is revealed."""

    def __init__(self, group_secret: bytes, own: SiloKeys, context: bytes) -> None:
        self._sealer = Bfv(group_secret)
        self._own = own
        self._context = context

    def decrypted(self, words: Words) -> Slots:
        return self._sealer.open(words, [member(0)])

    def without_known_masks(self, words: Words, victim: str, revealed: list[Reveal]) -> list[Slots]:
        """The victim's slots with every subset of known seeds taken off, each with either sign."""
        seeds = [self._own.agree(COHORT[victim], b"mask pair 1\0" + self._context)]
        for reveal in revealed:
            seeds += [reveal.own] if reveal.silo == victim else []
            seeds += [seed for name, seed in reveal.pairs.items() if name == victim]
        tries = [self.decrypted(words)]
        for seed in seeds:
            tries += [masks._masked(one, [(seed, sign)], 0) for one in tries for sign in (False, True)]
        return tries


def test_the_attack_of_server_and_silo_succeeds_against_bfv() -> None:
    victim = updates()["silo1"]
    words = sealer("bfv").seal(victim, member(1))
    attack = Collusion(group("bfv").context, KEYS["silo0"], b"")
    np.testing.assert_array_equal(attack.decrypted(words), victim)


@pytest.mark.parametrize("survivors", [NAMES, ("silo0", "silo2", "silo3", "silo4")])
def test_the_attack_of_server_and_silo_fails_against_masks(survivors: tuple[str, ...]) -> None:
    """Whether the victim's update arrives, or the server says that it did not while it has it."""
    context = b"attacked"
    of, victim = rounds(context), updates()["silo1"]
    words = Masked(inner(), round=of["silo1"]).seal(victim, member(1))
    attack = Collusion(group("masked").context, KEYS["silo0"], context)
    tries = attack.without_known_masks(words, "silo1", reveals(of, survivors))
    assert len(tries) >= 9
    for one in tries:
        assert looks_uniform(one)
        assert np.count_nonzero(one == victim) == 0
        assert abs(np.corrcoef(one.reshape(-1), victim.reshape(-1))[0, 1]) < 6 / np.sqrt(victim.size)


def test_uniform_is_told_from_an_update() -> None:
    """The test of the attack would notice what it looks for."""
    assert not looks_uniform(updates()["silo1"])
    assert looks_uniform(np.random.default_rng(0).integers(-(BFV_PLAIN // 2), BFV_PLAIN // 2 + 1, (2, SLOTS)))


def test_seeds_of_both_kinds_are_never_revealed_for_one_silo() -> None:
    """The server shows some silos one list and some another: nobody reveals anything."""
    of = rounds()
    with_victim, without = NAMES, tuple(name for name in NAMES if name != "silo1")
    signatures = {name: of[name].sign(with_victim) for name in ("silo1", "silo2")}
    signatures |= {name: of[name].sign(without) for name in ("silo0", "silo3", "silo4")}
    for name in NAMES:
        with pytest.raises(ProtocolError, match="survivors"):
            of[name].reveal(signatures)


def test_a_silo_signs_one_list_an_attempt() -> None:
    of = rounds()
    of["silo0"].sign(NAMES)
    assert of["silo0"].sign(NAMES[::-1]) == of["silo0"].sign(NAMES)
    with pytest.raises(ProtocolError, match="second list"):
        of["silo0"].sign(NAMES[:4])


@pytest.mark.parametrize(
    "names", [(), ("silo0", "silo1"), ("silo1", "silo2", "silo3"), (*NAMES, "stranger"), ("silo0",) * 3]
)
def test_lists_that_would_tell_too_much_are_not_signed(names: tuple[str, ...]) -> None:
    with pytest.raises(ProtocolError, match="survivors"):
        rounds()["silo0"].sign(names)


def test_nothing_is_revealed_before_all_survivors_signed() -> None:
    of = rounds()
    with pytest.raises(ProtocolError, match="before a list was signed"):
        of["silo0"].reveal({})
    signatures = {name: of[name].sign(NAMES) for name in NAMES}
    for bad in (
        {**signatures, "silo3": signatures["silo2"]},
        {name: one for name, one in signatures.items() if name != "silo3"},
        {**signatures, "silo3": rounds(b"another round")["silo3"].sign(NAMES)},
    ):
        with pytest.raises(ProtocolError, match="silo3"):
            of["silo0"].reveal(bad)


def test_reveals_of_others_than_the_survivors_do_not_open() -> None:
    of = rounds()
    good = reveals(of, NAMES[:4])
    broken = Reveal("silo0", good[0].own, {})
    for bad in (good[:2], [*good, good[0]], [*good[:3], Reveal("stranger", bytes(32), {})], [broken, *good[1:]]):
        with pytest.raises(ProtocolError, match="reveals"):
            Unmasker(NAMES, bad)
    opener = Masked(inner(), unmasker=Unmasker(NAMES, good))
    with pytest.raises(ProtocolError, match="members"):
        opener.open(np.zeros((1, MASKED.words), np.uint64), [member(i) for i in range(5)])


def test_each_attempt_has_its_own_masks() -> None:
    zeros = np.zeros((1, SLOTS), np.int64)
    one, again, other = (rounds(context)["silo0"].mask(zeros) for context in (b"1", b"1", b"2"))
    assert len({slots.tobytes() for slots in (one, again, other)}) == 3  # the self mask is drawn anew each time
    assert looks_uniform(one)


def test_masks_are_put_on_once() -> None:
    """Whoever asks for more, and whenever: in the middle of the update, and once its sum was signed."""
    zeros = np.zeros((2, SLOTS), np.int64)
    own = rounds()["silo0"]
    own.mask(zeros)
    for first in (0, 1, 3):
        with pytest.raises(PolicyError, match="once"):
            own.mask(zeros, first)
    own.mask(zeros, 2)
    own.sign(NAMES)
    with pytest.raises(PolicyError, match="once"):
        own.mask(zeros, 4)


def test_what_a_masked_sealer_lacks_it_says() -> None:
    with pytest.raises(PolicyError):
        Masked(inner()).seal(np.zeros((1, SLOTS), np.int64), member(0))
    with pytest.raises(PolicyError):
        Masked(inner()).open(np.zeros((1, MASKED.words), np.uint64), [Member("silo0/1", 0, bytes(16), bytes(32))])
    assert Masked(inner()).form is MASKED


def test_only_members_of_the_cohort_take_part() -> None:
    with pytest.raises(ValueError, match="cohort"):
        MaskRound(SiloKeys.generate("silo9"), COHORT, b"")
    with pytest.raises(ValueError, match="cohort"):
        MaskRound(SiloKeys.generate("silo0"), COHORT, b"")
