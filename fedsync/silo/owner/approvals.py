"""Runs that a silo's owner has to confirm: what waits, what was decided, and who is let through.

Where silo.yaml says ``approve: ask``, a silo answers nothing of a run but that it waits, until its owner has said yes.
What is confirmed is the specification, as the bytes that came: its SHA-256 names it everywhere. So another
specification under the same name, or the same one for another run, is another digest and waits anew.

| the digest is | a message of the run is | goes to |
|---|---|---|
| unknown | refused: `AwaitsApproval`; specification and run are put down for the owner | waiting |
| waiting | refused: `AwaitsApproval` | approved, refused; unknown, where newer ones push it out |
| approved | let through | unknown, where no message came for a week: the run is over |
| refused | refused: `OwnerRefusal` | approved; unknown, as above |

An approval also covers the code that the run names: it holds the SHA-256 of every Python file that the run can import
from the silo's data folders, and other content is refused (`fedsync.common.sandbox.code_review`).

Each is a file in a folder that only the owner enters; what is waited for is asked again by the server. This file is
imported for every message, also by processes that only pass messages on, so it imports little.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from math import inf
from pathlib import Path

from fedsync.common import codec
from fedsync.common.codec import MAX_WHOLE
from fedsync.common.errors import ConfigError, LimitReached, OwnerRefusal
from fedsync.common.files import private_folder, read_private, remove_unfinished, write_private
from fedsync.common.locks import taken
from fedsync.common.sandbox.named_code import CONFIRMED
from fedsync.common.sandbox.path_sandbox import ALLOWED
from fedsync.silo.protocol import Identity
from fedsync.silo.run_text import RunText

SEALED_SUMS = "survey.sums"
"""Path of what silos sealed in a survey, of which an owner is shown length and SHA-256."""

APPROVALS = "approvals"
"""Folder in a silo's state folder."""

DIGEST = re.compile(r"[0-9a-f]{64}")

MOST_WAITING = 16
"""Runs that are put down for the owner at a time; of more, those that were asked about least recently go."""

MOST_BYTES = 2**23
"""Size of one that is put down [bytes]; what silos found in a survey is in it, too."""

UNUSED_S = 7 * 86_400.0
"""A decision on a run that was not heard of for so long [s] is forgotten."""

MOST_TEXT = 2000
"""Characters of a text, or of a name of a field, that an owner is shown: a run with a longer one is refused."""

_MOST_DECISIONS = 256
_TOUCH_S = 3600.0
_WAITING, _APPROVED, _REFUSED, _LOCK = "waiting", "approved", "refused", "approvals.lock"


class AwaitsApproval(OwnerRefusal):
    """A run that the silo's owner has not confirmed yet."""


@dataclass(frozen=True, slots=True)
class AskedRun:
    """What the server says of a run.

    Args:
        spec: its specification, as it came.
        run_config: what else the run says, for training code of the silo's own, as JSON.
        since: when it was first asked about, ISO 8601.
    """

    spec: str
    run_config: str
    since: str

    @property
    def digest(self) -> str:
        return RunText(self.spec, self.run_config).digest


@dataclass(frozen=True, slots=True)
class _RunRecord:
    """A run, as its file keeps it.

    Args:
        run: the run that waits or was decided on.
        code: SHA-256 of the code that was approved, by absolute path.
    """

    run: AskedRun
    code: Mapping[str, str] = field(default_factory=dict)


