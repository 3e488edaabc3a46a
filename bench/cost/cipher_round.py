"""One round of encrypted aggregation with FedSync's suites, all roles in one process, by processor time."""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fedsync.cipher.encoding import sealed_wire as wire
from fedsync.cipher.encoding import tally
from fedsync.cipher.encoding.fields import annex_digest, pack_named
from fedsync.cipher.encoding.integrity import Authentic, Authenticator, added
from fedsync.cipher.encoding.packing import Packing, Slots
from fedsync.cipher.encoding.quantization import QuantizationGrid, needed_exponents
from fedsync.cipher.keys.material import GroupKey, Purpose, SiloKeys
from fedsync.cipher.masking.mask_roster import MaskRoster, announce, fresh_pair, least_survivors
from fedsync.cipher.masking.mask_round import MaskRound, SignAnswer, Survivors, read_question
from fedsync.cipher.masking.masked_work import WorkDone
from fedsync.cipher.masking.masks import Masked, Unmasker
from fedsync.cipher.masking.unmask import Unmasking
from fedsync.cipher.silo.sealing import PORTION, Serial, open_portions, seal_pieces
from fedsync.cipher.suites import open_suite
from fedsync.cipher.suites.bfv import new_context
from fedsync.cipher.suites.suite import NO_DIGEST, NONCE_BYTES, Adder, Member, Words, check_words, form_of
from fedsync.common.errors import ConfigError
from fedsync.model.layout import Layout, Vector

T = TypeVar("T")

KINDS = ("bfv", "pad", "masked")
_COLLUDING = 1
_MILLION, _MIB = 1e6, 2**20
OPENINGS = 3
# More of what takes a millisecond only.
ADDITIONS = 4
_CAP = 4096
# Widths of the four stages of ResNet-18 for small images; at a scale of 1 it has 11.2 million values.
_WIDTHS, _BLOCKS, _CLASSES, _IMAGE = (64, 128, 256, 512), 2, 10, 3
_WHOLE = 11.2e6


_ALIKE = (WorkDone(20, 640, 20 * 2**20, 0), 4.0)
"""Silos do the same work."""


@dataclass(frozen=True, slots=True)
class CipherCost:
    """One round. Speeds are millions of values a second of processor time, for one silo's update.

    Args:
        kind: suite.
        params: values of the update.
        silos: that were added.
        bits: of a quantised value; 64 where they are not quantised.
        seal_mparams_s: update to message, all included: quantise, pack, encrypt, serialise, tag, hash, sign.
        server_add_mparams_s: check one silo's words and add them (peers: load and add). Checking the signature is
            not in it; peers have none.
        open_mparams_s: sum to mean: check, check the tag, decrypt, unpack, scale.
        bytes_per_param_up: of the message.
        bytes_per_param_down: of the message with the sum.
        max_error: largest difference to the mean in float64, over the largest value of that mean.
        peak_mib: most memory in use above that at the start, one silo and the server together.
        tag_mparams_s: of sealing, the tag alone; None where there is none.
        check_mparams_s: of opening, the check of the tag alone, which comes before the sum is decrypted.
    """

    kind: str
    params: int
    silos: int
    bits: int
    seal_mparams_s: float
    server_add_mparams_s: float
    open_mparams_s: float
    bytes_per_param_up: float
    bytes_per_param_down: float
    max_error: float
    peak_mib: float
    tag_mparams_s: float | None = None
    check_mparams_s: float | None = None


@dataclass(slots=True)
class Clock:
    """Processor seconds of repeated work. The least of them counts: the rest is others' doing."""

    least_s: dict[str, float] = field(default_factory=dict)

    def time(self, name: str, work: Callable[[], T]) -> T:
        start_s = time.process_time()
        done = work()
        taken_s = time.process_time() - start_s
        self.least_s[name] = min(taken_s, self.least_s.get(name, taken_s))
        return done

    def speed(self, name: str, params: int) -> float:
        return params / _MILLION / self.least_s[name]


@dataclass(slots=True)
class Peak:
    """Most resident memory since the start, above that at the start [bytes]."""

    used: int = 0


