"""Atomic file writes, checksums, and files that only their owner can read (mode 0600 in folders of mode 0700)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from fedsync.common.errors import ConfigError

OWNER_FILE = 0o600
OWNER_FOLDER = 0o700
ANYBODY_FILE = 0o644

_OTHERS = 0o077


def private_folder(path: Path) -> Path:
    """Make or check a folder that only its owner may enter; raises `ConfigError` if it fails, or others may enter."""
    try:
        path.mkdir(mode=OWNER_FOLDER, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(str(path), f"no folder can be made here: {error.strerror}", "Choose another folder") from None
    _check_folder(path)
    return path


def write_private(path: Path, data: bytes) -> None:
    """Write a secret atomically, mode 0600; raises `ConfigError` on failure, or if the folder is open to others."""
    _check_folder(path.parent)
    write_atomically(path, data, OWNER_FILE)


def read_input(path: Path, most: int) -> bytes:
    """Read the first ``most`` bytes of a file that a user named; raises `ConfigError` if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}", "Check the path") from None


def write_atomically(path: Path, data: bytes, mode: int | None = None, *, settle: bool = True) -> None:
    """Replace a file as a whole: after a crash, and for any reader, it has the old content or the new content.

    ``mode`` holds from the first byte on; None is the process's default. Without ``settle``, a crash of the machine may
    lose the file; see `settle_file`. Raises `ConfigError` if the file cannot be written.
    """
    write_pieces(path, (data,), mode, settle=settle)


def write_pieces(
    path: Path, pieces: Iterable[bytes | bytearray | memoryview], mode: int | None = None, *, settle: bool = True
) -> None:
    """As `write_atomically`, piece by piece, so that a large file need not fit in memory."""
    with written_atomically(path, mode, settle=settle) as file:
        file.writelines(pieces)


@contextlib.contextmanager
def written_atomically(path: Path, mode: int | None = None, *, settle: bool = True) -> Iterator[BinaryIO]:
    """As `write_atomically`, but the caller writes into the yielded file; an error leaves the old content."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path):
        unfinished.unlink(missing_ok=True)
        descriptor = os.open(
            unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666 if mode is None else mode
        )
        try:
            with os.fdopen(descriptor, "wb") as file:
                if mode is not None:
                    os.fchmod(file.fileno(), mode)  # the process's umask may remove requested bits
                yield file
                file.flush()
                if settle:
                    os.fsync(file.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        if settle:
            sync(path.parent)


@contextlib.contextmanager
def writing(place: Path, remedy: str = "Check the folder, its permissions and the disk") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(str(place), f"cannot be written: {error.strerror or error}", remedy) from error


def check_result(path: Path, place: str) -> None:
    """Raise `ConfigError` if `write_result` could not write a file: before the work that produces the result."""
    file = _behind_links(path)
    if not file.parent.is_dir():
        raise ConfigError(place, f"there is no folder {str(file.parent)!r}", "Make it, or name another")
    if file.is_dir():
        raise ConfigError(place, f"{str(path)!r} is a folder", "Name a file in it")
    changed = [file] if file.exists() else []
    if not _stays(file):
        changed.append(file.parent)
    for each in changed:
        if not os.access(each, os.W_OK):
            raise ConfigError(place, f"{str(each)!r} cannot be written", "Change its permissions, or name another")


def write_result(path: Path, data: bytes, *, named: bool = True) -> None:
    """Write a file that the user named: as a whole, with its existing permissions or those of a new file.

    If the user has not ``named`` the file, it may be a link by another user, and the link is replaced. Raises
    `ConfigError` if the file cannot be written, and `OSError` if a device or pipe accepts no more data.
    """
    file = _behind_links(path) if named else path
    if named and _stays(file):
        with _opened(file) as device:
            device.write(data)
        return
    write_atomically(file, data, stat.S_IMODE(file.stat().st_mode) if named and file.exists() else None)


def remove_tree(path: Path) -> None:
    """Remove a tree, even without permissions; links are not followed. Raises `OSError` if something remains."""
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        done = subprocess.run([*command, "--", str(path)], capture_output=True, text=True, check=False)
        if not os.path.lexists(path):
            return
    raise OSError(done.stderr.strip()[-200:])


def tree_bytes(path: Path) -> int:
    command = ["du", "--summarize", "--block-size=1", "--", str(path)]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return int(found[0]) if found else 0


def remove_unfinished(folder: Path, name: str = "*", writes: Callable[[int], bool] = lambda pid: False) -> None:
    """Remove the unfinished files that killed processes left in `write_atomically`, except of processes that
    ``writes``. ``name`` is the name of the intended file, a pattern of `Path.glob`.
    """
    for unfinished in folder.glob(f".{name}.*"):
        pid = unfinished.name.rpartition(".")[2]
        if pid.isdecimal() and not writes(int(pid)):
            unfinished.unlink(missing_ok=True)


def read_private(path: Path, limit: int, missing: str = "Check the path") -> bytes:
    """Read a secret of at most ``limit`` bytes. Raises `ConfigError` if it is missing (with this remedy), no plain file
    or too long, or if another user could read or replace it.
    """
    try:
        # A link could lead to a file that others may write.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        remedy = missing if isinstance(error, FileNotFoundError) else "Check the path; links are not followed"
        raise ConfigError(str(path), f"cannot be read: {error.strerror}", remedy) from None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(str(path), "not a plain file", "Check the path")
        _check_owner(path, status, OWNER_FILE)
        _check_folder(path.parent)
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ConfigError(str(path), f"longer than {limit} bytes", "Check that it is the right file")
    return data


def _behind_links(path: Path) -> Path:
    """Return the target of a link, so that the link stays when the file is replaced."""
    # A link to a pipe, as /dev/stdout may be, has no target path that could be opened.
    return path if _stays(path) else Path(os.path.realpath(path))


def _stays(path: Path) -> bool:
    """Whether an existing path must be written into, not replaced: a device, a pipe, or this process's output."""
    return path.exists() and not path.is_dir() and (not path.is_file() or _output(path) is not None)


