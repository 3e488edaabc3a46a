"""Messages are sealed and opened in portions, in one process or several, with the same result and little memory."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor
from contextlib import closing

import numpy as np
import pytest

from fedsync.cipher.encoding import tally
from fedsync.cipher.encoding.integrity import Authenticator
from fedsync.cipher.encoding.packing import Packing, Slots
from fedsync.cipher.encoding.quantization import QuantizationGrid
from fedsync.cipher.encoding.sealed_wire import decode
from fedsync.cipher.silo.sealing import Pipeline, Pool, Serial, open_portions, seal_pieces
from fedsync.common.errors import ProtocolError
from fedsync.model.layout import Layout
from tests.cipher.messages import KEYS, expected, head
from tests.cipher.sealers import group, member, sealer, slots_of
from tests.memory import traced

MIB = 2**20
TAG_KEY = bytes(32)


def portions(slots: Slots) -> Iterator[Slots]:
    for first in range(0, len(slots), 3):
        yield slots[first : first + 3]


def round_trip(pipeline: Pipeline, slots: Slots, kind: str) -> Slots:
    own = member(0, round_=7)
    of = head(kind, len(slots), (own,))
    authenticator = Authenticator(TAG_KEY, of.form)
    message = bytearray(b"".join(seal_pieces(of, portions(slots), pipeline, authenticator, KEYS.signing)))
    envelope = decode(message, expected(of))
    spans = authenticator.authenticate(envelope, "server").spans()
    return np.concatenate(list(open_portions(spans, envelope.head.members, pipeline, "server")))


@pytest.mark.parametrize("kind", ["bfv", "pad"])
def test_a_message_opens_to_what_was_sealed(kind: str) -> None:
    slots = slots_of(20, 47)
    np.testing.assert_array_equal(round_trip(Serial(sealer(kind)), slots, kind), slots)


def test_several_processes_seal_and_open_in_order() -> None:
    """Two seconds: processes are started afresh, and load the library."""
    slots = slots_of(20, 47)
    with closing(Pool("bfv", group("bfv"), 2)) as pool:
        np.testing.assert_array_equal(round_trip(pool, slots, "bfv"), slots)
        bad = np.full((1, 8192), 2**63, np.uint64)
        with pytest.raises(ProtocolError, match="words"):
            list(open_portions([bad], [member(0)], pool, "server"))


def test_a_process_that_is_killed_costs_one_message_and_no_other() -> None:
    """As the system does where memory runs out; the trainer of these processes goes on for days."""
    slots = slots_of(20, 47)
    with closing(Pool("pad", group("pad"), 1)) as pool:
        np.testing.assert_array_equal(round_trip(pool, slots, "pad"), slots)
        (killed,) = pool._executor._processes
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(BrokenExecutor):
            round_trip(pool, slots, "pad")
        np.testing.assert_array_equal(round_trip(pool, slots, "pad"), slots)


@pytest.mark.parametrize("kind", ["bfv", "pad"])
def test_sealing_takes_the_message_and_little_more(kind: str) -> None:
    """2x the update is the message itself at 16 bits; beside it 64 MiB are allowed, a few are used."""
    size = 2_000_000 if kind == "pad" else 500_000
    layout = Layout(("w",), ((size,),))
    of = head(kind)
    grid = QuantizationGrid(layout, Packing(16, of.form.slot_bits), (0,), 1)
    values = np.zeros(size, np.float32)
    own = tally.build(tally.Contribution(1, (0,)), 1)
    of = head(kind, grid.chunks)
    pipeline, authenticator = Serial(sealer(kind)), Authenticator(TAG_KEY, of.form)
    with traced() as taken:
        made = (slots for slots, _ in grid.encode(own, values, 1.0, np.random.default_rng(0)))
        message = b"".join(seal_pieces(of, made, pipeline, authenticator, KEYS.signing))
    assert len(message) <= 2.2 * values.nbytes
    assert taken.peak < len(message) + 8 * MIB
