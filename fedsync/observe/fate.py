"""What became of a run at which no process is at work any more, as its folder says. Light, for those who only look."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedsync.common.errors import ConfigError, FedSyncError
from fedsync.common.locks import held
from fedsync.common.run_claim import ERROR_FILE, RUN_FILE
from fedsync.core.journal import JOURNAL, read_header
from fedsync.observe.report.read_json import read_object

SUMMARY = "summary.json"

OPERATOR, LISTENING = "operator", "listening"
"""Folder of what is asked of a run, and the file in it that its server process locks while it goes on."""

NO_RUN = "no run: journal.jsonl is not there"

RUN_LOG = "run.log"
"""In the folder of a real server's run: the log of its server process."""

MISSING = "silos that are missing"
"""With what a line of that log begins that names whom the run waits for."""

_END_BYTES = 20_000


def why_failed(folder: Path) -> str | None:
    """The reason that a run of a real server left, in a sentence; None where it left none."""
    try:
        told = read_object(folder / ERROR_FILE, "kind")
    except ConfigError as error:
        return str(error)
    if told is None:
        return None
    return str(told.get("message") or f"{told.get('place')}: {told.get('problem')}. {told.get('remedy')}")


def before_its_beginning(folder: Path) -> str | None:
    """The state of a run whose journal has not begun; None where the folder is of no run of a real server."""
    if not (folder / RUN_FILE).exists():
        return None
    failed = why_failed(folder)
    if failed is not None:
        return f"the run failed before it began: {failed}"
    try:
        with (folder / RUN_LOG).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _END_BYTES))
            end = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        end = []
    last = next((line for line in reversed(end) if MISSING in line), end[-1] if end else "")
    return f"the run has not begun: {last or 'its server process has not started'}"


def is_cut_off(folder: Path) -> bool:
    """Whether the server process that was at work on the run has gone, without a word or with its summary.

    False also where nobody can know: there never was such a process, as in virtual time, or it is another user's.
    """
    lock = folder / OPERATOR / LISTENING
    try:
        return lock.exists() and not held(lock)
    except OSError:
        return False


def way_on(runtime: str, folder: Path) -> str:
    """How a run that was cut off goes on.

    Args:
        runtime: of its journal.
        folder: of its files.
    """
    match runtime:
        case "local":
            return f"`fedsync run --resume {folder}` goes on with it"
        case "deployment":
            return f"`fedsync server start` goes on with one that died, `fedsync server run --resume {folder}` with any"
    return "Run it again"


def why_deaf(folder: Path) -> ConfigError:
    """Why nobody can be asked anything of the run in a folder.

    Raises:
        FedSyncError: what is there is no run's.
    """
    summary, runtime = read_object(folder / SUMMARY, "silos", "strategy") or {}, _header(folder).get("runtime", "")
    if summary.get("stopped_by"):
        return ConfigError(str(folder), f"this run is over: {summary['stopped_by']}", "It cannot be changed any more")
    if runtime and runtime != "virtual" and (summary or is_cut_off(folder)):
        return ConfigError(str(folder), "this run was cut off: its server process has gone", way_on(runtime, folder))
    remedy = "Name the folder of a run's files, while its server process lives; virtual runs cannot be steered"
    return ConfigError(str(folder), "no run is at work here", remedy)


def _header(folder: Path) -> dict[str, Any]:
    """Of the run's journal; empty where there is none that can be read."""
    try:
        with (folder / JOURNAL).open("rb") as file:
            return read_header(folder / JOURNAL, file.readline())
    except (OSError, FedSyncError):
        return {}
