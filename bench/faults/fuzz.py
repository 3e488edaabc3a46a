"""Mutated messages against the server and a silo: each is refused, or does no harm; nothing crashes, hangs or grows.

    python bench/faults/fuzz.py                     100,000 messages, in a process of their own

The messages are an update for the server, which checks and adds it, and a sum for a silo, which checks its format and
its tag, decrypts it in native code and reads the header. Signatures are not checked, as if the attacker had a key: the
code behind them must withstand the attack, too. A third target is the whole: the server's store, which checks
signatures, and a silo's copy, which receives sums.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil

from bench.faults.fuzz_whole import Whole
from fedsync.cipher.encoding import sealed_wire as wire
from fedsync.cipher.encoding import tally
from fedsync.cipher.encoding.integrity import Authenticator, added
from fedsync.cipher.encoding.packing import Packing
from fedsync.cipher.encoding.quantization import QuantizationGrid
from fedsync.cipher.keys.material import GroupKey, Purpose, SiloKeys
from fedsync.cipher.silo.sealing import Serial, open_portions, seal_pieces
from fedsync.cipher.suites import bfv, open_suite
from fedsync.cipher.suites.suite import NO_DIGEST, Adder, Member, form_of
from fedsync.common.errors import ProtocolError
from fedsync.model.layout import Layout

KINDS = ("bfv", "pad")
VALUES = 3000
MIB = 2**20
MOST_GROWTH = 32 * MIB
SLOWEST_S = 2.0

HEADER = 360
"""Bytes that the header of a sum of two has at most, a multiple of 8."""

EDGES = [0, 1, 2, 7, 8, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]

Mutation = Callable[[random.Random, bytearray], bytearray]


def flip(rng: random.Random, data: bytearray) -> bytearray:
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def flip_header(rng: random.Random, data: bytearray) -> bytearray:
    data[rng.randrange(160)] ^= 1 << rng.randrange(8)
    return data


def edge(rng: random.Random, data: bytearray) -> bytearray:
    """A number at the end of its range, where a number may stand."""
    size = rng.choice((1, 2, 4, 8))
    at = rng.randrange(160 if rng.random() < 0.7 else len(data) - 8)
    data[at : at + size] = (rng.choice(EDGES) % 256**size).to_bytes(size, "little")
    return data


def cut(rng: random.Random, data: bytearray) -> bytearray:
    return data[: rng.randrange(len(data))]


def extend(rng: random.Random, data: bytearray) -> bytearray:
    return data + rng.randbytes(rng.choice((1, 8, 64, 65_536)))


def double(rng: random.Random, data: bytearray) -> bytearray:
    return data + data


def erase(rng: random.Random, data: bytearray) -> bytearray:
    at, size = rng.randrange(len(data)), rng.choice((1, 8, 100, 40_000))
    return data[:at] + data[at + size :]


def repeat(rng: random.Random, data: bytearray) -> bytearray:
    at, size = rng.randrange(len(data)), rng.choice((1, 8, 100))
    return data[:at] + data[at : at + size] + data[at:]


def fill(rng: random.Random, data: bytearray) -> bytearray:
    at, size = rng.randrange(len(data)), rng.choice((8, 100, 40_000))
    size = min(size, len(data) - at)
    data[at : at + size] = bytes([rng.choice((0, 255))]) * size
    return data


def noise(rng: random.Random, data: bytearray) -> bytearray:
    """Random words below 2^59: they pass every check but the tag."""
    at = HEADER + 8 * rng.randrange(1000)
    words = np.random.default_rng(rng.getrandbits(32)).integers(0, 2**59, 1000, dtype=np.uint64)
    data[at : at + 8000] = words.tobytes()
    return data


def scramble(rng: random.Random, data: bytearray) -> bytearray:
    return bytearray(rng.randbytes(rng.choice((0, 1, 84, 128, 4096, len(data)))))


MUTATIONS: list[Mutation] = [flip, flip_header, edge, edge, cut, extend, double, erase, repeat, fill, noise, scramble]


@dataclass(slots=True)
class Outcome:
    """What came of the messages."""

    done: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    harmless: int = 0
    slowest_s: float = 0.0
    growth: int = 0


class Targets:
    """A server and a silo with a suite, and a message for each."""

    def __init__(self, kind: str) -> None:
        layout = Layout(("a", "b"), ((VALUES - 10,), (10,)))
        form = form_of(kind)
        self._grid = QuantizationGrid(layout, Packing(16, form.slot_bits), (0, 0), 16)
        self._group = GroupKey(1, bfv.new_context() if kind == "bfv" else b"none", bytes(32), {}, bytes(32))
        self._pipeline = Serial(open_suite(kind, self._group))
        self._adder = Adder(form)
        self._authenticator = Authenticator(self._group.derive(Purpose.TAG), form)
        keys = SiloKeys.generate("silo")
        updates = [self._update(f"silo/{i}", keys) for i in range(2)]
        self._envelopes = [
            wire.decode(data, self._expected(wire.Kind.UPDATE, f"silo/{i}")) for i, data in enumerate(updates)
        ]
        self.update = bytes(updates[0])
        total = self._envelopes[0].words.copy()
        self._adder.add(total, self._envelopes[1].words)
        members = tuple(envelope.head.members[0] for envelope in self._envelopes)
        tag = added(self._envelopes[0].tag, self._envelopes[1].tag, form)
        self.sum = wire.encode(self._head(wire.Kind.AGGREGATE, members), total, tag, None)
        self._total = total
        self._mean = self._opened(self.sum)

    def server(self, data: bytes | bytearray) -> bool:
        """The server takes an update. True: it was the one that was sent."""
        envelope = wire.decode(data, self._expected(wire.Kind.UPDATE, "silo/0"))
        self._adder.add(self._total, envelope.words)
        return bool((envelope.words == self._envelopes[0].words).all())

    def silo(self, data: bytes | bytearray) -> bool:
        """A silo opens a sum. True: it was the one that was sent; otherwise something passed that must not."""
        return bool((self._opened(data) == self._mean).all())

    def _opened(self, data: bytes | bytearray) -> np.ndarray:
        envelope = wire.decode(data, self._expected(wire.Kind.AGGREGATE, None))
        spans = self._authenticator.authenticate(envelope, "server").spans()
        members = envelope.head.members
        slots = np.concatenate(list(open_portions(spans, members, self._pipeline, "server")))
        added_up = tally.read(slots[0], len(members), self._grid.cap, tally.HeaderForm(2), "server")
        mean = np.zeros(VALUES, np.float32)
        self._grid.decode([slots], added_up.mean_factor(self._grid.cap), mean, len(members))
        return mean

    def _update(self, update_id: str, keys: SiloKeys) -> bytearray:
        own = tally.build(tally.Contribution(3, (0, 0)), self._grid.cap)
        rng = np.random.default_rng(1)
        values = rng.normal(size=VALUES).astype(np.float32) / 8
        portions = (slots for slots, _ in self._grid.encode(own, values, 3 / self._grid.cap, rng))
        head = self._head(wire.Kind.UPDATE, (Member(update_id, 0, secrets.token_bytes(16), NO_DIGEST),))
        return bytearray(b"".join(seal_pieces(head, portions, self._pipeline, self._authenticator, keys.signing)))

    def _head(self, kind: wire.Kind, members: tuple[Member, ...]) -> wire.Head:
        grid, form = self._grid, self._adder.form
        return wire.Head(kind, form, grid.packing, "silo", 0, 0, 1, bytes(16), grid.digest, grid.chunks, members)

    def _expected(self, kind: wire.Kind, update_id: str | None) -> wire.Expected:
        head = self._head(kind, ())
        return wire.Expected(
            kind, head.form, head.packing, "silo", 0, 0, 1, head.fingerprint, head.grid, head.chunks, update_id
        )


def attack(count: int, seed: int, limit_s: float = float("inf")) -> Outcome:
    """Send mutated messages to all targets in turn.

    Raises:
        Exception: whatever a target raised that is no `ProtocolError`, or AssertionError if it took what it must not.
    """
    rng = random.Random(seed)
    targets: list[Targets | Whole] = [*(Targets(kind) for kind in KINDS), Whole()]
    outcome = Outcome()
    process = psutil.Process()
    start_s, before = time.monotonic(), 0
    while outcome.done < count and time.monotonic() - start_s < limit_s:
        target = targets[outcome.done % len(targets)]
        to_silo = outcome.done // len(targets) % 2 == 1
        sent = target.sum if to_silo else target.update
        data = rng.choice(MUTATIONS)(rng, bytearray(sent))
        began_s = time.monotonic()
        try:
            same = target.silo(data) if to_silo else target.server(data)
        except ProtocolError as error:
            outcome.refused[error.check] += 1
        else:
            # What the server cannot see, silos do: the tag is theirs.
            assert same or not to_silo, "a silo took a sum that nobody made"
            outcome.harmless += 1
        outcome.slowest_s = max(outcome.slowest_s, time.monotonic() - began_s)
        outcome.done += 1
        if outcome.done == min(2000, count // 2):
            before = process.memory_info().rss
    outcome.growth = process.memory_info().rss - before
    return outcome


def _child(count: int, seed: int, limit_s: float, pipe: Connection) -> None:
    pipe.send(attack(count, seed, limit_s))


def main() -> int:
    from bench.common import print_table, write_json

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=900, metavar="S", help="seconds; what is done by then counts")
    parser.add_argument("--out", type=Path, default=Path("bench/results/fuzz.json"))
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    child = spawn.Process(target=_child, args=(options.messages, options.seed, options.limit, theirs))
    child.start()
    theirs.close()
    outcome: Outcome | None = None
    try:
        if ours.poll(options.limit + 60):
            outcome = ours.recv()
    except EOFError:
        pass
    if outcome is None:
        child.kill()
    child.join()
    if outcome is None:
        print(f"it hung, crashed or took what it must not: the process ended with {child.exitcode}")
        return 1
    rows = [
        *((f"refused: {check}", count) for check, count in outcome.refused.most_common()),
        ("harmless", outcome.harmless),
    ]
    print_table(f"{outcome.done:,} mutated messages against server and silo", ("outcome", "messages"), rows)
    print(f"slowest {outcome.slowest_s * 1000:.0f} ms, memory grew by {outcome.growth / MIB:.1f} MiB")
    write_json(
        options.out,
        {
            "messages": outcome.done,
            "refused": dict(outcome.refused),
            "harmless": outcome.harmless,
            "slowest_s": outcome.slowest_s,
            "growth_mib": outcome.growth / MIB,
        },
    )
    return 0 if outcome.growth < MOST_GROWTH and outcome.slowest_s < SLOWEST_S else 1


if __name__ == "__main__":
    raise SystemExit(main())
