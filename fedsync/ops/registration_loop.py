"""Registers the silos of a server's file once its SuperLink listens, and tells how that went."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedsync.common import foreign
from fedsync.common.backoff import Backoff
from fedsync.common.errors import ConfigError, RunError
from fedsync.common.files import OWNER_FILE, write_atomically
from fedsync.common.locks import taken
from fedsync.flower.registration import Registered

logger = foreign.logger(__name__)

ATTEMPTS = Backoff(0.5, 60.0)
"""Pause before the next attempt."""

PATIENCE_S = 120.0
"""Time that a SuperLink is given before there is a warning [s]. The attempts go on."""

REGISTERED_FILE = "registered.json"
"""In a server's state folder: `DONE`, or what is in the way, by silo, whichever process registered it last."""

DONE = "registered"
"""What `RegistrationLoop.status` says of a silo that is."""


@dataclass(slots=True)
class RegistrationLoop:
    """Tries until every silo is registered.

    What cannot be registered as it is may be put right while the server runs: its file is read anew each time.

    Args:
        silos: their names.
        register: makes an attempt for some of them; `RunError` and `OSError` for a SuperLink that does not answer.
    """

    silos: Sequence[str]
    register: Callable[[Sequence[str]], Registered]
    _told: dict[str, str] = field(default_factory=dict)

    def watch(self, stop: threading.Event) -> None:
        """Try, with pauses that grow, until all is done or ``stop`` is set."""
        if not self.silos:
            return
        attempts, waited_s, warned = 0, 0.0, False
        while not self.attempt() and not stop.wait(ATTEMPTS.pause_s(attempts)):
            waited_s += ATTEMPTS.pause_s(attempts)
            attempts += 1
            if waited_s >= PATIENCE_S and not warned:
                warned = True
                missing = {name: text for name, text in self._told.items() if text != DONE}
                logger.warning("not registered after %.0f s, and tried again every minute: %s", waited_s, missing)

    def status(self) -> dict[str, str]:
        """For the health file: ``registered``, or what is in the way, by silo."""
        return self._told

    def attempt(self) -> bool:
        """Try once, for those that are not registered; returns whether all are."""
        missing = [name for name in self.silos if self._told.get(name) != DONE]
        try:
            found = self.register(missing)
        except (RunError, OSError) as error:
            self._told = self._told | dict.fromkeys(missing, f"the SuperLink does not answer: {error}")
            return False
        except Exception as error:  # a thread that ends without a word would leave silos outside
            logger.exception("silos could not be registered")
            self._told = self._told | dict.fromkeys(missing, f"{type(error).__name__}: {error}")
            return False
        for name, problem in found.problems.items():
            if self._told.get(name) != str(problem):
                logger.warning("%s is not registered: %s", name, problem)
        tell_what_else(found)
        self._told = self._told | {name: str(found.problems.get(name, DONE)) for name in missing}
        done = [name for name in missing if name not in found.problems]
        if done:
            logger.info("silos registered: %s", ", ".join(done))
        return not found.problems


def read_registered(state: Path) -> dict[str, str]:
    """The registrations that `note_registered` wrote; none where the file cannot be read."""
    try:
        found = json.loads((state / REGISTERED_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(name): str(text) for name, text in found.items()} if isinstance(found, dict) else {}


def note_registered(state: Path, told: Mapping[str, str | None]) -> None:
    """Put down what became of silos, for whoever looks at the server; None for one that is revoked."""
    with taken(state / f"{REGISTERED_FILE}.lock"):
        known: dict[str, str | None] = {**read_registered(state), **told}
        now = {name: text for name, text in known.items() if text is not None}
        try:
            write_atomically(state / REGISTERED_FILE, json.dumps(now, indent=2).encode(), OWNER_FILE)
        except ConfigError as error:  # a full disk does not undo what the SuperLink did
            logger.warning("%s", error)


def tell_what_else(found: Registered) -> None:
    """Log what an operator has to know beside problems."""
    for name, count in found.retired.items():
        logger.warning("%s has another key: the registration of %d before it was taken back", name, count)
    for name in found.unsure:
        logger.warning(
            "the SuperLink knew the key of %s before, and this version of flwr cannot say under which name, or whether "
            "it was revoked; if %s is turned away, it needs a fresh key",
            name,
            name,
        )
