"""A checkpoint holds all that a coordinator has come to, and nothing that its policies say anyway."""

import hashlib
from dataclasses import fields

from fedsync.core.speed.fitting import CurveBook
from fedsync.core.speed.forecasts import Forecasts
from fedsync.core.speed.sizing import Adaptation
from fedsync.core.state import COORDINATOR, CoordinatorState, FailurePolicy
from fedsync.core.views import Roster
from fedsync.evaluation.metric_votes import Claims
from fedsync.evaluation.version_scores import Scores
from fedsync.server.checkpoints import FORMAT

PARTS: dict[str, type] = {
    "": CoordinatorState,
    "forecasts.": Forecasts,
    "forecasts._curves.": CurveBook,
    "adaptation.": Adaptation,
    "scores.": Scores,
    "claims.": Claims,
    "failures.": FailurePolicy,
}
GIVEN = {
    "forecasts.predictor",
    "forecasts.declared",
    "forecasts.fitter",
    "forecasts._curves.fitter",
    "adaptation.sizing",
    "scores.metrics",
    "scores.known",
    "extensions",  # each keeps its own, see `Extension.state`
}
FOLLOWS = {"silos._names"}


def test_no_attribute_is_forgotten() -> None:
    whole = {part.removesuffix(".") for part in PARTS} | {"silos"}
    changing = {f"{part}{field.name}" for part, kind in PARTS.items() for field in fields(kind)} - whole - GIVEN
    roster = {f"silos.{name}" for name in (*Roster.__slots__, "views")} - FOLLOWS
    assert set(COORDINATOR.values()) == changing | roster


def test_who_changes_the_names_raises_the_number_of_the_format() -> None:
    """Then an older checkpoint is refused in one sentence, and not in the middle of being read."""
    names = hashlib.sha256(" ".join(sorted(COORDINATOR)).encode()).hexdigest()
    assert (FORMAT, names[:16]) == (28, "269cbb0a0ba58bb7")