def _output(path: Path) -> int | None:
    for descriptor in (1, 2):
        # A descriptor may have been closed.
        with contextlib.suppress(OSError):
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                return descriptor
    return None


def _opened(path: Path) -> BinaryIO:
    """Open a path that `_stays`; the output where it stands, since opening its file again would empty the file."""
    descriptor = _output(path)
    if descriptor is None:
        return path.open("wb")
    sys.stdout.flush()
    return os.fdopen(os.dup(descriptor), "wb")


def _check_folder(path: Path) -> None:
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(str(path), f"not a folder: {error.strerror}", "Check the path") from None
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(str(path), "not a folder", "Choose another path")
    _check_owner(path, status, OWNER_FOLDER)


def _check_owner(path: Path, status: os.stat_result, mode: int) -> None:
    found, owner, me = stat.S_IMODE(status.st_mode), status.st_uid, os.geteuid()
    if owner != me and (owner or found & _OTHERS):
        remedy = f"Run the command as user {owner}. Only if the files are to be yours: `chown -R {me} {path}`"
        raise ConfigError(str(path), f"belongs to user {owner}, not to user {me}", remedy)
    if found & _OTHERS:
        raise ConfigError(str(path), f"open to others: its mode is {found:04o}", f"Run `chmod {mode:o} {path}`")


def settle_file(path: Path) -> None:
    """Wait until a file and its name would survive a crash of the machine; raises `ConfigError` on failure."""
    with writing(path):
        sync(path)
        sync(path.parent)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


DIGEST_BYTES = 32

Data = TypeVar("Data", bytes, memoryview)


def checksum(*pieces: bytes | memoryview) -> bytes:
    whole = hashlib.sha256()
    for piece in pieces:
        whole.update(piece)
    return whole.digest()


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digested(body: bytes) -> bytes:
    return checksum(body) + body


def undigested(data: Data) -> Data | None:
    """Return the body after its digest of 32 bytes, or None if they do not match."""
    body = data[DIGEST_BYTES:]
    return body if hashlib.sha256(body).digest() == data[:DIGEST_BYTES] else None
