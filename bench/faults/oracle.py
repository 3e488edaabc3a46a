"""Forged sums, calibrations and snapshots against a silo: all answers are identical, and take equally long.

    python bench/faults/oracle.py                     10,000 forgeries a suite, a few minutes

A silo whose answers distinguish forgeries is an oracle: a server that may ask often enough learns the group's key. So a
joining silo, with a real silo's policy, receives messages that a server may have recorded, each with one change: bits
of words, tags, members, the data that remove masks, a snapshot. Its answers must be the same byte by byte. Their time
may show the position of the first error in the message, which the server knows, but no more. So a Kolmogorov-Smirnov
test compares, two kinds at a time, forgeries that only the key distinguishes from the original.

The silo's count of forgeries is set to zero after each, because it would be locked after three.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import print_table
from fedsync.cipher.encoding import catch_up
from fedsync.cipher.encoding import sealed_wire as wire
from fedsync.cipher.keys.authority import emulated_keys
from fedsync.cipher.keys.keyring import open_ring
from fedsync.cipher.server.sealed_aggregator import EncryptedAggregator
from fedsync.common.sandbox.path_sandbox import ALLOWED
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit
from fedsync.core.orders import WorkOrder
from fedsync.model.transfer import Payload, VersionMismatch
from fedsync.silo.owner.key_lookup import KEYS
from fedsync.silo.owner.lockout import Lockout
from fedsync.silo.protocol import (
    AskSnapshot,
    Describe,
    EvaluateModel,
    Hello,
    Identity,
    Question,
    Refusal,
    Refused,
    Reply,
    Request,
    Snapshot,
    Train,
    exchange,
    write_reply,
    write_request,
)
from fedsync.silo.session.service import TrainerService

SUITES = ("bfv", "pad", "masked")
SILOS = ("a", "b", "c")
JOINER = "d"
ONE_ANSWER = write_reply(Refused(Refusal.INTEGRITY))
CONTROL = ("sums, members", "sums, tag")
"""Two kinds that fail at different places of a message: the test has to see that these differ."""

SIGNIFICANT = 0.01
"""Chance at which kinds of one suite that take equally long are taken to differ, all comparisons together."""

_WARM = 5
_SIGNATURE_BYTES = 64
_HEADER_BYTES_AT = 12
"""Offset in a sealed message at which the length of its header stands; see `fedsync.cipher.encoding.sealed_wire`."""

Mutation = Callable[[np.random.Generator, np.ndarray], None]
"""Changes a piece of a message, uint8, in place."""


@contextmanager
def real_silo(keys: Path) -> Iterator[None]:
    """This process is a real silo's: its owner's policy says no word leaves it."""
    before = {name: os.environ.get(name) for name in (KEYS, ALLOWED)}
    os.environ.update({KEYS: str(keys), ALLOWED: "{}"})
    log = logging.getLogger("fedsync")
    level = log.level
    log.setLevel(logging.CRITICAL)  # each forgery is logged with its stack
    try:
        yield
    finally:
        log.setLevel(level)
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


class Recorded:
    """A run of two rounds, of which the server keeps all that a joining silo would be sent.

    Args:
        suite: name of the suite.
        folder: for keys.

    Attributes:
        joiner: a silo that has said who it is, and has no model yet.
        beginning: what brings it to version 1.
        later: what brings it to version 2, from another silo's snapshot on.
    """

    def __init__(self, suite: str, folder: Path) -> None:
        self._keys = emulated_keys([*SILOS, JOINER], folder, seed=7)
        overrides = ["task={kind: digits}", "local.steps=1", "local.batch_size=8", f"cipher={{kind: {suite}}}"]
        self._spec = RunSpec.of(StrategyConfig.load("fedavg", overrides), None, len(SILOS) + 1)
        with real_silo(folder / "silos"):
            silos = {name: self._service(name) for name in SILOS}
            self.joiner = self._service(JOINER)
            plan = self._spec.encryption_plan(self.joiner._session.layout)
            assert plan is not None
            self._server = EncryptedAggregator(plan, self._keys.server)
            for name, silo in {**silos, JOINER: self.joiner}.items():
                hello, greeting = _asked(silo, Describe())
                assert isinstance(hello, Hello)
                self._server.greet(name, hello.holds, greeting)
            self._round(silos, 0)
            self.beginning = self._server.outgoing(JOINER).copy()
            self._round(silos, 1)
            self.later = self._server.outgoing(JOINER).copy()

    def _service(self, name: str) -> TrainerService:
        """A silo's; it counts forgeries in memory."""
        silo = TrainerService(Identity(self._spec.dump(), [*SILOS, JOINER].index(name), name))
        silo._session.lockout = Lockout(replace(open_ring(self._keys.silos[name]), folder=None))
        return silo

    def _round(self, silos: dict[str, TrainerService], base: int) -> None:
        done = []
        for name, silo in silos.items():
            order = WorkOrder(f"{name}/{base + 1}", base, base + 1, 8, 1, 0.1, seed=base + 1, evaluate=False)
            self._server.begin(order.update_id)
            reply, update = _asked(silo, Train(order), self._server.outgoing(name))
            assert update is not None, reply
            done.append((name, order.update_id, update))
            self._server.holds(name, base)
        if base > 0:  # version 0 is no news
            reply, sealed = _asked(silos[SILOS[0]], AskSnapshot())
            assert isinstance(reply, Snapshot) and sealed is not None
            self._server.put_snapshot(SILOS[0], reply.version, sealed)
        for name, update_id, update in done:
            self._server.put(name, update_id, update)
        self._server.commit(Commit(base + 1, {update_id: 1 / len(done) for _, update_id, _ in done}))
        while self._server.blocked:
            for name, question in self._server.questions().items():
                reply, answer = _asked(silos[name], Question(), question)
                assert answer is not None, reply
                self._server.answer(name, answer)