def with_code(digest: str, code: Mapping[str, str]) -> str:
    """A run's digest together with that of its code: what an owner approves; of a run without code, the digest."""
    if not code:
        return digest
    return f"{digest}+{hashlib.sha256(json.dumps(code, sort_keys=True).encode()).hexdigest()}"


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Path and value of each field of JSON, also within lists; of an empty list or object the path alone."""
    if isinstance(value, dict | list) and value:
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(each, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def unshowable(run: AskedRun) -> str:
    """The reason why an owner cannot be shown all of a run; empty if he can. Text that is no JSON is shown as such."""
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
    """See that the silo's owner, if it has one who wants to be asked, has confirmed the run.

    Raises:
        AwaitsApproval: not yet; from now on the owner sees that it waits.
        OwnerRefusal: the owner has said no.
        ConfigError: what waits cannot be put down.
    """
    folder = _folder_here(os.environ.get(ALLOWED) or "{}")
    if folder is None:
        os.environ.pop(CONFIRMED, None)
        return
    Approvals(Path(folder)).check(identity)
    os.environ[CONFIRMED] = str(Path(folder, _APPROVED, identity.text.digest))


@lru_cache(maxsize=2)
def _folder_here(allowed: str) -> str | None:
    folder = json.loads(allowed).get("approvals")
    return None if folder is None else str(folder)


class Approvals:
    """Decisions of a silo's owner on runs.

    Args:
        folder: where they are kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def check(self, identity: Identity) -> None:
        """As `check_approved`."""
        digest = identity.text.digest
        if self._decided(_REFUSED, digest):
            remedy = f"If it was not meant: `fedsync silo approve {digest}`"
            raise OwnerRefusal("approve", "this silo's owner has refused this run", remedy)
        if self._decided(_APPROVED, digest):
            return
        self._wait(AskedRun(identity.spec, identity.run_config, _now()), digest)
        problem = f"the run {digest} waits for the owner of this silo"
        raise AwaitsApproval("approve", problem, "Look at it with `fedsync silo approve`")

    def waiting(self) -> list[AskedRun]:
        """What waits, longest first. A file that is damaged is none: the server asks again."""
        found = [self._read(path) for path in self._files(_WAITING)]
        return sorted((kept.run for kept in found if kept is not None), key=lambda run: run.since)

    def decided(self) -> list[tuple[str, bool]]:
        """Digests that were decided on, and whether the owner said yes."""
        return [(path.name, kind == _APPROVED) for kind in (_APPROVED, _REFUSED) for path in self._files(kind)]

    def asked(self, digest: str) -> AskedRun | None:
        """The run of this digest, if it waits or was decided on."""
        paths = [self._folder / kind / digest for kind in (_WAITING, _APPROVED, _REFUSED)]
        return next((kept.run for path in paths if (kept := self._read(path)) is not None), None)

    def covers(self, digest: str, code: Mapping[str, str]) -> bool:
        """Whether the owner approved the run with its code as it is."""
        kept = self._read(self._folder / _APPROVED / digest)
        return kept is not None and kept.code == code

    def decide(self, asked: str, *, approve: bool, code: Mapping[str, str] | None = None) -> AskedRun:
        """Confirm or refuse a run; on disk when this returns.

        Args:
            asked: `with_code` of a run that waits, or that was decided on before; to refuse, its digest is enough.
            approve: whether the owner says yes.
            code: SHA-256 of the code that the run names, by absolute path, as it is now.

        Returns:
            The run.

        Raises:
            ConfigError: there is no such run, its code is not the shown one, or nothing can be written.
        """
        code = code or {}
        digest = asked.partition("+")[0]
        if not DIGEST.fullmatch(digest):
            remedy = "Copy all of it from `fedsync silo approve`: of a part there may be two"
            raise ConfigError("digest", f"{digest!r} is not one of 64 hexadecimal digits", remedy)
        if approve and asked != with_code(digest, code):
            problem = "this is not the digest of the run with its code as it is now"
            remedy = "List it again with `fedsync silo approve`, look at the code, and copy all of the digest"
            raise ConfigError("digest", problem, remedy)
        to, other = (_APPROVED, _REFUSED) if approve else (_REFUSED, _APPROVED)
        with self._held():
            run = self.asked(digest)
            if run is None:
                raise ConfigError("digest", f"no run {digest} waits", "`fedsync silo approve` lists what does")
            decision = codec.dumps(_RunRecord(run, code if approve else {})).encode()
            write_private(private_folder(self._folder / to) / digest, decision)
            for kind in (other, _WAITING):
                (self._folder / kind / digest).unlink(missing_ok=True)
            for path in self._files(to)[:-_MOST_DECISIONS]:
                path.unlink(missing_ok=True)
        return run

    def _decided(self, kind: str, digest: str) -> bool:
        """Whether there is such a decision, on a run that is not over."""
        path = self._folder / kind / digest
        try:
            unused_s = time.time() - path.stat().st_mtime
        except FileNotFoundError:
            return False
        if unused_s > UNUSED_S:
            path.unlink(missing_ok=True)
            return False
        if unused_s > _TOUCH_S:
            with contextlib.suppress(OSError):  # a full disk makes no run one that was not confirmed
                os.utime(path)
        return True

    def _wait(self, run: AskedRun, digest: str) -> None:
        """Put a run down for the owner, or that it was asked about again."""
        path = self._folder / _WAITING / digest
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
            return
        if problem := unshowable(run):
            raise LimitReached("approve", problem, "Say less in the run, or have the owner take approve out")
        data = codec.dumps(_RunRecord(run)).encode()
        if len(data) > MOST_BYTES:
            problem = f"the run's specification has {len(data)} bytes, of which {MOST_BYTES} are shown to an owner"
            raise LimitReached("approve", problem, "Ask for fewer columns, or have the owner take approve out")
        with self._held():
            write_private(private_folder(path.parent) / digest, data)
            remove_unfinished(path.parent, writes=lambda pid: pid == os.getpid())
            for old in self._files(_WAITING)[:-MOST_WAITING]:
                old.unlink(missing_ok=True)

    def _files(self, kind: str) -> list[Path]:
        """By when they were last asked about or used, the oldest first."""
        found: list[tuple[float, Path]] = []
        for path in (self._folder / kind).glob("*"):
            if DIGEST.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):
                    found.append((path.stat().st_mtime, path))
        return [path for _, path in sorted(found)]

    @staticmethod
    def _read(path: Path) -> _RunRecord | None:
        """The content of a file; None where it is missing or damaged."""
        if not path.exists():
            return None
        try:
            kept: _RunRecord = codec.loads(_RunRecord, read_private(path, 2 * MOST_BYTES), own=True)
        except ValueError:
            return None
        return kept if kept.run.digest == path.name else None

    @contextmanager
    def _held(self) -> Iterator[None]:
        """No other process of the silo changes anything meanwhile."""
        lock = private_folder(self._folder) / _LOCK
        try:
            with taken(lock, inf):
                yield
        except OSError as error:
            problem = f"cannot be written: {error.strerror}"
            raise ConfigError(str(lock), problem, "Check the folder and the disk") from error


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")
