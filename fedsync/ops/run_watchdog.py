"""Watchdog that resubmits dead runs of a real server, as long as the server lives.

The watchdog never gives up a run. The pause before the next try doubles with each death at the same model version, up
to ten minutes; a new version resets the pause. If a submission fails (SuperLink unreachable, disk full), the retries
begin after five seconds, with pauses of at most a minute. Runs whose server process Flower never started are retried
too. `fedsync server stop` ends the retries.
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
from fedsync.common.run_claim import CHECKPOINTS
from fedsync.observe.run_state import RUN_LOG, why_failed
from fedsync.ops.runs import RUN_FILE, RUNS, STOPPED, STRATEGY_FILE, BusyError
from fedsync.server.checkpoints import newest_version
from fedsync.server.run_folder import APP, DONE_FILE, ERROR_FILE, PID_FILE, RUN_LOCK, Phase, end_process, phase

logger = foreign.logger(__name__)

DIED = Backoff(2.0, 600.0)

REFUSED = Backoff(5.0, 60.0)

LEAST_ROOM = 2**20
"""Free disk space [bytes] required for a resubmission, in addition to two checkpoints of the run."""

LINGERS_S = 30.0
"""Time after the end of a run at which a remaining server process is ended [s]."""

_LOOK_S = 2.0


@dataclass(slots=True)
class _Care:
    phase: Phase
    version: int | None = None
    tries: int = 0
    refused: int = 0
    due_s: float = 0.0
    skip_s: float = 0.0
    lingers_since_s: float | None = None
    reason: str | None = None
    failed: str | None = None
    starved: bool = False


@dataclass(slots=True)
class RunWatchdog:
    """Watchdog of a server's runs."""

    state: Path
    resume: Callable[[Path], None]
    end: Callable[[Path], None] = end_process
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    _cares: dict[Path, _Care] = field(default_factory=dict)
    _told: dict[str, object] = field(default_factory=dict)
    _begun_s: float = field(default_factory=time.time)

    def watch(self, stop: threading.Event) -> None:
        while not stop.wait(_LOOK_S):
            try:
                self.look(time.monotonic())
            except Exception:  # the folder of runs may become readable again
                logger.exception("the runs in %s could not be looked at", self.state)

    def status(self) -> dict[str, object]:
        """Return the status for the health file: time of the last check (``looked``), and open ``runs`` by folder.

        Each run has ``phase``, ``tries`` (deaths at the same model version), ``next`` (time of the next try, or None)
        and ``reason`` (last problem, or None). ``failed`` has the newest run and its error, if it failed unasked.
        """
        return self._told

    def look(self, now_s: float) -> None:
        """Resume dead runs that are due; an error delays only the run that caused it."""
        folders = dict.fromkeys(entry.parent.resolve() for entry in sorted(self.state.glob(f"{RUNS}/*/{RUN_FILE}")))
        self._cares = {folder: self._cares.get(folder) or _Care(Phase.WAITING) for folder in folders}
        for folder, care in self._cares.items():
            if now_s < care.skip_s:
                continue
            try:
                self._look_at(folder, care, now_s)
            except FedSyncError as error:  # the SuperLink may be restarting
                logger.warning("%s could not be resumed: %s", folder, error)
                _put_off(care, error, now_s)
            except Exception as error:  # the other runs must still be checked
                logger.exception("%s could not be cared for", folder)
                _put_off(care, error, now_s)
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
        at = "" if version is None else f" at version {version}"  # a relay's run has no versions
        care.reason = f"{why},{at}" if at else why
        try:
            self.resume(folder)
        except BusyError:  # the operator is already changing the run
            return
        # With `tries` above 0, the previous try made no new version, so this is a warning.
        log = logger.info if care.tries == 0 else logger.warning
        log("resumed%s: %s, try %d: %s", at, folder, care.tries + 1, why)
        care.phase = Phase.WAITING
        care.due_s = now_s + (DIED if began else REFUSED).pause_s(care.tries)
        care.tries += 1
        care.refused = 0

    def _check_room(self, folder: Path, care: _Care) -> None:
        """Delay submissions while the disk is full, and resubmit runs that were submitted to a full disk: then, Flower
        starts no server process and reports no error. Raises `RunError` if a dead run's files have no room.
        """
        files = map(_size, (folder / CHECKPOINTS).glob("*"))
        wanted, free = LEAST_ROOM + 2 * max(files, default=0), shutil.disk_usage(folder).free
        if free < wanted:
            care.starved = care.phase is not Phase.AT_WORK
            if care.phase is Phase.DIED:
                raise RunError(f"the disk of {folder} is full: {free} bytes are free, {wanted} are needed")
        elif care.starved:
            care.starved, care.due_s = False, 0.0
            if care.phase is Phase.WAITING:
                shutil.rmtree(folder / APP, ignore_errors=True)
                care.phase = phase(folder)

    def _note_failure(self, folder: Path, care: _Care) -> None:
        why = (why_failed(folder) or "").removeprefix(f"{folder}: ")
        if not why or STOPPED in why or care.failed == why:
            return
        care.failed = why
        with suppress(FileNotFoundError):
            if (folder / ERROR_FILE).stat().st_mtime >= self._begun_s:
                logger.error("the run failed: %s: %s. See %s there", folder, why, RUN_LOG)

    def _end_what_lingers(self, folder: Path, care: _Care, now_s: float) -> None:
        """End a server process that started after its run was stopped, or that hangs on exit."""
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
                "tries": care.tries,
                "next": (now + timedelta(seconds=left_s)).isoformat(timespec="seconds") if waits else None,
                "reason": care.reason,
            }
        # A single assignment at the end, because another thread reads `_told`.
        newest = max(self._cares, key=_started_s, default=None)
        failed = None if newest is None else self._cares[newest].failed
        over = {} if failed is None else {"failed": {str(newest): failed}}
        self._told = {"looked": now.isoformat(timespec="seconds"), "runs": runs, **over}


def _size(file: Path) -> int:
    """Size of a file [bytes]; 0 if a run at work has just removed it."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _started_s(folder: Path) -> float:
    """Return the time of a run's start; each resumption writes `RUN_FILE` again, but not the strategy."""
    strategy = folder / STRATEGY_FILE
    try:
        return (strategy if strategy.exists() else folder / RUN_FILE).stat().st_mtime  # a relay's run has no strategy
    except FileNotFoundError:
        return 0.0


def _put_off(care: _Care, error: Exception, now_s: float) -> None:
    text = str(error) if isinstance(error, FedSyncError) else f"{type(error).__name__}: {error}"
    care.reason = f"not resumed: {text}"
    care.skip_s = now_s + REFUSED.pause_s(care.refused)
    care.refused += 1
