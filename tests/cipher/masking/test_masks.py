"""With masks, the server and one silo together see a sum of the others and no single update."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from fedsync.cipher.encoding.fields import annex_digest, unpack_frames, unpack_named
from fedsync.cipher.encoding.packing import SLOTS, Slots
from fedsync.cipher.encoding.sealed_wire import MAX_ANNEX
from fedsync.cipher.masking.annex import Annex, Seeds, commitment
from fedsync.cipher.masking.mask_round import MaskRound, masked
from fedsync.cipher.masking.masks import Masked, Unmasker, pack_opening
from fedsync.cipher.suites.bfv import Bfv
from fedsync.cipher.suites.suite import BFV_PLAIN, MASKED, Member, Words
from fedsync.common.errors import PolicyError, ProtocolError
from tests.cipher.masking.rounds import CONTEXT, LONG, NAMES, PAIRS, WORK, Carried, roster, rounds, survivors_of
from tests.cipher.sealers import group, member, sealer, slots_of, summed


def opened(of: dict[str, MaskRound], survivors: tuple[str, ...]) -> bytes:
    opening = Carried(of, survivors, colluding=next(iter(of.values()))._roster.colluding).run()
    assert opening is not None
    return opening


def member_of(of: dict[str, MaskRound], name: str) -> Member:
    return replace(member(NAMES.index(name)), annex=annex_digest(of[name].annex))


def updates() -> dict[str, Slots]:
    return {name: slots_of(2, 44, seed) for seed, name in enumerate(NAMES)}


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
    of, slots = rounds(colluding=0), updates()  # t = 3 of 5
    members = {name: member_of(of, name) for name in NAMES}
    words: dict[str, Words] = {}
    for name in NAMES:
        sealing = Masked(sealer("masked"), of[name].mask)
        # In portions, as messages are sealed.
        parts = [sealing.seal(slots[name][:1], members[name]), sealing.seal(slots[name][1:], members[name], 1)]
        words[name] = np.concatenate(parts)
    total = summed("masked", [words[name] for name in survivors])
    named = [members[name] for name in survivors]
    opener = Masked(sealer("masked"), Unmasker(opened(of, survivors), named).unmask)
    expected = np.asarray(sum(slots[name] for name in survivors))
    np.testing.assert_array_equal(opener.open(total, named), expected)
    np.testing.assert_array_equal(opener.open(total[1:], named, 1), expected[1:])


class Collusion:
    """Server and silo0 together: every message, the group's secret, silo0's own keys, and all that is revealed."""

    def __init__(self, group_secret: bytes) -> None:
        self._sealer = Bfv(group_secret)

    def decrypted(self, words: Words) -> Slots:
        return self._sealer.open(words, [member(0)])

    def known(self, of: dict[str, MaskRound], victim: str, opening: bytes) -> list[bytes]:
        """Seeds that may be of the victim's masks: silo0's pair with it, and whatever was revealed."""
        seeds = {
            of["silo0"]._seeds.pairs[victim],
            PAIRS["silo0"].agree(PAIRS[victim].public, b"mask pair 2\0" + CONTEXT),
        }
        for name, data in unpack_named(opening, "server").items():
            told = Seeds.unpack(unpack_frames(data, "server", 2)[1], "server")
            seeds |= {told.own, *told.pairs.values()} if name == victim else {told.pairs.get(victim, b"") or told.own}
        return sorted(seeds)

    def without_known_masks(self, words: Words, seeds: list[bytes]) -> list[Slots]:
        """The victim's slots with every subset of seeds taken off, each with either sign."""
        tries = [self.decrypted(words)]
        for seed in seeds:
            tries += [masked(one, [(seed, sign)], 0) for one in tries for sign in (False, True)]
        return tries


def test_the_attack_of_server_and_silo_succeeds_against_bfv() -> None:
    victim = updates()["silo1"]
    words = sealer("bfv").seal(victim, member(1))
    np.testing.assert_array_equal(Collusion(group("bfv").context).decrypted(words), victim)


def nothing_is_seen(tries: list[Slots], victim: Slots) -> None:
    for one in tries:
        assert looks_uniform(one)
        assert np.count_nonzero(one == victim) == 0
        assert abs(np.corrcoef(one.reshape(-1), victim.reshape(-1))[0, 1]) < 6 / np.sqrt(victim.size)


@pytest.mark.parametrize("survivors", [NAMES, ("silo0", "silo2", "silo3", "silo4")])
def test_the_attack_of_server_and_silo_fails_against_masks(survivors: tuple[str, ...]) -> None:
    """Whether the victim's update arrives, or the server says that it did not while it has it."""
    of, victim = rounds(), updates()["silo1"]
    words = Masked(sealer("masked"), of["silo1"].mask).seal(victim, member(1))
    attack = Collusion(group("masked").context)
    seeds = attack.known(of, "silo1", opened(of, survivors))
    assert len(seeds) >= 4
    nothing_is_seen(attack.without_known_masks(words, seeds[:5]), victim)


def test_with_all_seeds_it_would_succeed() -> None:
    """The attack would notice: with the one seed more that only two honest silos have, it reads the update."""
    of, victim = rounds(), updates()["silo1"]
    words = Masked(sealer("masked"), of["silo1"].mask).seal(victim, member(1))
    own, pairs = of["silo1"]._seeds.own, of["silo1"]._seeds.pairs
    masks = [(own, False), *((seed, name < "silo1") for name, seed in pairs.items())]
    np.testing.assert_array_equal(masked(Collusion(group("masked").context).decrypted(words), masks, 0), victim)


