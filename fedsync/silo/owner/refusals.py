"""Why a silo gives no answer: one word to the server, the reason to the silo's own log.

What an error says may hold a path, a cell of a table or a number that was decrypted, and when which error comes tells
of them, too. So a server that asks learns one code of a closed list, whatever was raised and wherever on the way. The
reason goes to the log of the process that failed (a trainer's ``trainer.log``, or the SuperNode's) and to a small
file in the state folder, which ``fedsync doctor --silo`` shows.

All failures of what was sealed are one code, whatever was wrong with it, and so one answer, byte by byte.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from fedsync.common import codec, foreign
from fedsync.common.errors import (
    ConfigError,
    Diverged,
    Hanging,
    IntegrityError,
    LimitReached,
    OwnerRefusal,
    ProtocolError,
    RunError,
    SiloAway,
    SiloLocked,
    UserCodeError,
)
from fedsync.common.files import OWNER_FILE, write_atomically
from fedsync.common.locks import taken
from fedsync.common.sandbox.path_sandbox import ALLOWED
from fedsync.silo.owner.approvals import AwaitsApproval
from fedsync.silo.protocol import STATE, Refusal, Refused

logger = foreign.logger(__name__)

NOTES = "refusals.json"
"""File in the folder of trainers: the last refusals, with their reasons. The owner's alone."""

_MOST_NOTES, _MOST_REASON = 40, 1000
_MOST_TEXT = 4000
_MOST_TOLD = 5
_QUIET = {Refusal.LOADING, Refusal.LOCKED, Refusal.APPROVAL, Refusal.AWAY}
"""Codes that come again and again, and whose reason says all."""

_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}


class StillLoading(RunError):
    """The trainer is not ready yet. It goes on."""


_CODES: tuple[tuple[type[Exception], Refusal], ...] = (
    (StillLoading, Refusal.LOADING),
    (SiloLocked, Refusal.LOCKED),
    (IntegrityError, Refusal.INTEGRITY),
    (ProtocolError, Refusal.PROTOCOL),
    (LimitReached, Refusal.LIMIT),
    (SiloAway, Refusal.AWAY),
    (AwaitsApproval, Refusal.APPROVAL),
    (OwnerRefusal, Refusal.OWNER),
    (Diverged, Refusal.DIVERGED),
    (Hanging, Refusal.HANGS),
    (UserCodeError, Refusal.CODE),
    (ConfigError, Refusal.CONFIG),
)
"""The first class that an error is of decides; an error of no class here is `Refusal.INTERNAL`."""

MEANINGS: dict[Refusal, tuple[str, str]] = {
    Refusal.LOADING: ("its trainer still loads task, data and model", "It is asked again by itself"),
    Refusal.CONFIG: (
        "task, data, device or keys are not usable there",
        "Compare the strategy with what the silo has; its owner sees the reason",
    ),
    Refusal.OWNER: (
        "its owner does not allow what the run asks for",
        "Change the strategy, or ask the owner about data, seal and code in silo.yaml",
    ),
    Refusal.PROTOCOL: ("it cannot read what it was sent", "Run the same version of FedSync at silos and server"),
    Refusal.INTEGRITY: (
        "what was sealed is not what silos of its group made, or not for this place in this run",
        "Check the server's key file and its epoch. After three of these the silo locks itself",
    ),
    Refusal.DIVERGED: (
        "its training came to values that are not finite",
        "Its owner sees what was not finite first: if it is not the data, lower local.learning_rate",
    ),
    Refusal.CODE: ("its training code raised an error", "Its owner sees the file, the line and the error"),
    Refusal.HANGS: (
        "its training waited so long for something that did not come that it was ended",
        "Its owner sees in which line. The silo goes on with the next order",
    ),
    Refusal.MEMORY: ("it ran out of memory", "Use smaller batches or a smaller model"),
    Refusal.DISK: ("its disk takes no more", "Its owner has to make room where its state folder is"),
    Refusal.LOCKED: (
        "it takes no part since it met three failures of integrity",
        "Find out with its owner what happened; the owner ends it with `fedsync silo unlock`",
    ),
    Refusal.LIMIT: (
        "its owner allows fewer orders, or only larger ones",
        "Ask for less often, for larger batches or for more samples, or ask the owner about the limits in silo.yaml",
    ),
    Refusal.AWAY: (
        "it takes no orders outside of its window",
        "It is asked again when its window begins; its owner says when by presence in silo.yaml",
    ),
    Refusal.APPROVAL: (
        "it waits for its owner's approval",
        "It is asked again by itself; its owner confirms the run with `fedsync silo approve`",
    ),
    Refusal.INTERNAL: ("its training failed, or its trainer ended", "If its log says nothing, memory may have run out"),
}
"""What each code means, and what the server's operator can do."""

AT_ONCE = {Refusal.CONFIG, Refusal.CODE, Refusal.OWNER, Refusal.PROTOCOL, Refusal.LOCKED}
"""Refusals of a run that a silo repeats until somebody changes something there or here."""

