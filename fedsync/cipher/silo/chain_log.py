"""The newest version of each run that a silo came to, and its D, beside the silo's keys.

A silo follows one chain of a run. What it remembers of the chain is in the trainer's folder, which may be cleared away,
and of which a server can ask for several. So that nobody leads it along a second chain in another folder, or after that
one is gone, the newest D is kept here, too. It is entered before the model of its version is on disk or used.
"""

from __future__ import annotations

from fedsync.cipher.keys.keyring import Ring
from fedsync.cipher.silo.history import digest_of
from fedsync.cipher.suites.suite import DIGEST_BYTES
from fedsync.common.files import private_folder, read_private, write_private
from fedsync.core.errors import ConfigError

_FOLDER = "chains"
_MAX_BYTES = 200


class ChainLog:
    """Of one run.

    Args:
        ring: the silo's keys; the log is a file in their folder, or in memory where they are in none.
        run: R, see `fedsync.cipher.silo.history`.
        name: that it has now.
    """

    def __init__(self, ring: Ring, run: bytes, name: str) -> None:
        named = digest_of(run, name.encode()).hex()
        self._file = None if ring.folder is None else private_folder(ring.folder / _FOLDER) / named
        self._newest: tuple[int, bytes] | None = None

    @property
    def newest(self) -> dict[int, bytes]:
        """The newest D by its version; empty before there is one.

        Raises:
            ConfigError: the file is damaged.
        """
        if self._file is None:
            return dict([self._newest] if self._newest else [])
        if not self._file.exists():
            return {}
        words = read_private(self._file, _MAX_BYTES).decode("ascii", "replace").split()
        if len(words) != 2 or not words[0].isdecimal() or len(words[1]) != 2 * DIGEST_BYTES:
            remedy = "Have the administrator rotate the keys: `fedsync keys rotate`. Until then this silo takes no part"
            raise ConfigError(str(self._file), "damaged: it is not known which model this silo came to", remedy)
        return {int(words[0]): bytes.fromhex(words[1])}

    def enter(self, version: int, chain: bytes) -> None:
        """Put down what the silo comes to; on disk when this returns.

        Raises:
            ConfigError: the disk does not take it.
        """
        self._newest = version, chain
        if self._file is not None:
            write_private(self._file, f"{version} {chain.hex()}".encode())