def _asked(silo: TrainerService, request: Request, payload: Payload | None = None) -> tuple[Reply, Payload | None]:
    return exchange(silo.ask, request, payload)


# What is changed.


def pieces(message: Payload) -> dict[str, list[slice]]:
    """Where in a catch-up its parts are, by the names of the fields that hold them."""
    whole = message.tobytes()
    found: dict[str, list[slice]] = {}

    def walk(name: str, value: object) -> None:
        if is_dataclass(value):
            for each in fields(value):
                walk(each.name, getattr(value, each.name))
        elif isinstance(value, tuple):
            for each_value in value:
                walk(name, each_value)
        elif isinstance(value, bytes | memoryview) and len(value):
            start = whole.find(bytes(value))
            found.setdefault(name, []).append(slice(start, start + len(value)))

    walk("", catch_up.decode(message))
    return found


def _header_bytes(sealed: np.ndarray) -> int:
    return int(struct.unpack_from("<I", sealed, _HEADER_BYTES_AT)[0])


def _tag_at(sealed: np.ndarray) -> int:
    return len(sealed) - _SIGNATURE_BYTES - 8 * wire.TAG_PARTS


def _words(sealed: np.ndarray) -> np.ndarray:
    return sealed[_header_bytes(sealed) : _tag_at(sealed)].view("<u8")


def low_bit(rng: np.random.Generator, sealed: np.ndarray) -> None:
    words = _words(sealed)
    words[rng.integers(len(words))] ^= np.uint64(1)


def high_bit(rng: np.random.Generator, sealed: np.ndarray) -> None:
    """Bit 40: below the modulus of each suite, and far above the noise of an encryption."""
    words = _words(sealed)
    words[rng.integers(len(words))] ^= np.uint64(1 << 40)


def first_word(rng: np.random.Generator, sealed: np.ndarray) -> None:
    _words(sealed)[0] ^= np.uint64(1 << int(rng.integers(40)))


def many_words(rng: np.random.Generator, sealed: np.ndarray) -> None:
    """Noise on a hundred words, as a server adds it to see when opening fails."""
    words = _words(sealed)
    words[rng.integers(len(words), size=100)] ^= rng.integers(1, 2**40, 100, dtype=np.uint64)