def test_who_finds_the_long_lived_keys_afterwards_finds_no_mask() -> None:
    """All silos' key files, all messages and what was revealed, once the run's pairs are gone."""
    of, victim = rounds(), updates()["silo1"]
    words = Masked(sealer("masked"), of["silo1"].mask).seal(victim, member(1))
    attack = Collusion(group("masked").context)
    pairs = [LONG["silo1"].agree(LONG[name].public, b"mask pair 2\0" + CONTEXT) for name in NAMES if name != "silo1"]
    assert not set(pairs) & set(of["silo1"]._seeds.pairs.values())
    seeds = {
        Seeds.unpack(unpack_frames(data, "s", 2)[1], "s").own for data in unpack_named(opened(of, NAMES), "s").values()
    }
    nothing_is_seen(attack.without_known_masks(words, [of["silo1"]._seeds.own, *pairs]), victim)
    assert of["silo1"]._seeds.own in seeds


def test_uniform_is_told_from_an_update() -> None:
    """The test of the attack would notice what it looks for."""
    assert not looks_uniform(updates()["silo1"])
    assert looks_uniform(np.random.default_rng(0).integers(-(BFV_PLAIN // 2), BFV_PLAIN // 2 + 1, (2, SLOTS)))


def test_what_does_not_open_a_sum() -> None:
    """Seeds that are missing, of others, or other than were committed to; annexes that are not those of the members, or
    of two contexts, such as those of silos that were told to do different work."""
    of, survivors = rounds(), NAMES[:4]
    good, members = opened(of, survivors), [member_of(of, name) for name in survivors]
    Unmasker(good, members)
    entries = {name: unpack_frames(data, "server", 2) for name, data in unpack_named(good, "server").items()}
    annexes, seeds = ({name: entry[place] for name, entry in entries.items()} for place in (0, 1))
    told = {name: Seeds.unpack(data, "server") for name, data in seeds.items()}
    silo0, other = told["silo0"], rounds(context=hashlib.sha256(b"a rate of 1e-30").digest())["silo0"]
    too_many = {**silo0.pairs, "silo1": of["silo0"]._seeds.pairs["silo1"]}
    without = {name: annex for name, annex in annexes.items() if name != "silo3"}
    elsewhere = [replace(members[0], annex=annex_digest(other.annex)), *members[1:]]
    for reason, changed, told_instead, named in (
        ("of other silos", without, {}, members),
        ("of other silos", annexes, {}, members[:3]),
        ("of other silos", annexes, {}, [*members, members[0]]),
        ("not the one that its silo sealed", {**annexes, "silo0": rounds()["silo0"].annex}, {}, members),
        ("different contexts", {**annexes, "silo0": other.annex}, {"silo0": other._seeds.only(["silo4"])}, elsewhere),
        ("commitment", annexes, {"silo0": replace(silo0, own=bytes(32))}, members),
        ("commitment", annexes, {"silo0": replace(silo0, pairs={"silo4": bytes(32)})}, members),
        ("requested", annexes, {"silo0": replace(silo0, pairs={})}, members),
        ("requested", annexes, {"silo0": replace(silo0, pairs=too_many)}, members),
    ):
        with pytest.raises(ProtocolError, match=reason):
            Unmasker(pack_opening(changed, {**told, **told_instead}), named)


def test_each_context_has_its_own_masks() -> None:
    zeros = np.zeros((1, SLOTS), np.int64)
    contexts = [hashlib.sha256(text).digest() for text in (b"1", b"1", b"2")]
    one, again, other = (MaskRound(PAIRS["silo0"], roster(), context, *WORK) for context in contexts)
    assert one._seeds.pairs == again._seeds.pairs
    assert not set(one._seeds.pairs.values()) & set(other._seeds.pairs.values())
    found = [own.mask(zeros) for own in (one, again, other)]
    assert len({slots.tobytes() for slots in found}) == 3  # the own mask is drawn anew each time
    assert looks_uniform(found[0])


def test_masks_are_put_on_once() -> None:
    """Whoever asks for more, and whenever: in the middle of the update, and once its sum was signed."""
    zeros = np.zeros((2, SLOTS), np.int64)
    of = rounds()
    own = of["silo0"]
    own.mask(zeros)
    for first in (0, 1, 3):
        with pytest.raises(PolicyError, match="for one update only"):
            own.mask(zeros, first)
    own.mask(zeros, 2)
    own.sign(survivors_of(of, NAMES))
    with pytest.raises(PolicyError, match="for one update only"):
        own.mask(zeros, 4)


def test_what_opens_the_sum_of_as_many_silos_as_there_may_be_can_be_read() -> None:
    """With the longest names: a message that silos refuse counts as a forgery, and three of them lock every silo."""
    names = [f"{number:064}" for number in range(MASKED.additions)]
    shares = bytes(12 + 33 * len(names) + 16)  # of its own seed and of those with the others, sealed to one silo
    seed = bytes(32)
    annexes = {}
    for name in names:
        others = [other for other in names if other != name]
        pairs, sealed = dict.fromkeys(others, commitment(seed)), dict.fromkeys(others, shares)
        annexes[name] = Annex(CONTEXT, WORK[0], commitment(seed), pairs, sealed).pack()
    assert max(map(len, annexes.values())) <= MAX_ANNEX
    members = [Member(f"{name}/1", 0, bytes(16), bytes(32), annex=annex_digest(annexes[name])) for name in names]
    Unmasker(pack_opening(annexes, dict.fromkeys(names, Seeds(seed, {}))), members)