def measure_suite(kind: str, bits: int, params: int, silos: int) -> CipherCost:
    """One round with a suite of FedSync: every silo seals, the server adds, a silo opens.

    Raises:
        ConfigError: the suite or the number of bits does not exist, or cannot add so many updates.
    """
    form = form_of(kind)
    packing = Packing(bits, form.slot_bits)
    limit = form.limit(packing)
    if silos > limit:
        raise ConfigError("--silos", f"{silos}, but sums of {bits} bits hold {limit} updates", "Take fewer, or 16 bits")
    least = least_survivors(_COLLUDING)
    if kind == "masked" and silos < least:
        raise ConfigError("--silos", f"{silos}, masks need {least}", f"Take {least} at least")
    layout = resnet_layout(params)
    # What silos agree on by their votes: enough for all.
    needed = [needed_exponents(update_of(silo, params), layout, 1.0, bits) for silo in range(silos)]
    round_ = _Round(kind, QuantizationGrid(layout, packing, tuple(map(max, zip(*needed, strict=True))), _CAP), silos)
    clock = Clock()
    mean = np.zeros(params)
    total: Words | None = None
    tag, members, up = wire.NO_TAG, tuple[Member, ...](), 0
    with watched_memory() as peak:
        for silo in range(silos):
            update = update_of(silo, params)
            mean += update.astype(np.float64) * weight_of(silo)
            message = clock.time("seal", partial(round_.seal, silo, update))
            up = len(message)
            envelope = round_.receive(silo, message)
            clock.time("tag", partial(round_.tag, envelope))
            if total is None:
                total = envelope.words.copy()
            else:
                clock.time("add", partial(round_.check_and_add, total, envelope.words))
                for _ in range(ADDITIONS):
                    clock.time("add", partial(round_.check_and_add, total.copy(), envelope.words))
            tag, members = added(tag, envelope.tag, form), members + envelope.head.members
            del message, envelope
        if total is None:
            raise ConfigError("--silos", "there are none", "Take two at least")
        down = round_.aggregate(total, tag, members)
        opening = round_.unmask()
        for _ in range(OPENINGS):
            got = clock.time("open", partial(round_.open, down))
            clock.time("check", partial(round_.check, round_.read(down)))
    mean /= sum(weight_of(silo) for silo in range(silos))
    return cost_of(kind, bits, params, silos, clock, (up, len(down) + len(opening)), error_of(got, mean), peak)


class _Round:
    """Silos and server of one round, with keys made for it."""

    def __init__(self, kind: str, grid: QuantizationGrid, silos: int) -> None:
        context = b"no context" if kind == "pad" else new_context()
        self._keys = [SiloKeys.generate(f"silo{silo}") for silo in range(silos)]
        self._group = GroupKey(1, context, secrets.token_bytes(32), {}, bytes(32))
        self._grid = grid
        self._form = form_of(kind)
        self._sealer = open_suite(kind, self._group)
        self._adder = Adder(self._form)
        self._authenticator = Authenticator(self._group.derive(Purpose.TAG), self._form)
        self._masked = kind == "masked"
        members = {keys.name: keys.public for keys in self._keys}
        self._pairs = {keys.name: fresh_pair(keys) for keys in self._keys}
        announced = pack_named({name: announce(pair, bytes(32)) for name, pair in self._pairs.items()})
        self._roster = MaskRoster.read(announced, members, bytes(32), _COLLUDING)
        self._masks: dict[str, MaskRound] = {}

    def seal(self, silo: int, update: Vector) -> bytearray:
        """An update's message."""
        grid, keys = self._grid, self._keys[silo]
        member = Member(f"{keys.name}/1", 0, secrets.token_bytes(NONCE_BYTES), NO_DIGEST)
        factor = weight_of(silo) / grid.cap
        votes = needed_exponents(update, grid.layout, factor, grid.packing.bits)
        own = tally.build(tally.Contribution(weight_of(silo), votes), grid.cap)
        rng = np.random.Generator(np.random.SFC64(silo))
        portions: Iterator[Slots] = (slots for slots, _ in grid.encode(own, update, factor, rng))
        head = self._head(wire.Kind.UPDATE, keys.name, (member,))
        pipeline = Serial(self._sealer)
        if self._masked:
            mask = self._masks[keys.name] = MaskRound(self._pairs[keys.name], self._roster, bytes(32), *_ALIKE)
            pipeline = Serial(Masked(self._sealer, mask.mask))
            member = replace(head.members[0], annex=annex_digest(mask.annex))
            head = replace(head, members=(member,), annex=mask.annex)
        return bytearray(b"".join(seal_pieces(head, portions, pipeline, self._authenticator, keys.signing)))

    def receive(self, silo: int, message: bytearray) -> wire.Envelope:
        """The message at the server."""
        keys = self._keys[silo]
        expected = self._expected(wire.Kind.UPDATE, keys.name, f"{keys.name}/1", keys.public.signing)
        return wire.decode(message, expected)

    def tag(self, envelope: wire.Envelope) -> wire.Tag:
        """The tag of an update once more, in the portions in which it was sealed."""
        hasher = self._authenticator.hasher()
        for first in range(0, len(envelope.words), PORTION):
            hasher.take(envelope.words[first : first + PORTION])
        return self._authenticator.tag(hasher.value(), envelope.head)

    def check_and_add(self, total: Words, words: Words) -> None:
        """The server's work on the words of one update."""
        check_words(words, self._form, "silo")
        self._adder.add(total, words)

    def aggregate(self, total: Words, tag: wire.Tag, members: tuple[Member, ...]) -> bytes:
        """The sum's message."""
        return wire.encode(self._head(wire.Kind.AGGREGATE, "server", members), total, tag, None)

    def read(self, message: bytes) -> wire.Envelope:
        """The sum's message at a silo."""
        return wire.decode(message, self._expected(wire.Kind.AGGREGATE, "server"))

    def check(self, envelope: wire.Envelope) -> Authentic:
        return self._authenticator.authenticate(envelope, "server")

    def open(self, message: bytes) -> Vector:
        """The mean at a silo; with masks, what the survivors reveal included."""
        envelope = self.read(message)
        authentic = self.check(envelope)
        members, sealer = envelope.head.members, self._sealer
        if self._masked:
            sealer = Masked(sealer, Unmasker(self.unmask(), members).unmask)
        pipeline = Serial(sealer)
        (first,) = open_portions([authentic.first], members, pipeline, "server")
        form = tally.HeaderForm(len(self._grid.layout.names))
        added_up = tally.read(first, len(members), self._grid.cap, form, "server")
        mean = np.zeros(self._grid.layout.size, dtype=np.float32)
        portions = open_portions(authentic.spans(), members, pipeline, "server")
        self._grid.decode(portions, added_up.mean_factor(self._grid.cap), mean, len(members))
        return mean

    def unmask(self) -> bytes:
        """What takes masks off the sum: silos are asked, and the server puts it together."""
        if not self._masked:
            return b""
        annexes = {name: masks.annex for name, masks in self._masks.items()}
        unmasking = Unmasking(annexes, {keys.name: keys.public.signing for keys in self._keys}, _COLLUDING)
        while not unmasking.done:
            for name, payload in unmasking.questions().items():
                question, own = read_question(payload), self._masks[name]
                if isinstance(question, Survivors):
                    answer = SignAnswer(own.context, own.sign(question)).encode()
                else:
                    answer = own.reveal(question).encode()
                unmasking.answer(name, answer)
        return unmasking.opening() or b""

    def _head(self, kind: wire.Kind, sender: str, members: tuple[Member, ...]) -> wire.Head:
        grid = self._grid
        return wire.Head(
            *(
                kind,
                self._form,
                grid.packing,
                sender,
                0,
                0,
                1,
                self._group.fingerprint,
                grid.digest,
                grid.chunks,
                members,
            )
        )

    def _expected(
        self, kind: wire.Kind, sender: str, update_id: str | None = None, public: bytes | None = None
    ) -> wire.Expected:
        head = self._head(kind, sender, ())
        return wire.Expected(
            *(head.kind, head.form, head.packing, head.sender, head.round, head.attempt, head.epoch, head.fingerprint),
            *(head.grid, head.chunks, update_id, public),
        )