UNTIL_CHANGED = AT_ONCE - {Refusal.LOCKED}
"""Those that nobody can end but by another file, and a new start of the silo or the run."""

PASSING = {Refusal.LOADING, Refusal.APPROVAL, Refusal.AWAY}
"""Refusals that pass by themselves, however often they come."""


@dataclass(frozen=True, slots=True)
class RefusalNote:
    """A refusal that was put down: the last of ``times`` alike was at ``at``, ISO 8601."""

    at: str
    code: Refusal
    reason: str
    times: int = 1


@dataclass(frozen=True, slots=True)
class _RefusalNotes:
    notes: tuple[RefusalNote, ...]


def explained(silo: str, refused: Refused) -> str:
    """What to tell the server's operator of a refusal; of the silo's text nothing but what it prints as."""
    meaning, remedy = MEANINGS[refused.code]
    why = refused.text[:_MOST_TEXT] or "its own log and `fedsync doctor` say why"
    return f"{silo} answers {refused.code.name}: {meaning} ({why}). {remedy}"


def explained_together(refusals: Mapping[str, Refused]) -> str:
    """What to tell the server's operator where every silo refuses a run by one code; ``refusals`` by silo."""
    code = next(iter(refusals.values())).code
    meaning, remedy = MEANINGS[code]
    silos: dict[str, list[str]] = {}
    for silo, refused in refusals.items():
        silos.setdefault(refused.text[:_MOST_TEXT] or "its own log and `fedsync doctor` say why", []).append(silo)
    told = [f"{listed(names)}: {text}" for text, names in silos.items()]
    return f"every silo refuses the run, {code.name}: {meaning}. {remedy}. {listed(told, '; ')}"


def explained_too_few(refusals: Mapping[str, Refused], needed: int, left: int) -> str:
    """A message for the server's operator where a run cannot begin without the silos that refuse it, by name."""
    told = listed([explained(silo, refused) for silo, refused in refusals.items()], ". ")
    return f"the run needs {needed} silos, and at most {left} of those that are here can take part. {told}"


def listed(texts: Sequence[str], between: str = ", ") -> str:
    """The first of them, and how many more there are."""
    more = [f"{len(texts) - _MOST_TOLD} more"] if len(texts) > _MOST_TOLD else []
    return between.join([*texts[:_MOST_TOLD], *more])


def code_of(error: BaseException) -> Refusal:
    """The one word for an error: its own class decides, then what it came from."""
    for each in _chain(error):
        if _is_of_memory(each):
            return Refusal.MEMORY
        if isinstance(each, OSError) and each.errno in _DISK:
            return Refusal.DISK
        if isinstance(each, IntegrityError | SiloLocked):
            break
    return next((code for kind, code in _CODES if isinstance(error, kind)), Refusal.INTERNAL)


def refuse(error: Exception) -> Refused:
    """What the server is told of an error, whose reason is put down here. Raises nothing."""
    try:
        code = code_of(error)
        reason = _reason(error)
        logger.warning("refused, %s: %s", code, reason, exc_info=None if code in _QUIET else error)
        if code is not Refusal.LOADING:
            _note(code, reason)
        text, back_s = (
            _printing(reason) if _texts_may_go() else "",
            error.back_s if isinstance(error, SiloAway) else None,
        )
        return Refused(code, text, back_s)
    except Exception:
        logger.exception("a refusal could not be put down")
        return Refused(Refusal.INTERNAL)


def last_refusals(trainers: Path) -> tuple[RefusalNote, ...]:
    """What was put down in the folder of trainers, oldest first; nothing where the file is missing or torn."""
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
    if "torch" not in sys.modules:  # a client app has none, and needs none to say so
        return False
    from fedsync.train.machine.device import is_out_of_memory

    return is_out_of_memory(error)


def _reason(error: Exception) -> str:
    text = printed(error)
    return text if isinstance(error, ConfigError | ProtocolError | RunError) else f"{type(error).__name__}: {text}"


def printed(value: object) -> str:
    """The text of an error or of what is in it; a task of one's own may raise what cannot say what it is."""
    try:
        return str(value)
    except Exception:
        return "(it cannot be printed)"


def _texts_may_go() -> bool:
    """Whether a reason may leave the silo: it is emulated, or its owner lets reasons out and it has no keys.

    A silo with keys takes part in encrypted runs only.
    """
    from fedsync.silo.owner.key_lookup import has_keys
    from fedsync.silo.owner.owner_policy import OwnerPolicy

    return not os.environ.get(ALLOWED) or (OwnerPolicy.here().errors == "text" and not has_keys())


def _printing(reason: str) -> str:
    """A text that the server's codec takes."""
    return foreign.shown(" ".join(reason.split())[:_MOST_TEXT])[:_MOST_TEXT]


def _note(code: Refusal, reason: str) -> None:
    """Put a refusal down. That this fails, on a full disk for example, changes no answer."""
    root = os.environ.get(STATE)
    if not root:
        return
    folder = Path(root)
    try:
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
