"""Audit log of a silo: all requests, sent data and refusals. It is append-only, as a chain of digests.

Each line is on disk (``fdatasync``) before its answer leaves. So the log has every answer that left, even if the
process is killed at that moment. The answer of an incomplete line never left; the next writer cuts this line off and
records the repair. If the disk rejects a line, the line is removed, and the answer is a refusal.

The log holds none of the silo's data. It names requests and answers as `fedsync.silo.protocol` does, and has size and
SHA-256 of payloads. A refusal has its code; a refusal by the owner's own rules also has a reason, with rules and paths.
`fedsync.ops.audit_heads` writes the signed heads that verify a chain.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from datetime import UTC, datetime
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import get_args

from fedsync.common.errors import ConfigError, ProtocolError
from fedsync.common.files import private_folder, sync
from fedsync.common.locks import taken
from fedsync.common.sandbox.path_sandbox import ALLOWED
from fedsync.model.chunked_arrays import pieces
from fedsync.model.transfer import Payload
from fedsync.silo import protocol
from fedsync.silo.owner import audit_chain
from fedsync.silo.owner.audit_chain import MOST_LINE, AuditBroken, AuditPlace, Fields, file_name
from fedsync.silo.protocol import Identity

_LOCK = "audit.lock"
_MOST_WORDS = 300
_TELLING = {
    protocol.Refusal.OWNER,
    protocol.Refusal.LIMIT,
    protocol.Refusal.BUDGET,
    protocol.Refusal.APPROVAL,
    protocol.Refusal.AWAY,
}
_REPLIES = {kind.__name__ for kind in get_args(protocol.Reply)}


class AuditLog:
    """Writer of a silo's log; the silo's processes write in turn."""

    def __init__(self, place: AuditPlace) -> None:
        self._place, self.asks = place, place.asks
        self._folder = Path(place.folder)
        self._alone = threading.Lock()
        self._file, self._size, self._n, self._digest = 0, -1, 0, audit_chain.FIRST

    def add(self, kind: str, fields: Fields) -> None:
        """Write a line durably; if the disk or the log fails, remove the line and raise `ConfigError`."""
        try:
            with self._alone, taken(private_folder(self._folder) / _LOCK, inf):
                if self._place.required and (self._folder / audit_chain.UNWRITTEN).exists():
                    raise OSError(errno.EIO, "its head cannot be written to another machine, as audit.required demands")
                self._find_end()
                if self._size > self._place.bytes:
                    self._rotate()
                self._write(kind, fields)
        except AuditBroken as error:
            remedy = "Run `fedsync silo audit`. To begin another log, move this folder away"
            raise ConfigError(str(self._folder), str(error), remedy) from error
        except OSError as error:
            problem = f"the audit log cannot be written: {error.strerror}"
            raise ConfigError(str(self._folder), problem, "Free disk space, or check audit.head_to") from error

    def _write(self, kind: str, fields: Fields) -> None:
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        said = {**fields, "n": self._n + 1, "at": at, "before": self._digest, "kind": kind}
        line, digest = audit_chain.sealed_line(said)
        audit_chain.append_line(self._folder / file_name(self._file), line, self._size)
        if self._size == 0:
            sync(self._folder)
        self._n, self._digest, self._size = self._n + 1, digest, self._size + len(line)

    def _find_end(self) -> None:
        files = audit_chain.log_files(self._folder)
        number, path = files[-1] if files else (1, self._folder / file_name(1))
        size = path.stat().st_size if files else 0
        if (number, size) == (self._file, self._size):
            return
        found, torn = _last_line(path) if files else (None, 0)
        for _, each in reversed(files[:-1]):  # a new file may have no line yet
            if found is not None:
                break
            found, _ = _last_line(each)
        self._file, self._size = number, size - torn
        self._n, self._digest = found or (0, audit_chain.FIRST)
        if torn:
            os.truncate(path, self._size)
            self._write("repaired", {"bytes": torn})

    def _rotate(self) -> None:
        self._file, self._size = self._file + 1, 0
        surplus = audit_chain.log_files(self._folder)[: -(self._place.keep - 1) or None]
        if surplus:
            with (self._folder / file_name(surplus[-1][0] + 1)).open("rb") as file:
                self._write("pruned", {"first": int(json.loads(file.readline(MOST_LINE))["n"])})
            for _, path in surplus:
                path.unlink(missing_ok=True)


def audit_here() -> AuditLog | None:
    return _log_of(os.environ.get(ALLOWED) or "{}")


@lru_cache(maxsize=2)
def _log_of(allowed: str) -> AuditLog | None:
    place = json.loads(allowed).get("audit")
    return None if place is None else AuditLog(AuditPlace(**place))


def audit_answer(identity: Identity | None, asked: str, nbytes: int, reply: str, answer: Payload | None) -> None:
    """Record an answer before it leaves, or raise `ConfigError`; ``nbytes``: size of the request's payload."""
    log = audit_here()
    if log is None:
        return
    digest = hashlib.sha256(reply.encode())
    for piece in () if answer is None else pieces(answer):
        digest.update(piece)
    beside = 0 if answer is None else answer.nbytes
    fields: dict[str, str | int] = {"run": "", "spec": "", **_asked(asked), **_said(reply)}
    if identity is not None:
        fields.update(run=run_name(identity.spec), spec=identity.text.digest)
    fields.update(who=log.asks, got=nbytes, bytes=len(reply.encode()) + beside, sent=digest.hexdigest())
    log.add("answered", fields)


@lru_cache(maxsize=8)
def run_name(spec: str) -> str:
    try:
        return str(json.loads(spec).get("run", ""))[:_MOST_WORDS]
    except (ValueError, AttributeError, RecursionError):
        return ""


def _asked(text: str) -> dict[str, str | int]:
    try:
        request: protocol.Request = protocol.read_request(text)
    except ProtocolError:
        return {"asked": "", "of": ""}
    match request:
        case protocol.Train(order):
            of = order.update_id
        case protocol.Collect(update_id):
            of = update_id
        case protocol.EvaluateModel(version, split, subject):
            of = f"{subject} {version} {split}"
        case _:
            of = ""
    return {"asked": type(request).__name__, "of": of[:_MOST_WORDS]}


def _said(reply: str) -> dict[str, str | int]:
    said = json.loads(reply)
    kind = said["type"] if said["type"] in _REPLIES else ""
    if kind != "Refused":
        return {"said": kind}
    from fedsync.silo.owner.refusals import last_refusals

    code, root = protocol.Refusal(said["code"]), os.environ.get(protocol.STATE)
    notes = last_refusals(Path(root)) if root and code in _TELLING else ()
    why = next((note.reason for note in reversed(notes) if note.code is code), "")
    return {"said": kind, "code": code.value, "why": why[:_MOST_WORDS]}


def _last_line(path: Path) -> tuple[tuple[int, str] | None, int]:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 2 * MOST_LINE))
        end = file.read()
    whole, _, torn = end.rpartition(b"\n")
    if not whole:
        if len(torn) > MOST_LINE:
            raise AuditBroken(f"{path.name} ends in no line")
        return None, len(torn)
    try:
        line = json.loads(whole.rpartition(b"\n")[2])
        return (int(line["n"]), str(line["digest"])), len(torn)
    except (ValueError, KeyError, TypeError):
        raise AuditBroken(f"{path.name} ends in no line") from None