def resnet_layout(params: int) -> Layout:
    """The 102 tensors of ResNet-18 with batch norm, scaled in width to ``params`` values in all.

    How many tensors there are matters to peers, who encrypt each on its own.
    """
    scale = math.sqrt(params / _WHOLE)
    while True:
        sizes = _sizes([max(round(width * scale), 1) for width in _WIDTHS])
        left = params - sum(sizes)
        if left >= 0:
            break
        scale *= 0.99
    # Widths are whole numbers: the last tensor has what is missing.
    sizes[-1] += left
    return Layout(tuple(f"tensor{index}" for index in range(len(sizes))), tuple((size,) for size in sizes))


def _sizes(widths: Sequence[int]) -> list[int]:
    sizes = [_IMAGE * 9 * widths[0], *[widths[0]] * 4]
    before = widths[0]
    for stage, width in enumerate(widths):
        for block in range(_BLOCKS):
            sizes += [before * width * 9, *[width] * 4, width * width * 9, *[width] * 4]
            if stage and not block:
                sizes += [before * width, *[width] * 4]
            before = width
    return [*sizes, _CLASSES * before, _CLASSES]


def update_of(silo: int, params: int) -> Vector:
    """Values such as updates have."""
    return np.random.default_rng(silo).standard_normal(params, dtype=np.float32) * np.float32(0.01)


def weight_of(silo: int) -> int:
    return max(_CAP - 37 * silo, 1)


def error_of(got: Vector, mean: NDArray[np.float64]) -> float:
    return float(np.abs(got - mean).max() / np.abs(mean).max())


def cost_of(
    kind: str, bits: int, params: int, silos: int, clock: Clock, nbytes: tuple[int, int], error: float, peak: Peak
) -> CipherCost:
    seal, add, open_ = (clock.speed(name, params) for name in ("seal", "add", "open"))
    up, down = (size / params for size in nbytes)
    tags = [clock.speed(name, params) if name in clock.least_s else None for name in ("tag", "check")]
    return CipherCost(kind, params, silos, bits, seal, add, open_, up, down, error, peak.used / _MIB, *tags)


@contextmanager
def watched_memory() -> Iterator[Peak]:
    """Measure the most resident memory of this process within the block."""
    peak = Peak()
    with suppress(OSError):
        # Linux: forget the highest so far.
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = status("VmRSS")
    yield peak
    peak.used = max(status("VmHWM") - before, 0)


def status(name: str) -> int:
    """A line of this process's status [bytes]."""
    import resource

    status = Path("/proc/self/status")
    if os.name == "posix" and status.exists():
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    # Elsewhere there is only the highest ever.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
