"""Refusals of a silo: the server gets a code, and the reason stays in the silo's own log.

An error's text, and even its time, may disclose a path, a table cell or a decrypted number. So the server learns only
one code of a closed list, for every failure. The reason goes to the log of the failed process (a trainer's
``trainer.log``, or the SuperNode's). A small file in the state folder also has the reason; ``fedsync doctor --silo``
shows it. All failures of sealed data have the same code, and so the same answer, byte by byte.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from fedsync.common import codec, errors, foreign
from fedsync.common.errors import ConfigError, IntegrityError, ProtocolError, RunError, SiloAway, SiloLocked
from fedsync.common.files import OWNER_FILE, OWNER_FOLDER, write_atomically
from fedsync.common.locks import taken
from fedsync.common.sandbox.path_sandbox import ALLOWED
from fedsync.silo.owner.approvals import AwaitsApproval
from fedsync.silo.protocol import STATE, Refusal, Refused

logger = foreign.logger(__name__)

NOTES = "refusals.json"  # in the folder of trainers: the last refusals and their reasons; only the owner can read it

_MOST_NOTES, _MOST_REASON = 40, 1000
_MOST_TEXT = 4000
_MOST_TOLD = 5
# Refusals whose reasons need no traceback.
_QUIET = {Refusal.LOADING, Refusal.BUSY, Refusal.LOCKED, Refusal.APPROVAL, Refusal.AWAY}

_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}


class StillLoading(RunError):
    """Error: the trainer is still loading, and continues to load."""


_CODES: tuple[tuple[type[Exception], Refusal], ...] = (
    (StillLoading, Refusal.LOADING),
    (errors.SiloBusy, Refusal.BUSY),
    (SiloLocked, Refusal.LOCKED),
    (IntegrityError, Refusal.INTEGRITY),
    (ProtocolError, Refusal.PROTOCOL),
    (errors.LimitReached, Refusal.LIMIT),
    (errors.BudgetSpent, Refusal.BUDGET),
    (SiloAway, Refusal.AWAY),
    (AwaitsApproval, Refusal.APPROVAL),
    (errors.OwnerRefusal, Refusal.OWNER),
    (errors.Diverged, Refusal.DIVERGED),
    (errors.Hanging, Refusal.HANGS),
    (errors.UserCodeError, Refusal.CODE),
    (ConfigError, Refusal.CONFIG),
)
MEANINGS: dict[Refusal, tuple[str, str]] = {
    Refusal.LOADING: ("its trainer still loads task, data and model", "The server asks it again"),
    Refusal.BUSY: (
        "it has no room for a trainer besides those of other runs",
        "The server asks it again. A trainer without work makes room after 30 seconds",
    ),
    Refusal.CONFIG: (
        "task, data, device or keys are not usable there",
        "Compare the strategy with the silo's data and keys; its owner sees the reason",
    ),
    Refusal.OWNER: (
        "its owner does not allow something that the run asks for",
        "Change the strategy, or ask the owner about data, seal and code in silo.yaml",
    ),
    Refusal.PROTOCOL: (
        "it cannot decode a message of the server",
        "Run the same version of FedSync at silos and server",
    ),
    Refusal.INTEGRITY: (
        "an encrypted message was not made by silos of its group, or not for this place in this run",
        "Check the server's key file and its epoch. After three such failures the silo locks itself",
    ),
    Refusal.DIVERGED: (
        "its training produced values that are not finite",
        "Its owner sees which value was the first. If the data is finite, lower local.learning_rate",
    ),
    Refusal.CODE: ("its training code raised an error", "Its owner sees the file, the line and the error"),
    Refusal.HANGS: (
        "its training was ended, because it waited too long without computing",
        "Its owner sees the line that waited. The silo continues with the next order",
    ),
    Refusal.MEMORY: ("it ran out of memory", "Use smaller batches or a smaller model"),
    Refusal.DISK: ("its disk is full", "Its owner has to free space on the disk of its state folder"),
    Refusal.LOCKED: (
        "it locked itself after three integrity failures",
        "Find the cause together with its owner, who then runs `fedsync silo unlock`",
    ),
    Refusal.LIMIT: (
        "its owner allows fewer orders, or only orders with larger batches or more samples",
        "Ask for fewer orders, larger batches or more samples, or ask the owner about the limits in silo.yaml",
    ),
    Refusal.BUDGET: (
        "the order would exceed the privacy budget of its data",
        "Continue without this silo; only its owner can raise privacy.epsilon in silo.yaml",
    ),
    Refusal.AWAY: (
        "it takes no orders outside its presence window",
        "The server asks it again when its window begins. Its owner sets the window by presence in silo.yaml",
    ),
    Refusal.APPROVAL: (
        "it waits for its owner's approval",
        "The server asks it again; its owner confirms the run with `fedsync silo approve`",
    ),
    Refusal.INTERNAL: ("its training failed, or its trainer ended", "If its log has no error, memory may have run out"),
}
AT_ONCE = {Refusal.CONFIG, Refusal.CODE, Refusal.OWNER, Refusal.PROTOCOL, Refusal.LOCKED, Refusal.BUDGET}
"""Refusals that a silo repeats until somebody changes something at the server or the silo."""

UNTIL_CHANGED = AT_ONCE - {Refusal.LOCKED}  # refusals that only another file and a restart can end

PASSING = {Refusal.LOADING, Refusal.BUSY, Refusal.APPROVAL, Refusal.AWAY}  # refusals that end by themselves


@dataclass(frozen=True, slots=True)
class RefusalNote:
    """Recorded refusal; ``times`` equal refusals were joined, the last at ``at`` in ISO 8601."""

    at: str
    code: Refusal
    reason: str
    times: int = 1


@dataclass(frozen=True, slots=True)
class _RefusalNotes:
    notes: tuple[RefusalNote, ...]


def explained(silo: str, refused: Refused) -> str:
    meaning, remedy = MEANINGS[refused.code]
    why = refused.text[:_MOST_TEXT] or "its own log and `fedsync doctor` say why"
    return f"{silo} answers {refused.code.name}: {meaning} ({why}). {remedy}"


def explained_together(refusals: Mapping[str, Refused]) -> str:
    code = next(iter(refusals.values())).code
    meaning, remedy = MEANINGS[code]
    silos: dict[str, list[str]] = {}
    for silo, refused in refusals.items():
        silos.setdefault(refused.text[:_MOST_TEXT] or "its own log and `fedsync doctor` say why", []).append(silo)
    told = [f"{listed(names)}: {text}" for text, names in silos.items()]
    return f"every silo refuses the run, {code.name}: {meaning}. {remedy}. {listed(told, '; ')}"


def explained_too_few(refusals: Mapping[str, Refused], needed: int, left: int) -> str:
    told = listed([explained(silo, refused) for silo, refused in refusals.items()], ". ")
    return f"the run needs {needed} silos, and at most {left} of those that are here can take part. {told}"


def listed(texts: Sequence[str], between: str = ", ") -> str:
    more = [f"{len(texts) - _MOST_TOLD} more"] if len(texts) > _MOST_TOLD else []
    return between.join([*texts[:_MOST_TOLD], *more])


def code_of(error: BaseException) -> Refusal:
    """Return the code of an error: memory and disk errors among its causes take precedence over its own class."""
    for each in _chain(error):
        if _is_of_memory(each):
            return Refusal.MEMORY
        if isinstance(each, OSError) and each.errno in _DISK:
            return Refusal.DISK
        if isinstance(each, IntegrityError | SiloLocked):
            break
    return next((code for kind, code in _CODES if isinstance(error, kind)), Refusal.INTERNAL)


def refuse(error: Exception) -> Refused:
    """Record an error's reason, and return the server's answer. Raises nothing."""
    try:
        code = code_of(error)
        reason = printed(error)
        if not isinstance(error, ConfigError | ProtocolError | RunError):
            reason = f"{type(error).__name__}: {reason}"
        logger.warning("refused, %s: %s", code, reason, exc_info=None if code in _QUIET else error)
        if code is not Refusal.LOADING:
            _note(code, reason)
        back_s = error.back_s if isinstance(error, SiloAway) else None
        told = foreign.shown(" ".join(reason.split())[:_MOST_TEXT])[:_MOST_TEXT] if _texts_may_go() else ""
        return Refused(code, told, back_s)
    except Exception:
        logger.exception("a refusal could not be put down")
        return Refused(Refusal.INTERNAL)


def last_refusals(trainers: Path) -> tuple[RefusalNote, ...]:
    try:
        notes: _RefusalNotes = codec.loads(_RefusalNotes, (trainers / NOTES).read_bytes(), own=True)
    except (OSError, ValueError):
        return ()
    return notes.notes


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in seen:
        yield following
        seen.append(following)
        following = following.__cause__


def _is_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    if "torch" not in sys.modules:  # a client app does not load torch
        return False
    from fedsync.train.machine.device import is_out_of_memory

    return is_out_of_memory(error)


def printed(value: object) -> str:
    """Return the text of an error; a user's error class may fail to print."""
    try:
        return str(value)
    except Exception:
        return "(it cannot be printed)"


