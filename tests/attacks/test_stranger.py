"""Messages of a stranger on the network, without any key. On real processes: tests/e2e/test_strangers.py.

The gain is the number of his messages that count.
"""

import tracemalloc

import numpy as np
import pytest

from fedsync.cipher.encoding import sealed_wire as wire
from fedsync.cipher.keys.material import SiloKeys
from tests.attacks.adversary import Federation
from tests.attacks.conftest import Make


@pytest.fixture
def federation(make: Make) -> Federation:
    """One with an honest update, which the server has not taken yet."""
    made = make()
    made.train("silo-a")
    return made


def test_nothing_that_was_changed_on_its_way_counts(federation: Federation) -> None:
    honest, rng = federation.updates[federation.last], np.random.default_rng(0)
    count = 0
    for at in rng.integers(len(honest), size=60):
        changed = bytearray(honest)
        changed[at] ^= 1 << int(rng.integers(8))
        count += federation.takes("silo-a", federation.last, bytes(changed))
    assert count == 0
    assert federation.takes("silo-a", federation.last, honest), "the honest one does"


def test_nothing_under_a_key_of_one_s_own_counts(federation: Federation) -> None:
    honest, own = federation.envelope(federation.last), SiloKeys.generate("silo-a")
    data = wire.encode(honest.head, honest.words, honest.tag, own.signing)
    assert not federation.takes("silo-a", federation.last, data)
    assert not federation.takes("silo-z", "silo-z/1", data.replace(b"silo-a", b"silo-z"))


def test_sizes_that_are_announced_take_no_memory(federation: Federation) -> None:
    """A header that says a million chunks costs nothing; the gain is in MiB."""
    honest = bytearray(federation.updates[federation.last])
    for field in range(12, 40):
        honest[field] = 0xFF
    tracemalloc.start()
    for length in (len(honest), 1000, 64, 0):
        assert not federation.takes("silo-a", federation.last, bytes(honest[:length]))
    peak = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    assert peak < 2
