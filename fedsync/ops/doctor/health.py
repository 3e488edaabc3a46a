"""What the supervisor that works in a state folder says of itself, of its runs and of its silos."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path

from fedsync.config.silo_start import SiloStartConfig
from fedsync.ops.audit_check import check_audit
from fedsync.ops.doctor.machine_checks import Check, guarded
from fedsync.ops.registration_loop import DONE, read_registered
from fedsync.ops.supervisor_loop import FRESH_S, HEALTH_FILE
from fedsync.silo.owner.approvals import APPROVALS, Approvals
from fedsync.silo.owner.refusals import last_refusals
from fedsync.silo.protocol import STATE_FOLDER

KEEPER_LATE_S = 600.0
"""The run watchdog looks every other second; a run that is just being resumed takes it four minutes at most [s]."""

MOST_REFUSALS = 5
"""Refusals that are shown, the last ones."""

MANY_TRIES = 6
"""A run that has died as often as this at one version of its model will hardly get on by itself."""


def check_health(state: Path, now: datetime) -> Check:
    """What the supervisor that works in the state folder says, if there is one."""
    health = _health(state)
    if health is None or not _is_recent(health.get("at"), now, FRESH_S):
        return Check("health", True, "not running")
    detail = f"{health.get('state')} since {health.get('since')}, {health.get('restarts')} restarts"
    if health.get("state") == "restarting":
        return Check("health", False, f"{detail}; {health.get('last_error')}", f"See {state / 'logs'}")
    for folder, trainer in _table(health, "trainers").items():
        if isinstance(trainer, dict) and trainer.get("state") == "silent":
            silent = f"the trainer in {folder} has not answered since {trainer.get('since')}"
            return Check("health", False, f"{detail}; {silent}", f"End its process, {trainer.get('pid')}")
    return Check("health", True, detail)


def check_registration(state: Path, now: datetime, names: Iterable[str] = ()) -> Check:
    """That the silos of the server's file are registered, if it runs; ``names`` are those that the file lists now."""
    health, name = _health(state), "registration"
    if health is None or not is_running(state, now):
        return Check(name, True, "not running")
    silos = dict.fromkeys(names, "not registered") | _table(health, "silos") | read_registered(state)
    problems = {silo: text for silo, text in silos.items() if text != DONE}
    if problems:
        told = "; ".join(f"{silo}: {text}" for silo, text in problems.items())
        return Check(name, False, told, "Then run `fedsync server register`")
    return Check(name, True, ", ".join(silos) or "no silo is listed")


def check_runs(state: Path, now: datetime) -> Check:
    """That the run watchdog looks after them, and that none dies again and again, if the server runs."""
    health, name = _health(state), "runs"
    if health is None or not is_running(state, now):
        return Check(name, True, "not running")
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
        remedy = f"See {folder}/run.log; `fedsync server run --resume {folder}` goes on with it"
        return Check(name, False, f"the last run failed: {folder}: {why}", remedy)
    return Check(name, True, f"{len(runs)} not over; looked at {keeper.get('looked')}")


def check_refusals(state: Path) -> Iterator[Check]:
    """What the silo refused last, and why; the server was told the code and nothing else."""
    for note in last_refusals(state / STATE_FOLDER)[-MOST_REFUSALS:]:
        often = f", {note.times} times" if note.times > 1 else ""
        yield Check("refused", True, f"{note.at} {note.code.name}{often}: {' '.join(note.reason.split())}")


def check_approvals(config: SiloStartConfig) -> Check:
    """Whether runs wait for the owner."""
    if config.approve != "ask":
        return Check("approvals", True, "runs are not asked about")
    waiting = Approvals(Path(config.state) / APPROVALS).waiting()
    if not waiting:
        return Check("approvals", True, "no run waits")
    detail = f"{len(waiting)} wait for you, the first since {waiting[0].since}"
    return Check("approvals", True, detail, "See `fedsync silo approve`")


def check_audit_log(config: SiloStartConfig) -> Check:
    """That the audit log is what was written."""

    def found() -> Check:
        audit = check_audit(config)
        if audit.broken:
            remedy = "Find out who changed it; `fedsync silo audit` says more. To begin another, move it away"
            return Check("audit", False, audit.broken, remedy)
        elsewhere = config.audit.head_to
        if elsewhere is not None and not (Path(elsewhere).is_dir() and os.access(elsewhere, os.W_OK)):
            stops = "nothing leaves this silo until it is written" if config.audit.required else "no head is kept there"
            detail = f"the head of the log cannot be written to audit.head_to, {elsewhere}; {stops}"
            return Check("audit", False, detail, "Mount the folder, and let the silo's user write there")
        return Check("audit", True, "; ".join([f"{audit.lines} lines", *audit.notes]))

    return guarded("audit", found)


def is_running(state: Path, now: datetime) -> bool:
    """Whether a supervisor is at work in a state folder."""
    health = _health(state)
    return health is not None and _is_recent(health.get("at"), now, FRESH_S) and health.get("state") != "stopped"


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


def _health(state: Path) -> dict[str, object] | None:
    try:
        found = json.loads((state / HEALTH_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _is_recent(at: object, now: datetime, most_s: float) -> bool:
    try:
        return (now - datetime.fromisoformat(str(at))).total_seconds() < most_s
    except (ValueError, TypeError):
        return False
