"""What may still be expected of the silos of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedsync.core.views import SiloView

MAX_FAILURES = 3
"""Orders that every silo must fail in a row before the run is given up."""

MOST_FAILURES = 1000
"""The same while silos are away that have worked: with the rests between them, a week of real time."""


@dataclass(slots=True)
class FailurePolicy:
    """Who has worked, and what went wrong last.

    Args:
        proven: silos that have delivered an update; those that are away may come back.
        last_failure: of an order, or of what a silo said of itself.
    """

    proven: set[str] = field(default_factory=set)
    last_failure: str = ""

    def able(self, silos: Mapping[str, SiloView]) -> bool:
        """Whether a silo is here that does not fail all that it is asked."""
        return any(silo.failures < MAX_FAILURES for silo in silos.values())

    def hopeless(self, silos: Mapping[str, SiloView]) -> str | None:
        """Why the run should be given up, or None: because the silos here all fail, and no others are expected."""
        if not silos or self.able(silos) or any(silo.busy for silo in silos.values()):
            return None
        if min(silo.failures for silo in silos.values()) < MOST_FAILURES and not self.proven <= silos.keys():
            return None
        return f"every silo failed {MAX_FAILURES} orders in a row; the last: {self.last_failure}"
