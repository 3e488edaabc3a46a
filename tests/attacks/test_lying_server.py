"""A server that has all of its files and says what it likes: what it reads, and what it does to the model.

Keys of the group, rows of data, files of a silo, and steps of the model are what it is after.
"""

import hmac
import itertools
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedsync.cipher.encoding import sealed_wire as wire
from fedsync.cipher.silo.history import History
from fedsync.cipher.suites.suite import BFV_MODULUS
from fedsync.silo.owner import lockout
from fedsync.silo.protocol import EvaluateModel, Refusal, Refused
from tests.attacks.adversary import Federation, Heard
from tests.attacks.conftest import Make
from tests.attacks.forgery import (
    EMPTY,
    STRANGE,
    add,
    aggregate,
    beginning,
    bits_known,
    calibration,
    give,
    key_from_refusals,
    key_from_slots,
    read_sum,
    sent,
    true_key,
)


class Forger:
    """A server that sends a new silo forged words in the place of honest ones, in a sum or in the calibration."""

    def __init__(self, federation: Federation, path: str) -> None:
        federation.round()
        self.federation, self.path = federation, path
        own = federation.envelope("silo-a/1")
        self.honest = own if path == "sum" else read_sum(federation, calibration(federation), 0, 1)
        self.victim = federation.silo("silo-a")
        self.heard: list[Heard] = []

    def send(self, words: np.ndarray, later: int = 0, **changes: Any) -> Heard:
        """Send them, with EMPTY links behind: another version, which is not there yet."""
        links, version = [EMPTY] * later, later + (self.path == "sum")
        forged = aggregate(self.federation, self.honest, int(self.path == "sum"), words=words, **changes)
        if self.path == "sum":
            payload = beginning(self.federation, add(1, forged), *links)
        else:
            payload = beginning(self.federation, *links, calibration=forged)
        self.heard.append(self.victim.ask(EvaluateModel(version), payload))
        return self.heard[-1]


@pytest.fixture(params=["sum", "calibration"])
def forger(request: pytest.FixtureRequest, make: Make) -> Forger:
    return Forger(make(), request.param)


def test_no_refusal_tells_what_was_decrypted(forger: Forger) -> None:
    """A text that named the count in the sum gave the key in 256 questions."""

    def slot0(words: np.ndarray) -> int:
        found = re.search(r"(-?\d+) silos are in the sum", forger.send(words, members=(STRANGE,)).words)
        return int(found[1]) if found else 1

    positions = range(64)
    gained = bits_known(key_from_slots(slot0, positions), true_key(forger.federation, positions))
    assert gained == 0, f"{gained:.0f} bits of the group's key by {len(forger.heard)} questions"
    assert len({(one.words, one.payload) for one in forger.heard[:2]}) == 1, "one answer, byte by byte"


def test_to_accept_or_refuse_tells_nothing_of_the_key(forger: Forger) -> None:
    """Noise on honest words passed until decryption failed: 6,900 questions gave the key."""

    def accepts(words: np.ndarray) -> bool:
        return not forger.send(words, later=len(forger.heard) + 1).refused

    gained = bits_known(key_from_refusals(accepts, forger.honest.words, 8), true_key(forger.federation, range(8)))
    assert gained == 0, f"{gained:.0f} bits of the group's key by {len(forger.heard)} questions"


