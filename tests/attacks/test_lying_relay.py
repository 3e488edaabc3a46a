"""A relay that lies about its silos' sum. It is of the server's side, and gains what a lying server does: nothing.

The server, which has no key, takes such a sum: its slips are the silos' own. Silos see that its words are not the sum
of what they sealed, before they open anything, and stay at the model that they have.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedsync.cipher.encoding.sealed_wire import Envelope
from fedsync.cipher.suites.suite import FORMS, Words
from fedsync.common.errors import ProtocolError
from fedsync.core.actions import Commit
from fedsync.extras.relays import sealed_sum
from fedsync.extras.relays.sealed_region import SealedRegion
from tests.cipher.make import INITIAL, Federation, change, plan
from tests.cipher.sealers import summed

Sums = Callable[[str, list[Words]], Words]


def _noise(kind: str, updates: list[Words]) -> Words:
    whole = summed(kind, updates)
    whole[0, 0] = (whole[0, 0] + np.uint64(1)) % np.uint64(FORMS[kind].modulus)
    return whole


def _exchanged(kind: str, updates: list[Words]) -> Words:
    whole = summed(kind, updates)
    whole[0, :2] = whole[0, 1::-1]
    return whole


LIES: dict[str, Sums] = {
    "one is left out": lambda kind, updates: summed(kind, updates[1:]),
    "one is in it twice": lambda kind, updates: summed(kind, [*updates, updates[0]]),
    "one stands for all": lambda kind, updates: summed(kind, [updates[0]] * 3),
    "noise": _noise,
    "words are exchanged": _exchanged,
}


@pytest.fixture(params=["bfv", "pad"])
def federation(request: pytest.FixtureRequest, tmp_path: Path) -> Federation:
    return Federation(plan(request.param), tmp_path, dict.fromkeys("abc", 10))


def _envelopes(federation: Federation, version: int = 0) -> list[Envelope]:
    """Sealed updates of the silos for the next version."""
    region = SealedRegion(federation.plan, federation.keys.server)
    for name in federation.examples:
        federation.begin(name, version)
    for name in federation.examples:
        update_id, payload = federation.seal(name, change(ord(name)))
        region.put(name, update_id, version, 1.0, payload)
    return [kept.envelope for kept in region._kept.values()]


def _ids(envelopes: list[Envelope]) -> list[str]:
    return [envelope.head.members[0].update_id for envelope in envelopes]


def _message(federation: Federation, envelopes: list[Envelope], sums: Sums = summed) -> bytes:
    """The relay's message, of the sum or of what stands in its place."""
    words = sums(federation.plan.kind, [envelope.words for envelope in envelopes])
    return b"".join(sealed_sum.parts(envelopes, [words], np.empty(0, np.float32)))


def _sent(federation: Federation, envelopes: list[Envelope], sums: Sums = summed) -> None:
    message, ids = _message(federation, envelopes, sums), _ids(envelopes)
    federation.aggregator.put_sum("relay", ids, np.frombuffer(message, np.uint8))
    federation.aggregator.commit(Commit(1, dict.fromkeys(ids, 1 / len(ids))))


@pytest.mark.parametrize("lie", LIES)
def test_silos_open_no_sum_that_a_relay_has_changed(lie: str, federation: Federation) -> None:
    _sent(federation, _envelopes(federation), LIES[lie])
    for name in "abc":
        with pytest.raises(ProtocolError, match="tag"):
            federation.begin(name, 1)
        np.testing.assert_array_equal(federation.silos[name].model, INITIAL)


def test_a_relay_passes_off_no_slip_of_another_order_as_one_of_this(federation: Federation) -> None:
    """Not the sum of the last round, in whole or in part, nor what was sealed for another version."""
    first = _envelopes(federation)
    _sent(federation, first)
    second = _envelopes(federation, version=1)
    for mixed in (first, [first[0], *second[1:]], [*second[:2], second[1]]):
        message = np.frombuffer(_message(federation, mixed), np.uint8)
        for named in (_ids(second), _ids(mixed)):
            with pytest.raises(ProtocolError):
                federation.aggregator.put_sum("relay", named, message)


def test_a_relay_adds_no_updates_with_other_masks(tmp_path: Path) -> None:
    """Their masks do not cancel: the sum would stay closed, and take the round from all of its silos."""
    federation = Federation(plan("masked"), tmp_path, dict.fromkeys("abcd", 10))
    federation.aggregator.leave("d")
    federation.begin("a", 0)  # which fixes the roster of the others
    federation.aggregator.greet("d", -1, federation.silos["d"].greeting())
    envelopes = _envelopes(federation)
    message = np.frombuffer(_message(federation, envelopes), np.uint8)
    with pytest.raises(ProtocolError, match="other masks"):
        federation.aggregator.put_sum("relay", _ids(envelopes), message)


def test_a_relay_sends_a_sealed_run_nothing_in_the_clear(federation: Federation) -> None:
    ids = _ids(_envelopes(federation))
    for plain in (np.zeros(INITIAL.size, np.float32), np.zeros(4 * INITIAL.size, np.uint8)):
        with pytest.raises(ProtocolError, match="region's sum"):
            federation.aggregator.put_sum("relay", ids, plain)
        with pytest.raises(ProtocolError):
            federation.aggregator.put("a", ids[0], plain)


def test_a_relay_names_no_update_that_its_silo_did_not_sign(federation: Federation) -> None:
    """The slip is under the silo's signature: another base, nonce, digest or tag is another message."""
    envelopes = _envelopes(federation)
    message = _message(federation, envelopes)
    words = summed(federation.plan.kind, [envelope.words for envelope in envelopes])
    for at in range(24, message.index(words.tobytes()[:64]), 97):
        forged = np.frombuffer(message, np.uint8).copy()
        forged[at] ^= 1
        try:
            federation.aggregator.put_sum("relay", _ids(envelopes), forged)
        except ProtocolError:
            continue
        raise AssertionError(f"byte {at} of a slip was changed and taken")
