"""Messages of a stranger on the network, without any key. On real processes: tests/e2e/test_strangers.py.

The gain is the number of his messages that count.
"""

import numpy as np

from fedsync.cipher.encoding import sealed_wire as wire
from fedsync.cipher.keys.material import SiloKeys
from fedsync.common.errors import FedSyncError
from tests.attacks.adversary import Federation
from tests.attacks.conftest import Make


def taken(federation: Federation, name: str, update_id: str, data: bytes) -> bool:
    federation.aggregator.begin(update_id)
    try:
        federation.aggregator.put(name, update_id, np.frombuffer(data, dtype=np.uint8))
    except FedSyncError:
        return False
    return True


def test_nothing_that_was_changed_on_its_way_counts(make: Make) -> None:
    federation = make()
    federation.train("silo-a")
    honest, rng = federation.updates[federation.last], np.random.default_rng(0)
    count = 0
    for at in rng.integers(len(honest), size=60):
        changed = bytearray(honest)
        changed[at] ^= 1 << int(rng.integers(8))
        count += taken(federation, "silo-a", federation.last, bytes(changed))
    assert count == 0
    assert taken(federation, "silo-a", federation.last, honest), "the honest one does"


def test_nothing_under_a_key_of_one_s_own_counts(make: Make) -> None:
    federation = make()
    federation.train("silo-a")
    honest, own = federation.envelope(federation.last), SiloKeys.generate("silo-a")
    data = wire.encode(honest.head, honest.words, honest.tag, own.signing)
    assert not taken(federation, "silo-a", federation.last, data)
    assert not taken(federation, "silo-z", "silo-z/1", data.replace(b"silo-a", b"silo-z"))


def test_sizes_that_are_announced_take_no_memory(make: Make) -> None:
    """A header that says a million chunks costs nothing; the gain is in MiB."""
    import tracemalloc

    federation = make()
    federation.train("silo-a")
    honest = bytearray(federation.updates[federation.last])
    for field in range(12, 40):
        honest[field] = 0xFF
    tracemalloc.start()
    for length in (len(honest), 1000, 64, 0):
        assert not taken(federation, "silo-a", federation.last, bytes(honest[:length]))
    peak = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    assert peak < 2