def tag(rng: np.random.Generator, sealed: np.ndarray) -> None:
    part = sealed[_tag_at(sealed) :][8 * int(rng.integers(wire.TAG_PARTS)) :]
    part[rng.integers(6)] ^= np.uint8(1 << int(rng.integers(8)))


def members(rng: np.random.Generator, sealed: np.ndarray) -> None:
    """A byte of what the message says of one update: its name, round, nonce, chain or digests."""
    begin = sealed.tobytes().find(b"/") - 1
    end = _header_bytes(sealed) - 8  # zeros may follow
    sealed[int(rng.integers(begin, end))] ^= np.uint8(1 << int(rng.integers(8)))


def any_byte(rng: np.random.Generator, piece: np.ndarray) -> None:
    """One of five bits: others may make a capital of a hexadecimal digit, which is the same digit."""
    piece[rng.integers(len(piece))] ^= np.uint8(1 << int(rng.integers(5)))


ONLY_THE_KEY_TELLS: dict[str, Mutation] = {
    "low bit": low_bit,
    "high bit": high_bit,
    "first word": first_word,
    "many words": many_words,
    "tag": tag,
}
"""Forgeries of a sealed message that look like the original to all who have no key."""


@dataclass(frozen=True)
class Kind:
    """One kind of forgery.

    Args:
        message: that it is made of.
        places: pieces of it, one of which is changed.
        mutate: how.
        version: that the message leads to.
        alike: kinds of one group must take equally long; empty where anybody tells.
    """

    message: Payload
    places: list[slice]
    mutate: Mutation
    version: int
    alike: str = ""


def kinds_of(recorded: Recorded) -> dict[str, Kind]:
    kinds = {}
    beginning, later = pieces(recorded.beginning), pieces(recorded.later)
    for part in ("calibration", "sums"):
        for name, mutate in ONLY_THE_KEY_TELLS.items():
            kinds[f"{part}, {name}"] = Kind(recorded.beginning, beginning[part], mutate, 1, part)
        kinds[f"{part}, members"] = Kind(recorded.beginning, beginning[part], members, 1)
    if "reveals" in beginning:
        kinds["reveals"] = Kind(recorded.beginning, beginning["reveals"], any_byte, 1)
    kinds["snapshot"] = Kind(recorded.later, later["model"], any_byte, 2)
    return kinds


# What comes of it.


@dataclass
class Outcomes:
    """What a silo answered to one kind of forgery, and how long it took [s]."""

    answers: Counter[tuple[str, int]] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    @property
    def one_answer(self) -> bool:
        return set(self.answers) == {(ONE_ANSWER, 0)}


