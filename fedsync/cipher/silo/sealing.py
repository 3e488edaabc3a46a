"""Encryption (sealing) and decryption (opening) of whole messages in blocks of a few chunks, on one or more cores."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

from fedsync.cipher.encoding.integrity import Authenticator
from fedsync.cipher.encoding.packing import Slots
from fedsync.cipher.encoding.sealed_wire import Head, Writer
from fedsync.cipher.keys.material import GroupKey
from fedsync.cipher.suites import open_suite
from fedsync.cipher.suites.suite import Member, Sealer, Words

PORTION = 8

# Portions in flight per process: enough to keep it busy, few enough to need little memory.
_AHEAD = 2

T = TypeVar("T")
P = TypeVar("P", Slots, Words)


class Pipeline(Protocol):
    """Sealer and opener of portions of chunks from chunk 0 on, in order, possibly several portions at a time."""

    def seal(self, portions: Iterable[Slots], member: Member) -> Iterator[Words]: ...

    def open(self, portions: Iterable[Words], members: Sequence[Member], sender: str) -> Iterator[Slots]: ...


class Serial:
    """`Pipeline` in the current thread."""

    def __init__(self, sealer: Sealer) -> None:
        self._sealer = sealer

    def seal(self, portions: Iterable[Slots], member: Member) -> Iterator[Words]:
        return (self._sealer.seal(slots, member, first) for first, slots in _numbered(portions))

    def open(self, portions: Iterable[Words], members: Sequence[Member], sender: str) -> Iterator[Slots]:
        return (self._sealer.open(words, members, first, sender) for first, words in _numbered(portions))


class Pool:
    """`Pipeline` over several processes, because the library holds Python's global interpreter lock while it encrypts.

    The processes are spawned, not forked, so threads of this process do no harm. Each process gets the group's secret.
    If a process is killed, the message fails with `BrokenExecutor`, and the next message gets new processes.
    """

    def __init__(self, kind: str, group: GroupKey, processes: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._window = _AHEAD * processes
        self._begun = partial(ProcessPoolExecutor, processes, spawn, _begin, (kind, group))
        self._executor = self._begun()

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)

    def seal(self, portions: Iterable[Slots], member: Member) -> Iterator[Words]:
        return self._in_order(self._executor.submit(_seal, slots, member, at) for at, slots in _numbered(portions))

    def open(self, portions: Iterable[Words], members: Sequence[Member], sender: str) -> Iterator[Slots]:
        named = tuple(members)
        return self._in_order(
            self._executor.submit(_open, words, named, at, sender) for at, words in _numbered(portions)
        )

    def _in_order(self, futures: Iterator[Future[T]]) -> Iterator[T]:
        running: deque[Future[T]] = deque()
        try:
            for future in futures:
                running.append(future)
                if len(running) >= self._window:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        except BrokenExecutor:
            self._executor.shutdown(wait=False)
            self._executor = self._begun()
            raise
        finally:
            for future in running:
                future.cancel()


def seal_pieces(
    head: Head, portions: Iterable[Slots], pipeline: Pipeline, authenticator: Authenticator, signing: bytes | None
) -> Iterator[bytes | memoryview]:
    """Yield the sealed message of one update, in order, a few chunks at a time. ``portions`` are slots from chunk 0 on;
    ``signing`` is as for `fedsync.cipher.encoding.sealed_wire.Writer`.
    """
    (member,) = head.members
    writer, hasher = Writer(head, signing), authenticator.hasher()
    yield writer.header
    for words in pipeline.seal(portions, member):
        hasher.take(words)
        yield writer.payload(words)
    sealed = replace(head, members=(replace(member, digest=writer.digest),))
    yield writer.trailer(authenticator.tag(hasher.value(), sealed))


def open_portions(
    spans: Iterable[Words], members: Sequence[Member], pipeline: Pipeline, sender: str
) -> Iterator[Slots]:
    """Yield the slots of a sum, a few chunks at a time; ``spans`` are as from `Authentic.spans`."""
    portions = (span[first : first + PORTION] for span in spans for first in range(0, len(span), PORTION))
    return pipeline.open(portions, members, sender)


def _numbered(portions: Iterable[P]) -> Iterator[tuple[int, P]]:
    first = 0
    for portion in portions:
        yield first, portion
        first += len(portion)


# State and functions of the pool's processes.

_sealers: list[Sealer] = []


def _begin(kind: str, group: GroupKey) -> None:
    _sealers[:] = [open_suite(kind, group)]


def _seal(slots: Slots, member: Member, first: int) -> Words:
    return _sealers[0].seal(slots, member, first)


def _open(words: Words, members: Sequence[Member], first: int, sender: str) -> Slots:
    return _sealers[0].open(words, members, first, sender)
