"""Approval of runs by a silo's owner: pending runs, decisions, and the check of every message.

With ``approve: ask`` in silo.yaml, a silo answers only that a run waits, until its owner has approved the run. An
approval belongs to a digest: the SHA-256 of the run's text (specification and settings). So a changed specification, or
the same specification for another run, has another digest and waits again.

| state of the digest | answer to a message of the run | next state |
|---|---|---|
| unknown | refused: `AwaitsApproval`; specification and run are recorded for the owner | waiting |
| waiting | refused: `AwaitsApproval` | the owner approves or refuses it; unknown if newer runs displace it |
| approved | admitted | unknown after a week without a message: the run is over |
| refused | refused: `OwnerRefusal` | the owner approves it; unknown if newer runs displace it |

An approval also covers the code that the run names, by the SHA-256 of every Python file that the run can import from
the silo's data folders. Other content is refused (`fedsync.common.sandbox.confirmed_code`). Each run is a file in a
folder that only the owner can read. A lost pending run returns with the server's next message. All processes that
handle messages import this module, so it imports little itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import inf
from pathlib import Path

from fedsync.common import codec
from fedsync.common.codec import MAX_WHOLE
from fedsync.common.errors import ConfigError, LimitReached, OwnerRefusal
from fedsync.common.files import private_folder, read_private, remove_unfinished, write_private, writing
from fedsync.common.locks import taken
from fedsync.common.sandbox.named_code import CONFIRMED
from fedsync.common.sandbox.path_sandbox import allowed_here
from fedsync.silo.protocol import Identity
from fedsync.silo.run_text import RunText

SEALED_SUMS = "survey.sums"  # path of the sealed survey sums, of which an owner sees length and SHA-256

APPROVALS = "approvals"

DIGEST = re.compile(r"[0-9a-f]{64}")

MOST_WAITING = 16  # pending runs; beyond it, the runs with the oldest messages are dropped

MOST_BYTES = 2**23  # of a recorded run, including the sums of a survey

UNUSED_S = 7 * 86_400.0  # time without a message after which a decision is forgotten

MOST_TEXT = 2000  # characters of a text or field name that an owner is shown; a run with a longer text is refused

_MOST_DECISIONS = 256
_TOUCH_S = 3600.0
_WAITING, _APPROVED, _REFUSED, _LOCK = "waiting", "approved", "refused", "approvals.lock"


class AwaitsApproval(OwnerRefusal):
    """Refusal of a run that the silo's owner has not approved yet."""


@dataclass(frozen=True, slots=True)
class AskedRun:
    """A run as the server describes it; ``since`` is the time of its first message, ISO 8601."""

    spec: str
    run_config: str
    since: str

    @property
    def digest(self) -> str:
        return RunText(self.spec, self.run_config).digest


@dataclass(frozen=True, slots=True)
class _RunRecord:
    """Stored record of a run; ``code`` is the SHA-256 of the approved code by absolute path."""

    run: AskedRun
    code: Mapping[str, str] = field(default_factory=dict)


