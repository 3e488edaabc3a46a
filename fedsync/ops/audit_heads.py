"""Signed heads of a silo's audit log, which reveal a rewritten or truncated log.

A head has number and digest of a line. The silo's node key signs it; without TLS, a separate key of the log does. The
silo's supervisor signs outside of the message path: when the silo starts and ends, and within a minute after new lines.
So the lines of a run's end are signed, although no request announces the end. The supervisor reads on from the last
signed line, and never signs a log that does not continue from this line.

`rotate_node_key` replaces the silo's node key, and writes an entry in which the old key signs the new key. Heads by
former keys are accepted if a chain of such entries leads back from the current key.

The newest head is in the log's folder. An attacker who controls the machine also has the key, and can forge log and
head. So the owner can configure an external folder. It gets the first head of each day and the last head of the silo's
process, one file per day.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedsync.common import codec, foreign
from fedsync.common.errors import ConfigError, FedSyncError
from fedsync.common.files import OWNER_FILE, private_folder, read_input, read_private, write_atomically, write_private
from fedsync.config.silo_start import SiloStartConfig
from fedsync.identity.node_keys import (
    NodeKey,
    is_signed_by_node,
    line_fingerprint,
    make_node_key,
    node_key_fingerprint,
    node_public_line,
    sign_by_node,
)
from fedsync.silo.owner.audit import AuditLog
from fedsync.silo.owner.audit_chain import AUDIT, UNWRITTEN, AuditBroken, AuditReader, canonical
from fedsync.silo.owner.owner_policy import audit_place

logger = foreign.logger(__name__)

HEAD = "head.json"

ROTATED = "rotated"
"""Kind of a line that records a new node key."""

_CONTEXT, _ROTATION = b"fedsync audit head 1\0", b"fedsync node key rotation 1\0"
_MOST_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class AuditHead:
    """Signed end of a log at one time."""

    silo: str
    n: int
    digest: str
    at: str
    key: str
    signature: str = ""

    @property
    def message(self) -> bytes:
        return _CONTEXT + canonical({**asdict(self), "signature": ""})

    @classmethod
    def load(cls, path: Path) -> AuditHead:
        """Read a head without a check of its signature; `AuditBroken` if malformed, `ConfigError` if unreadable."""
        if not path.is_file():  # reading a pipe would block
            raise AuditBroken(f"{path} is no plain file")
        try:
            head: AuditHead = codec.loads(cls, read_input(path, _MOST_BYTES))
        except codec.DecodeError as error:
            raise AuditBroken(f"{path} is no head: {error}") from None
        return head


def signing_key(config: SiloStartConfig) -> Path:
    """Return the key that signs heads; creates a separate key if the silo has no node key."""
    if config.node_key is not None:
        return Path(config.node_key)
    return make_node_key(config.name, private_folder(Path(config.state) / AUDIT)).private


def heads_elsewhere(config: SiloStartConfig) -> Iterator[Path]:
    if config.audit.head_to is not None:
        yield from sorted(Path(config.audit.head_to).glob(f"{config.name}-????-??-??.json"))


def takes_heads(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK)


def rotation(silo: str, old: Path, new: Path) -> dict[str, str]:
    """Build the log entry of a key rotation, in which the old key signs the fingerprint of the new key."""
    said = {"silo": silo, "old": node_public_line(old).decode(), "new": node_key_fingerprint(new)}
    return {**said, "signature": sign_by_node(old, _ROTATION + canonical(said)).hex()}


def keys_of(config: SiloStartConfig, rotations: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
    """Return the current key and all former keys that an unbroken chain of rotations proves, by fingerprint.
    ``rotations`` are log entries of the kind `ROTATED`, in the order of the log.
    """
    line = node_public_line(signing_key(config))
    keys = {line_fingerprint(line): line}
    for entry in reversed(rotations):
        said = {name: entry[name] for name in ("silo", "old", "new")}
        old = str(said["old"]).encode()
        signed = is_signed_by_node(old, _ROTATION + canonical(said), _bytes(str(entry["signature"])))
        if signed and said["silo"] == config.name and said["new"] in keys:
            keys[line_fingerprint(old)] = old
    return keys


def check_head(head: AuditHead, config: SiloStartConfig, keys: Mapping[str, bytes], place: object) -> None:
    """Check that a head belongs to this silo, and is signed by one of ``keys``, from `keys_of`; else `AuditBroken`."""
    if head.silo != config.name:
        raise AuditBroken(f"{place} is the head of {head.silo!r:.80}")
    if head.key not in keys:
        replaced = "a key that was replaced without `fedsync silo rotate` cannot be told from a stranger's"
        raise AuditBroken(f"{place} was signed by {head.key!r:.80}, which is not the key of this silo; {replaced}")
    if not is_signed_by_node(keys[head.key], head.message, _bytes(head.signature)):
        raise AuditBroken(f"{place} has a signature that is not of it")


class HeadKeeper:
    """Signer of a silo's log, which also writes heads to the external folder; ``now`` returns the time in UTC."""

    def __init__(self, config: SiloStartConfig, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._config, self._now = config, now
        self._folder = Path(config.state) / AUDIT
        self._reader = AuditReader(self._folder)
        self._signed: AuditHead | None = None
        self._day = ""

    def tend(self, *, last: bool = False) -> None:
        """Sign new lines, and write the day's head to the external folder; failures are logged and retried. ``last``
        writes the external head even if the day already has a head.
        """
        try:
            head = self._head()
        except (FedSyncError, OSError, ValueError) as error:
            logger.error("the audit log is not signed: %s. See `fedsync silo audit`", error)
            self._mark_unwritten(error)
            return
        if self._config.audit.head_to is not None:
            self._write_elsewhere(head, Path(self._config.audit.head_to), last=last)

    def _head(self) -> AuditHead | None:
        path = private_folder(self._folder) / HEAD
        if self._signed is None or self._reader.behind:
            self._signed = self._continued(path)
        for _ in self._reader.lines():
            pass
        before = self._signed
        if self._reader.n == 0 or (before is not None and before.n == self._reader.n):
            return before
        key = signing_key(self._config)
        at = self._now().isoformat(timespec="seconds")
        head = AuditHead(self._config.name, self._reader.n, self._reader.digest, at, node_key_fingerprint(key))
        self._signed = replace(head, signature=sign_by_node(key, head.message).hex())
        write_private(path, codec.dumps(self._signed).encode())
        return self._signed

    def _continued(self, path: Path) -> AuditHead | None:
        """Return the last head of an earlier process, if any; `AuditBroken` if the log does not continue from it or
        from an external head.
        """
        found = [each for each in (path, *heads_elsewhere(self._config)) if each.exists()]
        heads = {each: AuditHead.load(each) for each in found}
        if self._signed is not None:
            heads[path] = self._signed
        reader = AuditReader(self._folder)
        check_fits(heads, reader.digests({head.n for head in heads.values()}), reader)
        self._reader = reader
        return heads.get(path)

    def _write_elsewhere(self, head: AuditHead | None, folder: Path, *, last: bool) -> None:
        """Write the day's head, None for an empty log; at other times, check that a head could be written."""
        day = f"{self._now():%Y-%m-%d}"
        try:
            if head is not None and (day != self._day or last):
                write_atomically(folder / f"{self._config.name}-{day}.json", codec.dumps(head).encode(), OWNER_FILE)
                self._day = day
            elif not takes_heads(folder):
                remedy = "Mount the folder, and let the silo's user write there"
                raise ConfigError("audit.head_to", f"{folder} is missing or not writable", remedy)
            (self._folder / UNWRITTEN).unlink(missing_ok=True)
        except (ConfigError, OSError) as error:
            stops = "; nothing leaves this silo until it can" if self._config.audit.required else ""
            logger.error("the head of the audit log cannot be written off this machine%s: %s", stops, error)
            self._mark_unwritten(error)

    def _mark_unwritten(self, error: Exception) -> None:
        try:
            write_private(self._folder / UNWRITTEN, str(error).encode("utf-8", "replace"))
        except ConfigError as full:
            logger.error("%s", full)


def check_fits(heads: dict[Path, AuditHead], digests: dict[int, str], read: AuditReader) -> None:
    """Check that a log contains the lines of the heads; `AuditBroken` if it ends earlier or a digest differs."""
    for place, head in heads.items():
        if head.n > read.n:
            raise AuditBroken(f"it ends with line {read.n}, and {place} of {head.at} is of line {head.n}: it was cut")
        if head.n >= read.first and digests.get(head.n) != head.digest:
            raise AuditBroken(f"its line {head.n} is not that of {place}, signed at {head.at}: it was written anew")


def _bytes(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


_NEXT = "next"


def rotate_node_key(config: SiloStartConfig) -> NodeKey:
    """Replace a silo's node key with a new key; the old key stays beside it as ``NAME.node.old``.

    The log entry is on disk before the key changes. After a crash in between, run the command again. Raises
    `ConfigError` if the silo has no node key, or a file cannot be written.
    """
    if config.node_key is None:
        remedy = "No action is needed: with insecure: true, nodes have no keys"
        raise ConfigError("silo.yaml, node_key", "the silo has no node key", remedy)
    private = Path(config.node_key)
    public = private.with_name(f"{private.name}.pub")
    fresh = make_node_key(private.stem, private.parent / _NEXT)
    private_folder(Path(config.state))
    AuditLog(audit_place(config)).add(ROTATED, rotation(config.name, private, fresh.private))
    write_private(private.with_name(f"{private.name}.old"), read_private(private, _MOST_BYTES))
    fresh.private.replace(private)
    fresh.public.replace(public)
    fresh.private.parent.rmdir()
    return replace(fresh, private=private, public=public)
