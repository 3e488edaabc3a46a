"""Forged sums and catch-ups, and two ways to read the group's secret key out of what silos say of them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsync.cipher.encoding import sealed_wire as wire
from fedsync.cipher.encoding.catch_up import CatchUp, Link, LinkEntry, LinkKind, Start
from fedsync.cipher.server.chain import total
from fedsync.cipher.suites.bfv import Bfv
from fedsync.cipher.suites.suite import BFV_MODULUS, BFV_PLAIN, NO_DIGEST, Adder, Member, Words
from fedsync.model.transfer import Payload
from fedsync.silo.protocol import EvaluateModel
from tests.attacks.adversary import Federation, Heard, Victim

N = 4096
"""Coefficients of the key; words of a polynomial."""

STRANGE = Member("silo-b/9", 0, bytes(16), NO_DIGEST)


def aggregate(federation: Federation, envelope: wire.Envelope, version: int = 0, **changes: Any) -> bytes:
    """A sum as the server sends it: what an envelope has, with changes to ``words``, ``tag`` or fields of its head."""
    words, tag = changes.pop("words", envelope.words), changes.pop("tag", envelope.tag)
    head = replace(
        envelope.head, **{"kind": wire.Kind.AGGREGATE, "sender": "server", "round": version, "annex": b"", **changes}
    )
    return wire.encode(head, words, tag, None)


def add(version: int, *sums: bytes, clear: bytes = b"", reveals: bytes = b"") -> Link:
    return Link(LinkKind.ADD, (LinkEntry(version, sums, clear, reveals),))


def undo(*links: Link) -> Link:
    """Takes back what links added, in this order."""
    return Link(LinkKind.UNDO, tuple(link.entries[0] for link in links))


EMPTY = Link(LinkKind.EMPTY)


def calibration(federation: Federation) -> bytes:
    if federation.aggregator._calibration is None:
        federation.aggregator.outgoing(federation.names[0])
    found = federation.aggregator._calibration
    assert found is not None
    return found


def beginning(federation: Federation, *links: Link, **changes: Any) -> Payload:
    """All from the start of a run to a version."""
    catch_up = CatchUp(Start.HELD, -1, len(links), tuple(links), b"", calibration(federation))
    return replace(catch_up, **changes).encode()


def onward(base: int, *links: Link, **changes: Any) -> Payload:
    """What leads on from a version that the silo has."""
    return replace(CatchUp(Start.HELD, base, base + len(links), tuple(links)), **changes).encode()


def sent(federation: Federation) -> tuple[Link, ...]:
    """All links of the honest chain so far."""
    return federation.aggregator._chain.since(0)


def summed(federation: Federation, update_ids: Sequence[str], version: int) -> bytes:
    """An authentic sum of the server's own choice."""
    envelopes = [federation.envelope(update_id) for update_id in update_ids]
    words, tag = total(envelopes, Adder(federation.plan.form), federation.plan.limit)
    members = tuple(envelope.head.members[0] for envelope in envelopes)
    return aggregate(federation, envelopes[0], version, words=np.concatenate(list(words)), tag=tag, members=members)


def give(silo: Victim, payload: Payload, version: int) -> Heard:
    """Send a catch-up with the least that a silo may be asked."""
    return silo.ask(EvaluateModel(version), payload)


# The BFV key.

Slot0 = Callable[[Words], int]
"""The first slot of what these words, uint64 [1, 2 N], open to, modulo t."""

Accepts = Callable[[Words], bool]