def with_code(digest: str, code: Mapping[str, str]) -> str:
    if not code:
        return digest
    return f"{digest}+{hashlib.sha256(json.dumps(code, sort_keys=True).encode()).hexdigest()}"


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, dict | list) and value:
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(each, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def unshowable(run: AskedRun) -> str:
    """Return why a run cannot be shown in full to an owner; empty if it can. Invalid JSON is shown as text."""
    for text in (run.spec, run.run_config):
        try:
            for path, value in leaves(json.loads(text)):
                long = isinstance(value, str) and len(value) > MOST_TEXT and path != SEALED_SUMS
                if long or len(path) > MOST_TEXT:
                    return f"{path[:80]} is longer than the {MOST_TEXT} characters that an owner is shown"
                if isinstance(value, int) and abs(value) >= MAX_WHOLE:
                    return f"{path} has {value.bit_length()} bits, and an owner is shown 64"
        except (ValueError, RecursionError):
            continue
    return ""


def check_approved(identity: Identity) -> None:
    """Check that the owner has approved the run, if the silo's owner requires approval. Raise `AwaitsApproval`, once
    the run is recorded as pending, `OwnerRefusal` if the owner has refused it, and `ConfigError` if it cannot be
    recorded.
    """
    folder = allowed_here().get("approvals")
    if folder is None:
        os.environ.pop(CONFIRMED, None)
        return
    Approvals(Path(folder)).check(identity)
    os.environ[CONFIRMED] = str(Path(folder, _APPROVED, identity.text.digest))


class Approvals:
    """Decisions of a silo's owner on runs, kept in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def check(self, identity: Identity) -> None:
        digest = identity.text.digest
        if self._decided(_REFUSED, digest):
            remedy = f"If this was a mistake, run `fedsync silo approve {digest}`"
            raise OwnerRefusal("approve", "this silo's owner has refused this run", remedy)
        if self._decided(_APPROVED, digest):
            return
        now = datetime.now(UTC).isoformat(timespec="microseconds")
        self._wait(AskedRun(identity.spec, identity.run_config, now), digest)
        problem = f"the run {digest} waits for the approval of this silo's owner"
        raise AwaitsApproval("approve", problem, "Read and approve it with `fedsync silo approve`")

    def waiting(self) -> list[AskedRun]:
        """Return pending runs, the longest waiting first. Damaged files are skipped: the server asks again."""
        found = [self._read(path) for path in self._files(_WAITING)]
        return sorted((kept.run for kept in found if kept is not None), key=lambda run: run.since)

    def decided(self) -> list[tuple[str, bool]]:
        return [(path.name, kind == _APPROVED) for kind in (_APPROVED, _REFUSED) for path in self._files(kind)]

    def asked(self, digest: str) -> AskedRun | None:
        paths = [self._folder / kind / digest for kind in (_WAITING, _APPROVED, _REFUSED)]
        return next((kept.run for path in paths if (kept := self._read(path)) is not None), None)

    def covers(self, digest: str, code: Mapping[str, str]) -> bool:
        kept = self._read(self._folder / _APPROVED / digest)
        return kept is not None and kept.code == code

    def decide(self, asked: str, *, approve: bool, code: Mapping[str, str] | None = None) -> AskedRun:
        """Approve or refuse a run, durably. ``asked`` is `with_code` of the run; a refusal needs only the digest.
        ``code`` has the current SHA-256 of the code that the run names, by absolute path. `ConfigError` if the run is
        unknown, its code differs from the shown code, or the disk rejects the file.
        """
        code = code or {}
        digest = asked.partition("+")[0]
        if not DIGEST.fullmatch(digest):
            remedy = "Copy the whole digest from `fedsync silo approve`: a part may fit two runs"
            raise ConfigError("digest", f"{digest!r} does not have 64 hexadecimal digits", remedy)
        if approve and asked != with_code(digest, code):
            problem = "this is not the digest of the run with its current code"
            remedy = "List the run again with `fedsync silo approve`, read the code, and copy the whole digest"
            raise ConfigError("digest", problem, remedy)
        to, other = (_APPROVED, _REFUSED) if approve else (_REFUSED, _APPROVED)
        with self._held():
            run = self.asked(digest)
            if run is None:
                raise ConfigError("digest", f"no run {digest} waits", "`fedsync silo approve` lists the waiting runs")
            decision = codec.dumps(_RunRecord(run, code if approve else {})).encode()
            write_private(private_folder(self._folder / to) / digest, decision)
            for kind in (other, _WAITING):
                (self._folder / kind / digest).unlink(missing_ok=True)
            for path in self._files(to)[:-_MOST_DECISIONS]:
                path.unlink(missing_ok=True)
        return run

    def _decided(self, kind: str, digest: str) -> bool:
        path = self._folder / kind / digest
        try:
            unused_s = time.time() - path.stat().st_mtime
        except FileNotFoundError:
            return False
        if unused_s > UNUSED_S:
            path.unlink(missing_ok=True)
            return False
        if unused_s > _TOUCH_S:
            with suppress(OSError):  # a full disk must not void an approval
                os.utime(path)
        return True

    def _wait(self, run: AskedRun, digest: str) -> None:
        path = self._folder / _WAITING / digest
        with suppress(FileNotFoundError):
            os.utime(path)
            return
        if problem := unshowable(run):
            raise LimitReached("approve", problem, "Write shorter values, or have the owner remove approve")
        data = codec.dumps(_RunRecord(run)).encode()
        if len(data) > MOST_BYTES:
            problem = f"the run's specification has {len(data)} bytes, and an owner is shown at most {MOST_BYTES}"
            raise LimitReached("approve", problem, "Name fewer columns, or have the owner remove approve")
        with self._held():
            write_private(private_folder(path.parent) / digest, data)
            remove_unfinished(path.parent, writes=lambda pid: pid == os.getpid())
            for old in self._files(_WAITING)[:-MOST_WAITING]:
                old.unlink(missing_ok=True)

    def _files(self, kind: str) -> list[Path]:
        found: list[tuple[float, Path]] = []
        for path in (self._folder / kind).glob("*"):
            if DIGEST.fullmatch(path.name):
                with suppress(FileNotFoundError):
                    found.append((path.stat().st_mtime, path))
        return [path for _, path in sorted(found)]

    @staticmethod
    def _read(path: Path) -> _RunRecord | None:
        if not path.exists():
            return None
        try:
            kept: _RunRecord = codec.loads(_RunRecord, read_private(path, 2 * MOST_BYTES), own=True)
        except ValueError:
            return None
        return kept if kept.run.digest == path.name else None

    @contextmanager
    def _held(self) -> Iterator[None]:
        lock = private_folder(self._folder) / _LOCK
        with writing(lock, "Check the folder and the disk"), taken(lock, inf):
            yield
