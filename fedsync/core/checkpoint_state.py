"""Names under which a checkpoint stores the attributes of mutable objects.

The table of names is the file format. After renaming an attribute, change the right-hand side, and old files stay
readable. State of policies (`Any` in the coordinator's state) is stored unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

Names = Mapping[str, str]
"""Name -> attribute path, with dots for nested attributes."""


def named(value: object, names: Names) -> dict[str, Any]:
    """Return the attributes of ``value`` by name. Not copied, so serialise them at once."""
    return {name: attrgetter(path)(value) for name, path in names.items()}


def fill(value: object, names: Names, saved: Mapping[str, Any]) -> None:
    for name, path in names.items():
        owner, _, attribute = path.rpartition(".")
        setattr(attrgetter(owner)(value) if owner else value, attribute, saved[name])


COORDINATOR: Names = {
    **{
        name: name
        for name in (
            *("version", "commits", "pending", "barrier", "found_caps", "issued", "leaders"),
            *("closing", "pending_evaluations", "questions_asked", "sums_ordered", "final_version", "awaiting"),
            *("halted", "alarms", "alarm_set", "stopped"),
            *("adaptation.state", "adaptation.version", "silos.views", "silos.idle", "silos.revision"),
            *("silos.news", "scores.best", "scores.since_best", "scores.settled", "passes.loss"),
            *("passes.change", "claims.said", "claims.believed", "claims.disputed", "failures.proven"),
        )
    },
    "forecasts.predictors": "forecasts._states",
    "forecasts.declared": "forecasts._declared",
    "forecasts.drivers": "forecasts._drivers",
    "forecasts.samples": "forecasts._samples",
    "forecasts.last": "forecasts._last",
    "forecasts.fits": "forecasts._curves._fits",
    "forecasts.overheads": "forecasts._curves._overheads",
    "adaptation.seconds": "adaptation._seconds",
    "adaptation.memory": "adaptation._memory",
    "silos.ranks": "silos._ranks",
    "silos.joined": "silos._joined",
    "silos.newest": "silos._news",
    "scores.open": "scores._open",
    "scores.done": "scores._done",
    "scores.newest": "scores._newest",
    "scores.rolling": "scores._rolling",
    "passes.since": "passes._since",
    "passes.unfinished": "passes._unfinished",
    "passes.attested": "passes._attested",
    "failures.last": "failures.last_failure",
}
"""Checkpointed attributes of `fedsync.core.state.CoordinatorState`."""