@cache
def _zeta() -> int:
    """The first slot is the polynomial's value at this number: the least root of x^N + 1 modulo t."""
    t = BFV_PLAIN
    root = next(pow(c, (t - 1) // (2 * N), t) for c in range(2, 1000) if pow(c, (t - 1) // 2, t) != 1)
    return min(pow(root, power, t) for power in range(1, 2 * N, 2))


def key_from_slots(slot0: Slot0, positions: Sequence[int]) -> NDArray[np.int64]:
    """Coefficients of the key by two questions for 32 of them.

    The words open to x^j for each asked position j at which the key has the wanted sign, and to 0 elsewhere. So the
    first slot is a sum of known powers, which of them a meeting in the middle tells.
    """
    key = np.zeros(len(positions), dtype=np.int64)
    for first in range(0, len(positions), 32):
        asked = np.array(positions[first : first + 32])
        for sign in (1, -1):
            c0, c1 = np.zeros(N, dtype=np.uint64), np.zeros(N, dtype=np.uint64)
            step = BFV_MODULUS // BFV_PLAIN
            c0[asked] = int(0.3 * step)
            c1[0] = sign * int(0.4 * step) % BFV_MODULUS
            found = slot0(np.concatenate([c0, c1]).reshape(1, -1)) % BFV_PLAIN
            key[first : first + len(asked)] += sign * _summands(asked, found)
    return key


def _summands(positions: NDArray[np.int64], total: int) -> NDArray[np.int64]:
    """Which powers add up to ``total``, 0 or 1 each; all 0 where none do."""
    powers = [pow(_zeta(), int(position), BFV_PLAIN) for position in positions]
    half = len(powers) // 2
    left, right = (_sums(part) for part in (powers[:half], powers[half:]))
    order = np.argsort(left)
    at = np.searchsorted(left[order], (total - right) % BFV_PLAIN) % len(left)
    hits = np.flatnonzero(left[order][at] == (total - right) % BFV_PLAIN)
    if not len(hits):
        return np.zeros(len(powers), dtype=np.int64)
    low, high = int(order[at[hits[0]]]), int(hits[0])
    bits = low | high << half
    return np.array([bits >> index & 1 for index in range(len(powers))])


def _sums(powers: Sequence[int]) -> NDArray[np.int64]:
    """Of all subsets, int64 [2^n]."""
    sums = np.zeros(1, dtype=np.int64)
    for power in powers:
        sums = np.concatenate([sums, (sums + power) % BFV_PLAIN])
    return sums


def true_key(federation: Federation, positions: Sequence[int]) -> NDArray[np.int64]:
    """Coefficients of the group's secret key: for the judge."""
    bfv, nobody = Bfv(federation.group.context), [STRANGE]
    return key_from_slots(lambda words: int(bfv.open(words, nobody)[0, 0]), positions)


def key_from_refusals(accepts: Accepts, words: Words, count: int) -> NDArray[np.int64]:
    """The first coefficients of the key by noise that is added to honest words, and whether they are taken then.

    The most noise that word 0 of c0 bears is searched; at its limit one more coefficient decides, which a monomial in
    c1 brings there.
    """
    low, high = 0, BFV_MODULUS // BFV_PLAIN
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if accepts(_noisy(words, middle)) else (low, middle)
    key = np.zeros(count, dtype=np.int64)
    for index in range(count):
        # s_i x^i times -x^(N - i) is s_i at position 0, for x^N = -1.
        at, unit = (0, 1) if index == 0 else (N - index, -1)
        if not accepts(_noisy(words, low, at, unit)):
            key[index] = 1
        elif not accepts(_noisy(words, low, at, -unit)):
            key[index] = -1
    return key


def _noisy(words: Words, noise: int, at: int = 0, unit: int = 0) -> Words:
    changed = words.copy()
    changed[0, 0] = (int(changed[0, 0]) + noise) % BFV_MODULUS
    changed[0, N + at] = (int(changed[0, N + at]) + unit) % BFV_MODULUS
    return changed


def bits_known(found: NDArray[np.int64], truth: NDArray[np.int64]) -> float:
    """Bits of the ternary key that answers tell [bits]: of coefficients that are right beyond what guessing gives.

    Who answers the same to everything is right for a third, by no merit.
    """
    if len(set(found.tolist())) < 2:
        return 0.0
    told = np.flatnonzero(found)
    right = np.count_nonzero(found[told] == truth[told])
    wrong = len(told) - right
    return max(0.0, (right - wrong) * float(np.log2(3)))
