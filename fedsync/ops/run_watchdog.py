"""Keeps the runs of a real server going: what died is submitted again, as long as the server lives.

A run that dies again and again is never given up. The pause before the next try doubles each time it dies at the same
version of the model, up to ten minutes; a new version begins with the shortest. What cannot be submitted, since the
SuperLink is away or the disk is full, is tried again after five seconds at first, and at most a minute. So is a run
whose server process Flower never began. Whatever goes
wrong with one run costs no other run its care. An operator ends all this by `fedsync server stop`.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedsync.common import foreign
from fedsync.common.backoff import Backoff
from fedsync.common.errors import FedSyncError, RunError
from fedsync.common.locks import held
from fedsync.observe.fate import RUN_LOG, why_failed
from fedsync.ops.runs import RUN_FILE, RUNS, STOPPED, BusyError
from fedsync.server.checkpoints import FOLDER as CHECKPOINTS
from fedsync.server.checkpoints import newest_version
from fedsync.server.run_folder import APP, DONE_FILE, ERROR_FILE, PID_FILE, RUN_LOCK, Phase, end_process, phase

logger = foreign.logger(__name__)

DIED = Backoff(2.0, 600.0)
"""Pause after a resumption of a run before the next; each death at the same version doubles it."""

REFUSED = Backoff(5.0, 60.0)
"""Pause after a run could not be submitted; each refusal in a row doubles it."""

LEAST_ROOM = 2**20
"""Bytes that are free on the disk before a run is submitted again, beside two of its checkpoints."""

LINGERS_S = 30.0
"""A server process that lives on for this long [s] after its run was stopped is ended."""

_LOOK_S = 2.0


@dataclass(slots=True)
class _Care:
    """What the watchdog knows of one run."""

    phase: Phase
    version: int | None = None
    tries: int = 0
    resumed: int = 0
    refused: int = 0
    due_s: float = 0.0
    skip_s: float = 0.0
    lingers_since_s: float | None = None
    reason: str | None = None
    failed: str | None = None
    starved: bool = False


def _utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(slots=True)
class RunWatchdog:
    """Submits the runs of a server again that have died.

    Args:
        state: the server's state folder.
        resume: has the run in a folder go on that has died.
        end: ends the server process of the run in a folder.
        clock: the present, in UTC, for what is told.
    """

    state: Path
    resume: Callable[[Path], None]
    end: Callable[[Path], None] = end_process
    clock: Callable[[], datetime] = _utc_now
    _cares: dict[Path, _Care] = field(default_factory=dict)
    _told: dict[str, object] = field(default_factory=dict)
    _begun_s: float = field(default_factory=time.time)

    def watch(self, stop: threading.Event) -> None:
        """Look every other second until ``stop`` is set."""
        while not stop.wait(_LOOK_S):
            try:
                self.look(time.monotonic())
            except Exception:  # the folder of runs cannot be read: it may come back
                logger.exception("the runs in %s could not be looked at", self.state)

    def status(self) -> dict[str, object]:
        """For the health file: when it ``looked`` last, and the ``runs`` that are not over, by folder.

        Each run has its ``phase``, ``resumed`` (times since the server started), ``tries`` (times that it died at the
        same version), ``next`` (when it is tried again, or None) and ``reason`` (of the last trouble, or None).
        ``failed`` has the run that was submitted last and why it failed, if it did and was not stopped.
        """
        return self._told

    def look(self, now_s: float) -> None:
        """Resume what has died and is due; an error costs a run a pause, and others nothing."""
        folders = dict.fromkeys(entry.parent.resolve() for entry in sorted(self.state.glob(f"{RUNS}/*/{RUN_FILE}")))
        self._cares = {folder: self._cares.get(folder) or _Care(Phase.WAITING) for folder in folders}
        for folder, care in self._cares.items():
            if now_s < care.skip_s:
                continue
            try:
                self._look_at(folder, care, now_s)
            except FedSyncError as error:  # the SuperLink may be on its way back
                logger.warning("%s could not be resumed: %s", folder, error)
                _put_off(care, error, now_s)
            except Exception as error:  # whatever it was, the other runs need their keeper
                logger.exception("%s could not be cared for", folder)
                _put_off(care, error, now_s)
            self._tell(now_s)
        self._tell(now_s)

    def _look_at(self, folder: Path, care: _Care, now_s: float) -> None:
        care.phase = phase(folder)
        if care.phase is Phase.OVER:
            self._note_failure(folder, care)
            self._end_what_lingers(folder, care, now_s)
            return
        care.lingers_since_s = care.failed = None
        self._check_room(folder, care)
        if care.phase is not Phase.DIED:
            care.refused = 0
            return
        version = newest_version(folder)
        if care.version != version:
            care.version, care.tries, care.due_s = version, 0, 0.0
        if now_s < care.due_s:
            return
        began = (folder / PID_FILE).exists()
        why = "its server process died" if began else "Flower did not start its server process"
        at = "" if version is None else f" at version {version}"  # a relay's run has none
        care.reason = f"{why},{at}" if at else why
        try:
            self.resume(folder)
        except BusyError:  # the operator was faster
            return
        # The try before this one made no new version, if there was one.
        log = logger.info if care.tries == 0 else logger.warning
        log("resumed%s: %s, try %d: %s", at, folder, care.tries + 1, why)
        care.phase = Phase.WAITING
        care.due_s = now_s + (DIED if began else REFUSED).pause_s(care.tries)
        care.tries += 1
        care.resumed += 1
        care.refused = 0

    def _check_room(self, folder: Path, care: _Care) -> None:
        """Submit nothing to a full disk, and what was submitted while it was full again when there is room.

        Flower starts no server process on a full disk, and says so to nobody.

        Raises:
            RunError: a run that has died finds no room for its files.
        """
        files = (path.stat().st_size for path in (folder / CHECKPOINTS).glob("*"))
        wanted, free = LEAST_ROOM + 2 * max(files, default=0), shutil.disk_usage(folder).free
        if free < wanted:
            care.starved = care.phase is not Phase.AT_WORK
            if care.phase is Phase.DIED:
                raise RunError(f"the disk of {folder} is full: {free} bytes are free, {wanted} are wanted")
        elif care.starved:
            care.starved, care.due_s = False, 0.0
            if care.phase is Phase.WAITING:
                shutil.rmtree(folder / APP, ignore_errors=True)
                care.phase = phase(folder)

    def _note_failure(self, folder: Path, care: _Care) -> None:
        """Say once that a run has failed, unless it did so before this watchdog was there."""
        why = why_failed(folder)
        if why is None or STOPPED in why or care.failed == why:
            return
        care.failed = why
        with suppress(FileNotFoundError):
            if (folder / ERROR_FILE).stat().st_mtime >= self._begun_s:
                logger.error("the run failed: %s: %s. See %s there", folder, why, RUN_LOG)

    def _end_what_lingers(self, folder: Path, care: _Care, now_s: float) -> None:
        """End a server process that Flower began after its run was stopped, or that hangs at its end."""
        if (folder / DONE_FILE).exists() or not held(folder / RUN_LOCK):
            care.lingers_since_s = None
        elif care.lingers_since_s is None:
            care.lingers_since_s = now_s
        elif now_s - care.lingers_since_s >= LINGERS_S:
            logger.warning("the run is over, but its server process lives, and is ended: %s", folder)
            self.end(folder)

    def _tell(self, now_s: float) -> None:
        now = self.clock()
        runs = {}
        for folder, care in self._cares.items():
            if care.phase is Phase.OVER:
                continue
            left_s = max(care.due_s, care.skip_s) - now_s
            waits = now_s < care.skip_s or (care.phase is Phase.DIED and left_s > 0)
            runs[str(folder)] = {
                "phase": care.phase.name.lower().replace("_", " "),
                "resumed": care.resumed,
                "tries": care.tries,
                "next": (now + timedelta(seconds=left_s)).isoformat(timespec="seconds") if waits else None,
                "reason": care.reason,
            }
        # At once, as another thread reads it.
        newest = max(self._cares, key=_submitted_s, default=None)
        failed = None if newest is None else self._cares[newest].failed
        over = {} if failed is None else {"failed": {str(newest): failed}}
        self._told = {"looked": now.isoformat(timespec="seconds"), "runs": runs, **over}


def _submitted_s(folder: Path) -> float:
    """The time of the last submission of a run."""
    try:
        return (folder / RUN_FILE).stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _put_off(care: _Care, error: Exception, now_s: float) -> None:
    text = str(error) if isinstance(error, FedSyncError) else f"{type(error).__name__}: {error}"
    care.reason = f"not resumed: {text}"
    care.skip_s = now_s + REFUSED.pause_s(care.refused)
    care.refused += 1
