"""A silo's masks over a run: which it may put on, and what it tells of those that it did.

Pair masks follow from the silos' long-lived keys and what names the round, so they would come out the same in another
process, and two updates under one mask give away their difference. So it is on disk, beside the keys, which masks
were ever put on, before what they blind can leave. It is not in the trainer's folder, which may be cleared away and
of which a server can ask for several by asking for several runs under one name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import inf
from pathlib import Path

import numpy as np

from fedsync.cipher.keys.keyring import Ring
from fedsync.cipher.masking.masks import MaskRound
from fedsync.cipher.masking.unmask import UnmaskQuestion, encode_reveal
from fedsync.common.files import private_folder, read_private, write_private
from fedsync.common.locks import taken
from fedsync.core.errors import SERVER, ConfigError, ProtocolError
from fedsync.core.transfer import Payload

MAX_ATTEMPTS = 1000
"""Attempts at one version that a silo takes part in."""

_FOLDER, _LOCK = "masks", "lock"
_ROUNDS = 4
"""Rounds whose masks are remembered; a sum is opened as soon as it is committed."""

_MAX_BYTES = 2**16


class MaskLog:
    """Which masks of one run a silo has put on.

    Args:
        ring: the silo's keys; the log is a file in their folder, or in memory where they are in none.
        run: name of the run.
    """

    def __init__(self, ring: Ring, run: str) -> None:
        self._folder = None if ring.folder is None else ring.folder / _FOLDER
        digest = hashlib.sha256(run.encode()).hexdigest()
        self._name = f"{ring.group.fingerprint.hex()}-{digest[:32]}"
        self._used: tuple[int, tuple[int, ...]] = (-1, ())

    def enter(self, base: int, attempt: int) -> None:
        """Put down that masks are put on; on disk when this returns.

        Versions only go up, so of those before the newest none is ever masked again.

        Raises:
            ProtocolError: these masks were put on before, or those of a later version.
            ConfigError: the file is damaged, or the disk does not take it.
        """
        with self._held() as file:
            newest, attempts = self._used if file is None else _read(file)
            if base < newest or (base == newest and (attempt in attempts or len(attempts) >= MAX_ATTEMPTS)):
                detail = f"those of attempt {attempt} at version {base} have blinded an update already"
                raise ProtocolError(SERVER, "masks", detail)
            self._used = base, (*attempts, attempt) if base == newest else (attempt,)
            if file is not None:
                write_private(file, " ".join(map(str, (base, *self._used[1]))).encode())

    @contextmanager
    def _held(self) -> Iterator[Path | None]:
        """The file, which no other process reads or writes meanwhile."""
        if self._folder is None:
            yield None
            return
        private_folder(self._folder)
        path = self._folder / _LOCK
        with ExitStack() as stack:
            try:
                stack.enter_context(taken(path, inf))
            except OSError as error:
                remedy = "Masks need a folder of keys that this silo can write to"
                raise ConfigError(str(path), f"cannot be written: {error.strerror}", remedy) from None
            yield self._folder / self._name


class Masking:
    """One silo's masks.

    Args:
        ring: the silo's keys.
        run: name of the run; masks are of one run only.
    """

    def __init__(self, ring: Ring, run: str) -> None:
        self._ring = ring
        self._run = run
        self._log = MaskLog(ring, run)
        self._rounds: dict[tuple[int, int], MaskRound] = {}
        self._revealed: set[tuple[int, int]] = set()

    @property
    def unrevealed(self) -> bool:
        """Whether masks are on the newest update that only this process can take off."""
        return bool(self._rounds) and next(reversed(self._rounds)) not in self._revealed

    def begin(self, base: int, attempt: int) -> MaskRound:
        """Masks for one update that starts from version ``base``.

        Raises:
            ProtocolError: they were used before.
            ConfigError: it cannot be put on disk that they are used.
        """
        self._log.enter(base, attempt)
        group = self._ring.group
        context = f"{group.epoch}/{group.fingerprint.hex()}/{self._run}/{base}/{attempt}".encode()
        masks = self._rounds[base, attempt] = MaskRound(self._ring.own, group.members, context)
        for old in list(self._rounds)[:-_ROUNDS]:
            del self._rounds[old]
            self._revealed.discard(old)
        return masks

    def answer(self, question: Payload) -> Payload:
        """Sign who is in a sum, or reveal what takes the masks off it.

        Seeds are not kept on disk: who is restarted cannot reveal them.

        Raises:
            ProtocolError: the masks are not known here, or what is asked would tell too much; see `MaskRound`.
        """
        asked = UnmaskQuestion.decode(question)
        masks = self._rounds.get((asked.base, asked.attempt))
        if masks is None:
            detail = f"no masks of version {asked.base}, attempt {asked.attempt}, are known here"
            raise ProtocolError(SERVER, "question", detail)
        if asked.signatures is None:
            return np.frombuffer(masks.sign(asked.survivors), dtype=np.uint8)
        revealed = encode_reveal(masks.reveal(asked.signatures))
        self._revealed.add((asked.base, asked.attempt))
        return revealed


def _read(file: Path) -> tuple[int, tuple[int, ...]]:
    """Newest version whose masks were put on, and in which attempts."""
    if not file.exists():
        return -1, ()
    words = read_private(file, _MAX_BYTES).decode("ascii", "replace").split()
    if not words or not all(word.isdecimal() for word in words):
        remedy = "Have the administrator rotate the keys: `fedsync keys rotate`. Until then this silo masks nothing"
        raise ConfigError(str(file), "damaged: it is not known which masks were used", remedy)
    base, *attempts = map(int, words)
    return base, tuple(attempts)
