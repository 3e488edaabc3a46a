"""Log of one silo's masks in a run: its key pair for masks, the used masks, and its answers about them.

Two updates under one pair mask disclose their difference, and a restarted process would compute the same masks again.
So the use of a mask is logged before the masked data can leave. The log is on disk beside the long-lived keys. It also
holds the private key of the pair for masks. Seeds of masks are never on disk: after a restart, other silos reveal them.

| state of the log | consequence |
|---|---|
| gone | the key pair is gone with it: the silo announces a new pair, and no mask repeats |
| damaged | the silo masks nothing: its key pair may differ from the announced pair |
| an older copy | pair masks may repeat; own masks do not, and the other silos sign no second list of survivors |
| unused for a week when another log is created | removed: somebody who gets the keys later learns no mask |
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import inf
from pathlib import Path

from fedsync.cipher.keys.keyring import Ring
from fedsync.cipher.keys.material import KEY_BYTES, SiloKeys
from fedsync.cipher.masking.mask_roster import MaskRoster, announce, fresh_pair
from fedsync.cipher.masking.mask_round import MaskRound, SignAnswer, Survivors, mask_context, read_question
from fedsync.cipher.masking.masked_work import WorkDone
from fedsync.common.errors import SERVER, ConfigError, ProtocolError
from fedsync.common.files import private_folder, read_private, write_private, writing
from fedsync.common.locks import taken
from fedsync.core.orders import WorkOrder
from fedsync.model.transfer import Payload

MAX_ATTEMPTS = 1000
_FOLDER, _LOCK = "masks", "lock"
_STALE_S = 7 * 86_400.0
_ROUNDS = 4  # rounds whose masks are kept in memory; a sum is opened as soon as it is committed

_MAX_BYTES = 2**16


class MaskLog:
    """Log of used masks in one run; in memory where the silo's keys have no folder. Methods raise `ConfigError` if the
    file is damaged, has another pair than before, or cannot be written.
    """

    def __init__(self, ring: Ring, run: bytes) -> None:
        self._file = None if ring.folder is None else ring.folder / _FOLDER / run.hex()
        self._used: tuple[int, tuple[int, ...]] = (-1, ())
        with self._held() as file:
            if file is not None and file.exists():
                exchange, self._used = _read(file)
                self.pair = fresh_pair(ring.own, exchange)
            else:
                self.pair = fresh_pair(ring.own)
                self._write(file)
                others = set() if file is None else set(file.parent.iterdir()) - {file, file.parent / _LOCK}
                for other in others:
                    if time.time() - other.stat().st_mtime > _STALE_S:
                        other.unlink(missing_ok=True)

    def enter(self, base: int, attempt: int) -> None:
        """Log the use of masks; the entry is on disk when this returns. Versions only go up. Raise `ProtocolError` if
        these masks or masks of a later version were used before.
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
        if self._file is None:
            yield None
            return
        path = private_folder(self._file.parent) / _LOCK
        with ExitStack() as stack:
            with writing(path, "Give the silo write access to its key folder, which masks need"):
                stack.enter_context(taken(path, inf))
            yield self._file


def kept_pair(ring: Ring, run: bytes) -> SiloKeys | None:
    """The silo's keys with its pair for a run; None without a log; `ConfigError` if the log is damaged."""
    file = None if ring.folder is None else ring.folder / _FOLDER / run.hex()
    return fresh_pair(ring.own, _read(file)[0]) if file is not None and file.exists() else None


class Masking:
    """Masks of one silo in one run; `ConfigError` if the log of used masks is damaged or cannot be written."""

    def __init__(self, ring: Ring, run: bytes) -> None:
        self._run = run
        self._log = MaskLog(ring, run)
        self.pair = self._log.pair
        self.announcement = announce(self.pair, run)
        self._rounds: dict[bytes, tuple[int, MaskRound]] = {}
        self._revealed: set[bytes] = set()

    @property
    def unrevealed(self) -> bool:
        """Whether the newest update's masks may still have to be removed. Other silos can do so, if enough are left."""
        return bool(self._rounds) and next(reversed(self._rounds)) not in self._revealed

    def begin(
        self, order: WorkOrder, chain: bytes, attempt: int, roster: MaskRoster, work: WorkDone, ratio: float
    ) -> MaskRound:
        """Make masks for the update of an order; arguments as for `mask_context` and `MaskRound`. Raise `ProtocolError`
        if the masks were used before, or the roster does not have this silo's pair.
        """
        context = mask_context(self._run, order, chain, attempt, roster)
        masks = MaskRound(self.pair, roster, context, work, ratio)
        self._log.enter(order.base_version, attempt)
        self._rounds[context] = order.base_version, masks
        self._rounds = dict(list(self._rounds.items())[-_ROUNDS:])
        self._revealed &= self._rounds.keys()
        return masks

    def settle(self, version: int) -> None:
        """Forget seeds of updates that began before ``version``: no sum of these updates remains to be opened."""
        self._rounds = {context: made for context, made in self._rounds.items() if made[0] >= version}

    def answer(self, payload: Payload) -> Payload:
        """Sign the list of a sum, or reveal seeds that remove its masks; `ProtocolError` as in `MaskRound`."""
        question = read_question(payload)
        if question.context not in self._rounds:
            raise ProtocolError(SERVER, "question", "no masks of this context are known here")
        masks = self._rounds[question.context][1]
        if isinstance(question, Survivors):
            return SignAnswer(question.context, masks.sign(question)).encode()
        revealed = masks.reveal(question)
        self._revealed.add(question.context)
        return revealed.encode()


def _damaged(file: Path) -> ConfigError:
    remedy = f"Stop this silo's trainers of the run and remove {file}: the silo then continues with a new pair of keys"
    return ConfigError(str(file), "damaged: the masks that were used are unknown", remedy)


def _read(file: Path) -> tuple[bytes, tuple[int, tuple[int, ...]]]:
    words = read_private(file, _MAX_BYTES).decode("ascii", "replace").split()
    try:
        exchange, (base, *attempts) = bytes.fromhex(words[0]), map(int, words[1:])
    except (IndexError, ValueError):
        raise _damaged(file) from None
    if len(exchange) != KEY_BYTES or base < -1 or any(attempt < 0 for attempt in attempts):
        raise _damaged(file)
    return exchange, (base, tuple(attempts))
