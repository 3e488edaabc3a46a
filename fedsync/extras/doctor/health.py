"""Checks of the files that a supervisor writes in its state folder: health, runs, silos and audit log."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from shlex import quote

from fedsync.common.locks import held
from fedsync.config.silo_start import SiloStartConfig
from fedsync.extras.doctor.machine_checks import Check, guarded
from fedsync.ops.audit_check import check_audit
from fedsync.ops.audit_heads import takes_heads
from fedsync.ops.registration_loop import DONE, REVOKED, read_registered
from fedsync.ops.supervisor import FRESH_S, HEALTH_FILE, HEALTHY_S, LOCK_FILE
from fedsync.silo.owner.approvals import APPROVALS, Approvals
from fedsync.silo.owner.refusals import last_refusals
from fedsync.silo.protocol import STATE_FOLDER

KEEPER_LATE_S = 600.0
"""Maximum age of the watchdog's last check [s]: the interval is 2 s, and resuming a run takes up to four minutes."""

MOST_REFUSALS = 5

MANY_RESTARTS = 3
"""Number of restarts from which a process that has just been started is reported as failing."""

MANY_TRIES = 6
"""Number of deaths at one model version from which a run is reported as failing."""


def check_health(state: Path, now: datetime) -> Check:
    health = _health(state)
    if health is None or not _is_recent(health.get("at"), now, FRESH_S):
        last = _health(state, dead=True) or {}
        if last.get("state", "stopped") == "stopped":
            return Check("health", True, "not running")
        if health is not None:
            detail = f"it runs, but has not written {HEALTH_FILE} since {last.get('at')}"
            return Check("health", False, detail, "Free the disk, see disk above. If it has room, restart the process")
        detail = f"not running, although nobody stopped it; it was {last['state']} at {last.get('at')}"
        return Check("health", False, detail, f"See {state / 'logs'}, and start it again")
    detail = f"{health.get('state')} since {health.get('since')}, {health.get('restarts')} restarts"
    count = health.get("restarts")
    often = isinstance(count, int) and count >= MANY_RESTARTS and _is_recent(health.get("since"), now, HEALTHY_S)
    if health.get("state") == "restarting" or (often and health.get("last_error")):
        return Check("health", False, f"{detail}; {health.get('last_error')}", f"See {state / 'logs'}")
    for folder, trainer in _table(health, "trainers").items():
        if isinstance(trainer, dict) and trainer.get("state") == "silent":
            silent = f"the trainer in {folder} has not answered since {trainer.get('since')}"
            return Check("health", False, f"{detail}; {silent}", f"End its process, {trainer.get('pid')}")
    return Check("health", True, detail)


def check_registration(state: Path, now: datetime, names: Iterable[str] = ()) -> Check:
    """Check that the silos of a running server are registered; ``names`` are the silos in the current file."""
    health, name = _health(state), "registration"
    if health is None or not _is_recent(health.get("at"), now, FRESH_S):
        return Check(name, True, "see health" if is_running(state) else "not running")
    listed = set(names)
    silos = dict.fromkeys(listed, "not registered") | _table(health, "silos") | read_registered(state)
    silos = {silo: text for silo, text in sorted(silos.items()) if text != REVOKED or silo in listed}
    problems = {silo: text for silo, text in silos.items() if text != DONE}
    if problems:
        told = "; ".join(f"{silo}: {text}" for silo, text in problems.items())
        return Check(name, False, told, "Then run `fedsync server register`")
    return Check(name, True, ", ".join(silos) or "no silo is listed")


