"""State of a run whose server process does not run, from the files in the run's folder. Imports little."""

from __future__ import annotations

import json
import re
from pathlib import Path
from shlex import quote
from typing import Any

from fedsync.common.errors import ConfigError, FedSyncError
from fedsync.common.locks import held
from fedsync.common.run_claim import CHECKPOINTS, ERROR_FILE, RUN_FILE, RUN_LOCK
from fedsync.core.journal import JOURNAL, read_header

SUMMARY = "summary.json"

OPERATOR, LISTENING = "operator", "listening"
"""Folder of operator commands, and the file in it that the live server process keeps locked."""

NO_RUN = "no run: journal.jsonl is not there"

RUN_LOG = "run.log"
"""Log of the server process, in the folder of a real server's run."""

MISSING = "silos that are missing"
"""Text in `RUN_LOG` that marks a line with the silos that the run waits for."""

_END_BYTES = 20_000


def why_failed(folder: Path) -> str | None:
    """Return the recorded failure of a real server's run as a sentence; None without a record."""
    try:
        told = read_object(folder / ERROR_FILE, "kind")
    except ConfigError as error:
        return str(error)
    if told is None:
        return None
    return str(told.get("message") or f"{told.get('place')}: {told.get('problem')}. {told.get('remedy')}")


def before_its_beginning(folder: Path) -> str | None:
    """Describe a run whose journal has not begun; None if the folder has no run of a real server."""
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
    """Whether the run's process has ended; False if that is unknown."""
    lock = folder / OPERATOR / LISTENING
    try:
        if lock.exists():
            return not held(lock)
        # A virtual run has no operator. A survey is inside the locked folder of its run.
        alive = held(folder / RUN_LOCK) or held(folder.parent / RUN_LOCK)
        return not alive and _header(folder).get("runtime") == "virtual"
    except OSError:
        return False


def resumes_itself(folder: Path) -> bool:
    """Whether `fedsync server start` resumes the run after the death of its server process."""
    return (folder / RUN_FILE).exists() and why_failed(folder) is None


def way_on(runtime: str, folder: Path) -> str:
    """Return the command that resumes a run without a regular end, after the recorded reason of its end."""
    named = quote(str(folder))
    if runtime == "local":
        return f"`fedsync run --resume {named}` resumes it"
    if (folder / RUN_FILE).exists():
        why, command = why_failed(folder), f"`fedsync server run --resume {named} --server server.yaml`"
        if why is None:
            return f"`fedsync server start` resumes it by itself, {command} at once"
        return f"{why.removesuffix('.')}. {command} resumes it"
    if any(folder.glob(f"{CHECKPOINTS}/*.ckpt")):
        return 'Resume it with resume=True in Python, or with resume="yes" in the run configuration of `flwr run`'
    return "Run it again"


def why_deaf(folder: Path) -> ConfigError:
    """Return the error for a run that cannot receive commands; raises `FedSyncError` for a malformed summary."""
    summary, runtime = read_summary(folder) or {}, _header(folder).get("runtime", "")
    if summary.get("stopped_by"):
        return ConfigError(str(folder), f"this run is over: {summary['stopped_by']}", "It cannot be changed any more")
    if runtime and runtime != "virtual" and (summary or is_cut_off(folder)):
        return ConfigError(str(folder), "the server process of this run has ended", way_on(runtime, folder))
    remedy = "Name the folder of a run's files, while its server process lives; virtual runs cannot be steered"
    return ConfigError(str(folder), "no run is at work here", remedy)


def _header(folder: Path) -> dict[str, Any]:
    try:
        with (folder / JOURNAL).open("rb") as file:
            return read_header(folder / JOURNAL, file.readline())
    except (OSError, FedSyncError):
        return {}


def read_object(path: Path, *keys: str) -> dict[str, Any] | None:
    """Read a JSON object with these keys; None without the file, `ConfigError` for other content."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(str(path), f"not JSON: {error}", "Run it again") from error
    if not isinstance(value, dict) or not set(keys) <= value.keys():
        raise ConfigError(str(path), "not what a run writes", "Name the folder of a run, or run it again")
    return value


def read_summary(folder: Path) -> dict[str, Any] | None:
    return read_object(folder / SUMMARY, "silos", "strategy")


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key under which ``silo-2`` comes before ``silo-10``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]
