"""Registration of the silos in a server's file, once its SuperLink listens."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from fedsync.common import foreign
from fedsync.common.backoff import Backoff
from fedsync.common.errors import ConfigError, RunError
from fedsync.common.files import OWNER_FILE, write_atomically
from fedsync.common.locks import taken
from fedsync.flower.registration import Registered

logger = foreign.logger(__name__)

ATTEMPTS = Backoff(0.5, 60.0)

PATIENCE_S = 120.0
"""Time without success before a warning [s]; the attempts continue."""

REGISTERED_FILE = "registered.json"
"""File in a server's state folder: `DONE`, `REVOKED` or the problem, by silo, from any process that registers silos."""

DONE, REVOKED = "registered", "revoked"


@dataclass(slots=True)
class RegistrationLoop:
    """Retry loop that runs until every silo is registered; ``told`` is the status of each silo.

    Each attempt reads the key files again, so an operator can correct them while the server runs. ``register`` raises
    `RunError` or `OSError` if the SuperLink does not answer.
    """

    silos: Sequence[str]
    register: Callable[[Sequence[str]], Registered]
    told: dict[str, str] = field(default_factory=dict)

    def watch(self, stop: threading.Event) -> None:
        if not self.silos:
            return
        attempts, waited_s, warned = 0, 0.0, False
        while not self.attempt() and not stop.wait(ATTEMPTS.pause_s(attempts)):
            waited_s += ATTEMPTS.pause_s(attempts)
            attempts += 1
            if waited_s >= PATIENCE_S and not warned:
                warned = True
                missing = {name: text for name, text in self.told.items() if text != DONE}
                logger.warning("not registered after %.0f s, and tried again every minute: %s", waited_s, missing)

    def attempt(self) -> bool:
        missing = [name for name in self.silos if self.told.get(name) != DONE]
        try:
            found = self.register(missing)
        except (RunError, OSError) as error:
            self.told = self.told | dict.fromkeys(missing, f"the SuperLink does not answer: {error}")
            return False
        except Exception as error:  # the thread must survive, or silos would stay unregistered
            logger.exception("silos could not be registered")
            self.told = self.told | dict.fromkeys(missing, f"{type(error).__name__}: {error}")
            return False
        for name, problem in found.problems.items():
            if self.told.get(name) != str(problem):
                logger.warning("%s is not registered: %s", name, problem)
        tell_what_else(found)
        self.told = self.told | {name: str(found.problems.get(name, DONE)) for name in missing}
        done = [name for name in missing if name not in found.problems]
        if done:
            logger.info("silos registered: %s", ", ".join(done))
        return not found.problems


def read_registered(state: Path) -> dict[str, str]:
    try:
        found = json.loads((state / REGISTERED_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(name): str(text) for name, text in found.items()} if isinstance(found, dict) else {}


def note_registered(state: Path, told: Mapping[str, str]) -> None:
    with taken(state / f"{REGISTERED_FILE}.lock", inf):
        now = {**read_registered(state), **told}
        try:
            write_atomically(state / REGISTERED_FILE, json.dumps(now, indent=2).encode(), OWNER_FILE)
        except ConfigError as error:  # the registration itself succeeded, despite the full disk
            logger.warning("%s", error)


def tell_what_else(found: Registered) -> None:
    """Log replaced keys and keys of uncertain status, which the operator should know."""
    for name, count in found.retired.items():
        logger.warning("%s has another key: the registration of %d before it was taken back", name, count)
    for name in found.unsure:
        logger.warning(
            "the SuperLink knew the key of %s before, and this version of flwr cannot say under which name, or whether "
            "it was revoked; if %s is turned away, it needs a fresh key",
            name,
            name,
        )
