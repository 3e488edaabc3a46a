"""Encrypted single updates of the last versions on the server's disk: evidence to find a silo that sent a bad update.

The server receives each update before it adds them up, and can open no update. It keeps the updates of the last
versions in the run's folder, up to a limit of versions and bytes. It gives the updates out if owners consent
(`fedsync.extras.tracing`).

    17.0.updates  first message of version 17, as received; the silo's values in the clear may follow
    17.notice     notice for owners, with the updates in their order; written last: without it, a version is incomplete

A large update is already in a file when it is committed. The evidence is a hard link to that file, so it costs no copy.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedsync.cipher.encoding import sealed_wire as wire
from fedsync.cipher.keys.keywrap import ServerKeys
from fedsync.common import foreign
from fedsync.common.errors import ConfigError, ProtocolError
from fedsync.common.files import OWNER_FILE, private_folder, write_pieces, write_private
from fedsync.extras.tracing.consent import Consents
from fedsync.extras.tracing.disclosure import KeptUpdate, disclose
from fedsync.extras.tracing.notice import Notice
from fedsync.model.chunked_arrays import file_part

logger = foreign.logger(__name__)

NOTICE, UPDATES = ".notice", ".updates"


class Evidence:
    """Store of updates in a folder. If the disk refuses files, only the evidence is lost.

    Args:
        folder: folder for the files; made on first use.
        run: the run's identity.
        versions: number of newest versions to keep.
        most_bytes: upper bound of all files together.
    """

    def __init__(self, folder: Path, run: str, versions: int, most_bytes: int) -> None:
        self._folder = folder
        self._run = run
        self._versions = versions
        self._most_bytes = most_bytes
        self._begun: Notice | None = None
        self._warned = False

    def begin(
        self, version: int, updates: Sequence[wire.Envelope], members: int, clear: bytes = b"", roster: bytes = b""
    ) -> None:
        """Write the updates of a coming version; other arguments as in `Notice`."""
        self._begun = None
        size = sum(update.head.nbytes for update in updates)
        if size > self._most_bytes:
            self._warn(f"they have {size} bytes, and {self._most_bytes} may be kept")
            return
        # Without words: the notice stays in memory until the version is made.
        slips = tuple(replace(one, words=np.empty((0, one.head.form.words), dtype=np.uint64)) for one in updates)
        try:
            private_folder(self._folder)
            self._remove(version)
            for number, update in enumerate(updates):
                _keep(update, _update_file(self._folder, version, number))
        except ConfigError as error:
            self._warn(str(error))
            return
        self._begun = Notice(self._run, version, members, slips, clear, roster)

    def without(self, why: str) -> None:
        """Skip the next version, which has no single updates."""
        self._begun = None
        self._warn(why)

    def settle(self, seeds: Mapping[str, bytes] | None = None) -> None:
        """Complete the version's evidence with the ``seeds`` of silos' own masks; remove what exceeds the limits."""
        if self._begun is None:
            return
        notice, self._begun = replace(self._begun, seeds=seeds or {}), None
        try:
            write_private(_notice_file(self._folder, notice.version), notice.encode())
        except (ConfigError, ProtocolError) as error:
            self._warn(str(error))
        left = self._most_bytes
        for count, version in enumerate(versions(self._folder)):
            left -= sum(file.stat().st_size for file in self._folder.glob(f"{version}.*"))
            if count >= self._versions or left < 0 or not _notice_file(self._folder, version).exists():
                self._remove(version)

    def _remove(self, version: int) -> None:
        for file in self._folder.glob(f"{version}.*"):
            file.unlink(missing_ok=True)

    def _warn(self, why: str) -> None:
        if not self._warned:
            logger.warning("updates are not kept, so nobody can find out who spoiled a version: %s", why)
        self._warned = True


def versions(folder: Path) -> list[int]:
    """Versions with kept files, newest first."""
    names: Iterable[str] = {file.name.partition(".")[0] for file in folder.glob(f"*{UPDATES}")}
    return sorted((int(name) for name in names if name.isdecimal()), reverse=True)


def give_out(
    folder: Path, version: int, examiner: str, consents: Iterable[tuple[str, bytes]], keys: ServerKeys, out: Path
) -> Consents:
    """Write the updates of a version into a file for an examiner, if enough owners consent.

    Args:
        examiner: name of the examining silo.
        consents: name in error messages and bytes of each file.
        keys: keys of the run's epoch.
        out: file to write, for its owner alone.

    Returns:
        The consents that count, and why the others do not.

    Raises:
        ConfigError: the version is not kept, the keys are of another epoch, or nothing can be written.
        ProtocolError: too few consents count, or the kept files are of another group.
    """
    file = _notice_file(folder, version)
    if not file.exists():
        kept = ", ".join(map(str, versions(folder))) or "none"
        raise ConfigError(str(folder), f"updates of version {version} are not kept here", f"Kept are: {kept}")
    data = file.read_bytes()
    matter = (notice := Notice.read(data, keys.senders)).matter
    if (matter.group, matter.epoch) != (keys.fingerprint, keys.epoch):
        remedy = f"Name the server.json of key epoch {matter.epoch}"
        raise ConfigError("--keys", f"these are of key epoch {keys.epoch}", remedy)
    found = Consents.read(consents, matter, keys.senders, examiner)
    found.check(len(keys.senders), notice.members)
    files = [consent.canonical() for consent in found.by_silo.values()]
    updates = [
        KeptUpdate(slip.head.members[0].update_id, slip.head.nbytes, _update_file(folder, version, number))
        for number, slip in enumerate(notice.updates)
    ]
    disclose(out, data, files, updates)
    return found


def _keep(update: wire.Envelope, path: Path) -> None:
    """Make a file that begins with an update's message."""
    part = file_part(update.words)
    if part is not None and part.offset == update.head.nbytes - update.words.nbytes - wire.TRAILER_BYTES:
        # A hard link to another disk is impossible: copy then.
        with suppress(OSError):
            os.link(part.path, path)
            path.chmod(OWNER_FILE)
            return
    write_pieces(path, wire.pieces(update), OWNER_FILE)


def _notice_file(folder: Path, version: int) -> Path:
    return folder / f"{version}{NOTICE}"


def _update_file(folder: Path, version: int, number: int) -> Path:
    return folder / f"{version}.{number}{UPDATES}"