def forge(recorded: Recorded, folder: Path, messages: int, seed: int) -> dict[str, Outcomes]:
    """Send so many forgeries to a joining silo, kinds in turn and in random order; it stays as it was.

    Raises:
        AssertionError: the silo does not take the original afterwards, so what it refused says nothing.
    """
    kinds, rng = kinds_of(recorded), np.random.default_rng(seed)
    found = {name: Outcomes() for name in kinds}
    with real_silo(folder / "silos"):
        silo = recorded.joiner
        turns = -(-messages // len(kinds)) + _WARM
        for turn in range(turns):
            for name in rng.permutation(list(kinds)):
                kind = kinds[name]
                forged = kind.message.copy()
                kind.mutate(rng, forged[kind.places[int(rng.integers(len(kind.places)))]])
                request = write_request(EvaluateModel(kind.version))
                begin_s = time.perf_counter()
                text, payload = silo.ask(request, forged)
                took_s = time.perf_counter() - begin_s
                found[name].answers[text, 0 if payload is None else payload.nbytes] += 1
                if turn >= _WARM:
                    found[name].seconds.append(took_s)
                _forget(silo)
        for version, original in enumerate((recorded.beginning, recorded.later), start=1):
            reply, _ = _asked(silo, EvaluateModel(version), original)
            assert not isinstance(reply, Refused | VersionMismatch), reply
    return found


def _forget(silo: TrainerService) -> None:
    lockout = silo._session.lockout
    assert lockout is not None
    lockout.unlock()


def chance_of_one_distribution(one: list[float], other: list[float], rng: np.random.Generator) -> float:
    """p-value of the two-sample Kolmogorov-Smirnov test; by 1,000 permutations where SciPy is not installed."""
    try:
        from scipy.stats import ks_2samp
    except ImportError:
        both, size = np.array([*one, *other]), len(one)
        seen = _distance(both[:size], both[size:])
        shuffled = (rng.permutation(both) for _ in range(1000))
        return float(np.mean([_distance(each[:size], each[size:]) >= seen for each in shuffled]))
    return float(ks_2samp(one, other).pvalue)


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    """Largest distance of two empirical distribution functions."""
    at = np.concatenate([one, other])
    below = [np.searchsorted(np.sort(each), at, side="right") / len(each) for each in (one, other)]
    return float(np.abs(below[0] - below[1]).max())


def compare(found: dict[str, Outcomes], kinds: dict[str, Kind]) -> dict[str, float]:
    """p-value of each pair of kinds that only the key tells from the original, and so from each other."""
    rng = np.random.default_rng(0)
    return {
        f"{one} / {other}": chance_of_one_distribution(found[one].seconds, found[other].seconds, rng)
        for one, other in combinations(kinds, 2)
        if kinds[one].alike and kinds[one].alike == kinds[other].alike
    }


def one_suite(suite: str, messages: int, seed: int) -> dict[str, Any]:
    """What came of the forgeries of one suite, for JSON."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recorded = Recorded(suite, folder)
        found = forge(recorded, folder, messages, seed)
        pairs = compare(found, kinds_of(recorded))
        one, other = (found[name].seconds for name in CONTROL)
        control = chance_of_one_distribution(one, other, np.random.default_rng(0))
    return {
        "messages": sum(sum(each.answers.values()) for each in found.values()),
        "one_answer": all(each.one_answer for each in found.values()),
        "alike": all(chance >= SIGNIFICANT / len(pairs) for chance in pairs.values()),
        "pairs": pairs,
        "control": control,
        "kinds": {
            name: {
                "answers": [{"text": text, "bytes": size, "count": n} for (text, size), n in each.answers.items()],
                "ms": {str(share): 1000 * float(np.quantile(each.seconds, share)) for share in (0.1, 0.5, 0.9)},
            }
            for name, each in found.items()
        },
    }


def show(suite: str, result: dict[str, Any]) -> None:
    rows = [
        (
            name,
            sum(answer["count"] for answer in each["answers"]),
            ", ".join(sorted({_word(answer["text"]) for answer in each["answers"]})),
            *(f"{each['ms'][share]:.2f}" for share in ("0.1", "0.5", "0.9")),
            f"{min((p for pair, p in result['pairs'].items() if name in pair.split(' / ')), default=1.0):.3f}",
        )
        for name, each in result["kinds"].items()
    ]
    columns = ["changed", "messages", "answers", "10 % [ms]", "median [ms]", "90 % [ms]", "smallest p"]
    print_table(f"{suite}: forgeries to a joining silo", columns, rows)
    verdict = "one answer to all" if result["one_answer"] else "ANSWERS DIFFER"
    pairs = len(result["pairs"])
    times = "no pair of kinds differs" if result["alike"] else "KINDS DIFFER"
    print(f"{verdict}; {times} in time ({pairs} pairs, significant below {SIGNIFICANT / pairs:.5f})")
    print(f"for comparison: {' / '.join(CONTROL)}, which anybody tells apart, p = {result['control']:.1e}\n")


def _word(text: str) -> str:
    reply = json.loads(text)
    return str(reply.get("code", reply["type"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=10_000, help="for each suite")
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=SUITES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("bench/results/oracle.json"))
    options = parser.parse_args()
    results = {}
    for suite in options.suites:
        results[suite] = one_suite(suite, options.messages, options.seed)
        show(suite, results[suite])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1))
    sys.exit(0 if all(result["one_answer"] and result["alike"] for result in results.values()) else 1)


if __name__ == "__main__":
    main()
