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

from fedsync.cipher.silo.history import History
from fedsync.silo.protocol import EvaluateModel
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
    true_key,
)
from tests.cipher.lying_server import read_sum


class Forger:
    """A server that sends a new silo forged words in the place of honest ones, in a sum or in the calibration."""

    def __init__(self, federation: Federation, path: str) -> None:
        federation.round()
        self.federation, self.path = federation, path
        own = federation.envelope("silo-a/1")
        self.honest = (
            own if path == "sum" else read_sum(federation.plan, federation.keys, calibration(federation), 0, 1)
        )
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