def _texts_may_go() -> bool:
    """Whether a reason may leave the silo: the silo is emulated, or it has no keys and its owner discloses reasons. A
    reason may quote a row, so none leaves where the data have a privacy budget.
    """
    from fedsync.silo.owner.key_lookup import has_keys
    from fedsync.silo.owner.owner_policy import OwnerPolicy

    owner = OwnerPolicy.here()
    return not os.environ.get(ALLOWED) or (owner.errors == "text" and not owner.privacy and not has_keys())


def _note(code: Refusal, reason: str) -> None:
    if not (root := os.environ.get(STATE)):
        return
    folder = Path(root)
    try:
        folder.mkdir(OWNER_FOLDER, parents=True, exist_ok=True)  # a relay has none yet
        with taken(folder / f"{NOTES}.lock") as alone:
            if not alone:
                return
            now = datetime.now(UTC).isoformat(timespec="seconds")
            note, notes = RefusalNote(now, code, reason[:_MOST_REASON]), last_refusals(folder)
            if notes and (notes[-1].code, notes[-1].reason) == (note.code, note.reason):
                note, notes = replace(note, times=notes[-1].times + 1), notes[:-1]
            kept = _RefusalNotes((*notes, note)[-_MOST_NOTES:])
            write_atomically(folder / NOTES, codec.dumps(kept).encode("utf-8", "replace"), OWNER_FILE)
    except (OSError, ConfigError) as error:
        logger.warning("the refusal is in this log only: %s", error)
