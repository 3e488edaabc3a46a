"""Current order (training request) of a trainer, and the result of the last order on the silo's disk.

A new order supersedes the order before it, whose result the server no longer expects: the older order ends after its
current step, and the new order begins then.

The answer of the last order and the next order's start position in the data are in one `VectorFile`. So after a crash
the order is either done or it never happened. If it is done, a repeated request gets the answer without a second
training. The update is sent from the file.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fedsync.common import foreign
from fedsync.common.codec import decode, encode
from fedsync.common.errors import SERVER, ProtocolError
from fedsync.common.files import DIGEST_BYTES, OWNER_FILE, digested, undigested, write_pieces
from fedsync.core.orders import Cursor, WorkOrder, WorkReport
from fedsync.model.chunked_arrays import digest, map_file, pieces
from fedsync.model.layout import Vector
from fedsync.model.transfer import OtherVersion, Payload, VersionMismatch
from fedsync.silo.protocol import Completed, InProgress

logger = foreign.logger(__name__)


class OrderJob:
    """One order, which begins when ``before`` is over. Its thread writes it; request threads read it."""

    def __init__(self, order: WorkOrder, before: OrderJob | None = None) -> None:
        self.order = order
        self.before = before
        self.steps = 0
        self.halt = threading.Event()
        self.over = threading.Event()
        self.given_up = False
        self._ending = threading.Lock()
        self.outcome: Completed | VersionMismatch | None = None
        self.error: Exception | None = None

    def watch(self, steps: int, samples: int) -> bool:
        if self.error is not None:  # clients know it as failed, so it must not end as done, nor give privacy back
            raise self.error
        self.steps = steps
        return not self.halt.is_set()

    def end(self, outcome: Completed | VersionMismatch | None = None, error: Exception | None = None) -> None:
        with self._ending:
            if not self.over.is_set():
                self.outcome, self.error = outcome, error
                self.over.set()

    def reply(self, wait_s: float | None) -> tuple[WorkReport | VersionMismatch | InProgress, Payload | None]:
        """Return the result, or the progress after ``wait_s`` [s]; raise the error of the training."""
        if not self.over.wait(wait_s):
            return InProgress(self.steps, self.steps * self.order.batch_size), None
        if self.error is not None:
            raise self.error
        assert self.outcome is not None
        if isinstance(self.outcome, Completed):
            return self.outcome.report, self.outcome.update
        return self.outcome, None


class CurrentOrder:
    """Newest order of a trainer, and its thread; initially the order that was ``done`` last, if any."""

    def __init__(self, train: Callable[[OrderJob, Payload], Completed], done: LastOrder | None) -> None:
        self._train = train
        self._job = None if done is None else OrderJob(done.order)
        if self._job is not None and done is not None:
            self._job.end(done.answer)
        self._entrance = threading.Lock()

    @property
    def busy(self) -> bool:
        job = self._job
        return job is not None and not job.over.is_set()

    def find(self, update_id: str) -> OrderJob | None:
        job = self._job
        return job if job is not None and job.order.update_id == update_id else None

    def wait(self) -> None:
        job = self._job
        if job is not None:
            job.over.wait()

    def hang(self, job: OrderJob, error: Exception, holds: int) -> None:
        """End a hanging job with an error for its clients. The server repeats an order that waits for its end."""
        with self._entrance:
            job.end(error=error)
            if self._job is not None:
                self._job.end(VersionMismatch(holds))

    def enter(self, order: WorkOrder, received: Payload, accept: Callable[[bool], None]) -> OrderJob:
        """Begin an order, unless it is the current order; a refused order begins again. End the order before it.

        An order with a known id but other content counts as new: a restored server may reuse an id. ``accept`` raises
        if the silo's owner does not allow the order; its argument says whether the order was accepted before, and
        refused for its payload.
        """
        with self._entrance:
            before = self._job
            again = before is not None and before.order == order
            if before is not None and again and not isinstance(before.outcome, VersionMismatch):
                return before
            accept(again)
            if before is not None:
                before.given_up = True
                before.halt.set()
            job = self._job = OrderJob(order, before)
            threading.Thread(target=self._work, args=(job, received), daemon=True).start()
            return job

    def _work(self, job: OrderJob, received: Payload) -> None:
        try:
            if job.before is not None:
                job.before.over.wait()
                job.before = None  # else the chain of all earlier jobs would stay in memory
            if job.given_up:
                raise ProtocolError(SERVER, "order", f"{job.order.update_id!r} was given up before it began")
            job.end(self._train(job, received))
        except OtherVersion as error:
            job.end(error.mismatch)
        except Exception as error:  # raised again in the requesting thread
            job.end(error=error)


_UPDATE, _OWED = "", "owed"  # names of a file's vectors


@dataclass(frozen=True, slots=True)
class LastOrder:
    """Completed order with its answer. ``cursor`` is the position for the next order, and ``owed`` the rounding error
    that the next update corrects, float32 [values]. ``number`` counts the silo's finished orders, from 1. ``form`` is
    ``frozen`` of `ModelForm`.
    """

    order: WorkOrder
    answer: Completed
    cursor: Cursor
    owed: Vector | None = None
    number: int = 0
    form: str = ""

    def save(self, path: Path) -> Self:
        """Write the file durably, or raise `ConfigError`; return the order with its update as a map of the file."""
        about = {
            "order": encode(self.order),
            "report": encode(self.answer.report),
            "cursor": encode(replace(self.cursor, private=b"")),
            "number": self.number,
            "form": self.form,
        }
        owed = {} if self.owed is None else {_OWED: self.owed}
        vectors = VectorFile(about, {**owed, _UPDATE: self.answer.update}, self.cursor.private).save(path)
        return replace(self, answer=replace(self.answer, update=vectors[_UPDATE]), owed=vectors.get(_OWED))

    @classmethod
    def load(cls, path: Path) -> LastOrder | None:
        if not path.exists():
            return None
        found = VectorFile.load(path)
        if found is None:
            logger.warning("%s is corrupt: this silo begins anew in its data", path)
            return None
        about, owed = found.about, found.vectors.get(_OWED)
        answer = Completed(decode(WorkReport, about["report"], own=True), found.vectors[_UPDATE])
        cursor = replace(decode(Cursor, about["cursor"], own=True), private=found.rest)
        order, form = decode(WorkOrder, about["order"], own=True), about.get("form", "")
        return cls(order, answer, cursor, owed, about["number"], form)


_ALIGNED = 64  # bytes: the map of the first vector is an ordinary aligned array


@dataclass(frozen=True, slots=True, eq=False)
class VectorFile:
    """File of the caller's JSON data, flat arrays and other bytes; it is found again complete, or not at all.

    | bytes | content |
    |---|---|
    | 32 | SHA-256 of the line |
    | to a multiple of 64 | JSON line: the caller's data, and types, sizes and SHA-256s of the rest |
    | as many as the line says | vectors, one after the other, as memory maps |
    | to the end | other bytes |
    """

    about: Mapping[str, Any]
    vectors: Mapping[str, NDArray[Any]]
    rest: bytes = b""

    def save(self, path: Path) -> Mapping[str, NDArray[Any]]:
        """Write the file durably, or raise `ConfigError`; return the vectors as maps of the file."""
        described = {name: (each.dtype.name, each.size, digest(each).hex()) for name, each in self.vectors.items()}
        rest = hashlib.sha256(self.rest).hexdigest()
        text = json.dumps({"about": self.about, "vectors": described, "rest": rest}, separators=(",", ":")).encode()
        begins = -(-(DIGEST_BYTES + len(text) + 1) // _ALIGNED) * _ALIGNED
        head = digested(text.ljust(begins - DIGEST_BYTES - 1) + b"\n")
        vectors = chain.from_iterable(map(pieces, self.vectors.values()))
        write_pieces(path, chain((head,), vectors, (self.rest,)), OWNER_FILE)
        return _mapped(path, described, begins)

    @classmethod
    def load(cls, path: Path) -> VectorFile | None:
        """Return the file's content; None where it is damaged. `OSError` if it is missing or unreadable."""
        with path.open("rb") as file:
            line = undigested(file.read(DIGEST_BYTES) + file.readline())
            if line is None:
                return None
            said, begins = json.loads(line), file.tell()
            described = said["vectors"]
            ends = begins + sum(size * np.dtype(dtype).itemsize for dtype, size, _ in described.values())
            file.seek(ends)
            rest = file.read()
        # A truncated file fails the digest of the rest or the size check; surplus bytes change the digest.
        if hashlib.sha256(rest).hexdigest() != said["rest"] or path.stat().st_size < ends:
            return None
        vectors = _mapped(path, described, begins)
        whole = all(digest(vectors[name]).hex() == hashed for name, (_, _, hashed) in described.items())
        return cls(said["about"], vectors, rest) if whole else None


def _mapped(path: Path, described: Mapping[str, tuple[str, int, str]], begins: int) -> dict[str, NDArray[Any]]:
    vectors = {}
    for name, (dtype, size, _) in described.items():
        vectors[name] = map_file(path, np.dtype(dtype), begins, size)
        begins += vectors[name].nbytes
    return vectors