def mutated(federation: Federation, honest: wire.Envelope, rng: np.random.Generator) -> bytes:
    """A sum that is wrong in one of many ways, most of which fool all checks that need no key."""
    words, head, tag = honest.words.copy(), honest.head, list(honest.tag)
    row, at, other = rng.integers(len(words)), *rng.integers(words.shape[1], size=2)
    members, changes = list(head.members), {}
    match rng.integers(9):
        case 0:
            words[row, at] ^= np.uint64(1 << int(rng.integers(59)))
        case 1:
            words[row, [at, other]] = words[row, [other, at]]
        case 2:
            words[row, at] = rng.integers(BFV_MODULUS)
        case 3:
            words[:] = rng.integers(BFV_MODULUS, size=words.shape)
        case 4:
            words[:] = (words.astype(object) * int(rng.integers(2, 1000)) % BFV_MODULUS).astype(np.uint64)
        case 5:
            tag[rng.integers(len(tag))] = int(rng.integers(BFV_MODULUS))
        case 6:
            one = rng.integers(len(members))
            members[one] = replace(members[one], nonce=rng.bytes(16))
        case 7:
            one = rng.integers(len(members))
            members[one] = replace(members[one], digest=rng.bytes(32))
        case _:
            changes = {"attempt": int(rng.integers(1, 100))}
    words %= np.uint64(BFV_MODULUS)
    return aggregate(federation, honest, 1, words=words, tag=tuple(tag), members=tuple(members), **changes)


def test_mutated_sums_are_all_the_same_to_the_server(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """One answer of one length to all, nothing is opened, and nothing changes; bench/faults/oracle.py takes 10,000."""
    monkeypatch.setattr(lockout, "LIMIT", 10**9)
    federation = make()
    federation.round()
    honest, rng = read_sum(federation, sent(federation)[0].entries[0].sums[0], 1), np.random.default_rng(3)
    victim = federation.silo("silo-a")
    heard = [give(victim, beginning(federation, add(1, mutated(federation, honest, rng))), 1) for _ in range(100)]
    assert {(type(one.reply), one.words, one.payload) for one in heard} == {(Refused, heard[0].words, None)}
    assert victim.replica.holds == -1
    assert not give(victim, beginning(federation, *sent(federation)), 1).refused, "the honest one still opens"


def test_a_silo_answers_three_forgeries_and_no_more(make: Make) -> None:
    """Also as another run, and after a restart: the fourth question is not looked at, not even the honest one."""
    federation = make()
    federation.round()
    honest, rng = read_sum(federation, sent(federation)[0].entries[0].sums[0], 1), np.random.default_rng(3)
    answered = 0
    for number in range(8):
        # Each another run, as far as its silo can tell.
        victim = federation.silo("silo-a", federation.spec(f"run-{number}"))
        heard = give(victim, beginning(federation, add(1, mutated(federation, honest, rng))), 1)
        assert isinstance(heard.reply, Refused)
        answered += heard.reply.code is Refusal.INTEGRITY
    assert answered == 3
    heard = give(federation.silo("silo-a"), beginning(federation, *sent(federation)), 1)
    assert isinstance(heard.reply, Refused) and heard.reply.code is Refusal.LOCKED
    assert not give(federation.silo("silo-b"), beginning(federation, *sent(federation)), 1).refused, "others go on"


def test_digests_do_not_tell_how_large_updates_are(make: Make) -> None:
    """All that names a grid but its steps is public, and a step is one of 64: the server hashes all that may be."""
    federation = make()
    federation.round()
    federation.follow(["silo-b"])
    # The judge saw them; so few tries stand for all.
    near = [range(exponent - 2, exponent + 3) for exponent in federation.silos["silo-b"].exponents]
    seen = {federation.envelope(federation.last).head.grid}
    tried = {federation.plan.grid(exponents).digest for exponents in itertools.product(*near)}
    tried |= {hmac.digest(key, one, "sha256") for one in tried for key in (federation.keys.fingerprint, b"")}
    assert not seen & tried, "steps of all tensors, 6 bits each"

    joined = federation.silo("silo-a")
    assert not give(joined, beginning(federation), 0).refused
    state, content = joined.replica._state, joined.replica._state.history.records.last[0].content
    (chain,) = {federation.envelope(update_id).head.members[0].chain for update_id in federation.ids[:3]}
    assert chain == state.history.chain(0), "what the server sees of version 0"
    for exponents in itertools.product(*near):
        guess = replace(state, scales=replace(state.scales, exponents=(exponents,)))
        assert History(state.history.run).begin(content, guess.digest).chain(0) != chain, "steps of all tensors"
