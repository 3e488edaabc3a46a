"""A silo's masks over a run: its pair of keys, which masks it may put on, and what it tells of those that it did.

Two updates under one pair mask give away their difference. Pair masks follow from the run's pairs and the context, so
they would come out the same again in another process. Therefore a *book* is on disk, beside the long-lived keys: the
pair's private half, and which masks were ever put on, entered before what they blind can leave. It is not in the
trainer's folder, which may be cleared away and of which a server can ask for several.

| the book is | then |
|---|---|
| gone, with whatever folder it was in | the pair is gone with it: the silo announces another, and no mask comes again |
| damaged | nothing is masked: there is no telling whether the pair is the one that was announced |
| an older copy | pair masks may come again, but not the own mask, and the seed of that stays hidden: a list of |
|  | survivors names the very update, and the others signed the one before (`fedsync.cipher.masking.mask_questions`) |
| not used for a week, when another is made | removed: who gets hold of the keys later finds no mask with them |

Seeds of masks are never on disk. Who is restarted cannot reveal them; the other silos can.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import inf
from pathlib import Path

from fedsync.cipher.keys.keyring import Ring
from fedsync.cipher.keys.material import KEY_BYTES, SiloKeys
from fedsync.cipher.masking.context import mask_context
from fedsync.cipher.masking.mask_questions import SignAnswer, SignQuestion, read_question
from fedsync.cipher.masking.mask_roster import MaskRoster, announce, fresh_pair
from fedsync.cipher.masking.mask_round import MaskRound
from fedsync.cipher.masking.masked_work import Limit
from fedsync.common.errors import SERVER, ConfigError, ProtocolError
from fedsync.common.files import private_folder, read_private, write_private
from fedsync.common.locks import taken
from fedsync.core.orders import WorkOrder
from fedsync.model.transfer import Payload

MAX_ATTEMPTS = 1000
"""Attempts at one version that a silo takes part in."""

_FOLDER, _LOCK = "masks", "lock"
_STALE_S = 7 * 86_400.0
_ROUNDS = 4
"""Rounds whose masks are remembered; a sum is opened as soon as it is committed."""

_MAX_BYTES = 2**16


class MaskLog:
    """The book of one run.

    Args:
        ring: the silo's keys; the book is a file in their folder, or in memory where they are in none.
        run: the run's digest, 32 bytes.

    Raises:
        ConfigError: the file is damaged, or the disk does not take it.
    """

    def __init__(self, ring: Ring, run: bytes) -> None:
        self._folder = None if ring.folder is None else ring.folder / _FOLDER
        self._name = run.hex()
        self._used: tuple[int, tuple[int, ...]] = (-1, ())
        with self._held() as file:
            if file is not None and file.exists():
                exchange, self._used = _read(file)
                self.pair = fresh_pair(ring.own, exchange)
            else:
                self.pair = fresh_pair(ring.own)
                self._write(file)
                _remove_stale(file)

    def enter(self, base: int, attempt: int) -> None:
        """Put down that masks are put on; on disk when this returns.

        Versions only go up, so of those before the newest none is ever masked again.

        Raises:
            ProtocolError: these masks were put on before, or those of a later version.
            ConfigError: the file is damaged or another than before, or the disk does not take it.
        """
        with self._held() as file:
            if file is not None:
                exchange, self._used = _read(file)
                if exchange != self.pair.exchange:
                    raise _damaged(file)
            newest, attempts = self._used
            if base < newest or (base == newest and (attempt in attempts or len(attempts) >= MAX_ATTEMPTS)):
                detail = f"those of attempt {attempt} at version {base} have blinded an update already"
                raise ProtocolError(SERVER, "masks", detail)
            self._used = base, (*attempts, attempt) if base == newest else (attempt,)
            self._write(file)

    def _write(self, file: Path | None) -> None:
        if file is not None:
            base, attempts = self._used
            write_private(file, f"{self.pair.exchange.hex()} {' '.join(map(str, (base, *attempts)))}".encode())

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


def kept_pair(ring: Ring, run: bytes) -> SiloKeys | None:
    """The silo's keys with its pair for a run, if its book is still there; nothing is made or changed.

    Args:
        ring: the silo's keys, in their folder.
        run: the run's digest, 32 bytes.

    Raises:
        ConfigError: the book is damaged.
    """
    file = None if ring.folder is None else ring.folder / _FOLDER / run.hex()
    return fresh_pair(ring.own, _read(file)[0]) if file is not None and file.exists() else None


class Masking:
    """One silo's masks.

    Args:
        ring: the silo's keys.
        run: the run's digest, 32 bytes; masks are of one run only.

    Raises:
        ConfigError: the book of used masks is damaged, or the disk does not take it.
    """

    def __init__(self, ring: Ring, run: bytes) -> None:
        self._run = run
        self._log = MaskLog(ring, run)
        self._rounds: dict[bytes, tuple[int, MaskRound]] = {}
        self._revealed: set[bytes] = set()

    @property
    def announcement(self) -> bytes:
        """What other silos are to know of this one; see `fedsync.cipher.masking.mask_roster`."""
        return announce(self._log.pair, self._run)

    @property
    def pair(self) -> SiloKeys:
        return self._log.pair

    @property
    def unrevealed(self) -> bool:
        """Whether the masks of the newest update may have to be taken off yet. Others can, if enough are left."""
        return bool(self._rounds) and next(reversed(self._rounds)) not in self._revealed

    def begin(self, order: WorkOrder, chain: bytes, attempt: int, roster: MaskRoster, limit: Limit) -> MaskRound:
        """Masks for the update that an order asks for.

        Args:
            order: all of it that is the same for all silos of a round is bound.
            chain: digest of all that led to the version that it starts from, 32 bytes.
            attempt: of the round from this version; see `fedsync.cipher.masking.attempts`.
            roster: who takes part.
            limit: how much work is behind the update, and may be behind others in a sum with it.

        Raises:
            ProtocolError: they were used before, or the roster has not this silo's pair.
            ConfigError: it cannot be put on disk that they are used.
        """
        context = mask_context(self._run, order, chain, attempt, roster)
        masks = MaskRound(self._log.pair, roster, context, limit)
        self._log.enter(order.base_version, attempt)
        self._rounds[context] = order.base_version, masks
        for old in list(self._rounds)[:-_ROUNDS]:
            self._forget(old)
        return masks

    def settle(self, version: int) -> None:
        """This version is here, so no sum of updates that began before it is still to be opened: forget their seeds."""
        for context, (base, _) in list(self._rounds.items()):
            if base < version:
                self._forget(context)

    def _forget(self, context: bytes) -> None:
        del self._rounds[context]
        self._revealed.discard(context)

    def answer(self, payload: Payload) -> Payload:
        """Sign who is in a sum, or reveal what takes the masks off it.

        Raises:
            ProtocolError: the masks are not known here, or what is asked would tell too much; see `MaskRound`.
        """
        question = read_question(payload)
        if question.context not in self._rounds:
            raise ProtocolError(SERVER, "question", "no masks of this context are known here")
        masks = self._rounds[question.context][1]
        if isinstance(question, SignQuestion):
            return SignAnswer(question.context, masks.sign(question.survivors)).encode()
        revealed = masks.reveal(question)
        self._revealed.add(question.context)
        return revealed.encode()


def _damaged(file: Path) -> ConfigError:
    remedy = f"Stop this silo's trainers of the run and remove {file}: the silo then goes on under a fresh pair of keys"
    return ConfigError(str(file), "damaged: it is not known which masks were used", remedy)


def _read(file: Path) -> tuple[bytes, tuple[int, tuple[int, ...]]]:
    """The pair's private half, and the newest version whose masks were put on, and in which attempts."""
    words = read_private(file, _MAX_BYTES).decode("ascii", "replace").split()
    try:
        exchange, (base, *attempts) = bytes.fromhex(words[0]), map(int, words[1:])
    except (IndexError, ValueError):
        raise _damaged(file) from None
    if len(exchange) != KEY_BYTES or base < -1 or any(attempt < 0 for attempt in attempts):
        raise _damaged(file)
    return exchange, (base, tuple(attempts))


def _remove_stale(kept: Path | None) -> None:
    if kept is None:
        return
    for file in kept.parent.iterdir():
        if file not in (kept, kept.parent / _LOCK) and time.time() - file.stat().st_mtime > _STALE_S:
            file.unlink(missing_ok=True)