def check_runs(state: Path, now: datetime) -> Check:
    """Check that the watchdog of a running server works, and that no run dies repeatedly."""
    health, name = _health(state), "runs"
    if health is None or not _is_recent(health.get("at"), now, FRESH_S):
        return Check(name, True, "see health" if is_running(state) else "not running")
    keeper = _table(health, "keeper")
    if not _is_recent(keeper.get("looked") or health.get("since"), now, KEEPER_LATE_S):
        detail = f"the keeper looked at {keeper.get('looked')} for the last time"
        return Check(name, False, detail, "Restart `fedsync server start`, and report what it printed")
    runs = {folder: run for folder, run in _table(keeper, "runs").items() if isinstance(run, dict)}
    bad = [_trouble(folder, run) for folder, run in runs.items() if _is_in_trouble(run)]
    if bad:
        remedy = f"See {state / 'logs'}; `fedsync server stop DIR` ends a run, which can be resumed"
        return Check(name, False, "; ".join(bad), remedy)
    for folder, why in _table(keeper, "failed").items():
        remedy = f"See {folder}/run.log; `fedsync server run --resume {quote(folder)} --server server.yaml` resumes it"
        return Check(name, False, f"the last run failed: {folder}: {why}", remedy)
    if keeper.get("looked") is None:
        return Check(name, True, "not checked yet since the server started")
    return Check(name, True, f"{len(runs)} not over; looked at {keeper['looked']}")


def check_refusals(state: Path) -> Iterator[Check]:
    """List the newest refusals of the silo with reasons, of which the server received only the code."""
    for note in last_refusals(state / STATE_FOLDER)[-MOST_REFUSALS:]:
        often = f", {note.times} times" if note.times > 1 else ""
        yield Check("refused", True, f"{note.at} {note.code.name}{often}: {' '.join(note.reason.split())}")


def check_approvals(config: SiloStartConfig) -> Check:
    if config.approve != "ask":
        return Check("approvals", True, "runs are not asked about")
    waiting = Approvals(Path(config.state) / APPROVALS).waiting()
    if not waiting:
        return Check("approvals", True, "no run waits")
    detail = f"{len(waiting)} wait for you, the first since {waiting[0].since}"
    return Check("approvals", True, detail, "See `fedsync silo approve`")


@guarded("audit")
def check_audit_log(config: SiloStartConfig) -> Check:
    audit = check_audit(config)
    if audit.broken:
        remedy = "Find out who changed it; `fedsync silo audit` says more. To begin another, move it away"
        return Check("audit", False, audit.broken, remedy)
    elsewhere = config.audit.head_to
    if elsewhere is not None and not takes_heads(Path(elsewhere)):
        stops = "nothing leaves this silo until it is written" if config.audit.required else "no head is kept there"
        detail = f"the head of the log cannot be written to audit.head_to, {elsewhere}; {stops}"
        return Check("audit", False, detail, "Mount the folder, and let the silo's user write there")
    return Check("audit", True, "; ".join([f"{audit.lines} lines", *audit.notes]))


def is_running(state: Path) -> bool:
    """Whether a supervisor is at work, although a full disk may keep its health file from being written."""
    return (_health(state) or {}).get("state", "stopped") != "stopped"


def _is_in_trouble(run: dict[str, object]) -> bool:
    tries = run.get("tries")
    many = isinstance(tries, int) and tries >= MANY_TRIES
    return many or (run.get("next") is not None and str(run.get("reason")).startswith("not resumed"))


def _trouble(folder: str, run: dict[str, object]) -> str:
    due = f", next try at {run['next']}" if run.get("next") else ""
    return f"{folder}: {run.get('reason')}, tried {run.get('tries')} times{due}"


def _table(values: dict[str, object], key: str) -> dict[str, object]:
    found = values.get(key)
    return found if isinstance(found, dict) else {}


def _health(state: Path, *, dead: bool = False) -> dict[str, object] | None:
    """Health file of a running supervisor, or also of a dead one, whose last health file can still be recent."""
    try:
        found = json.loads((state / HEALTH_FILE).read_text(encoding="utf-8"))
        found = found if dead or held(state / LOCK_FILE) else None
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _is_recent(at: object, now: datetime, most_s: float) -> bool:
    try:
        return (now - datetime.fromisoformat(str(at))).total_seconds() < most_s
    except (ValueError, TypeError):
        return False
