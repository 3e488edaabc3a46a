"""What a Flower app says: in its replies, and in its ``pyproject.toml``."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fedsync.client.silo_facts import Scalar
from fedsync.common.errors import ConfigError
from fedsync.common.sandbox.path_sandbox import open_data
from fedsync.core.orders import Evaluation
from fedsync.core.report_checks import MAX_METRIC, MAX_TEST_SAMPLES, METRIC_NAME

if TYPE_CHECKING:
    from flwr.app import RecordDict

T = TypeVar("T")

EXAMPLES = "num-examples"
LOSSES = ("train_loss", "loss")
_TEST_LOSSES = ("eval_loss", "test_loss", "val_loss", "loss")
_SCORES = ("acc", "accuracy", "f1", "auc", "dice", "iou", "r2", "score")
"""Figures of which more is better, as apps call them; ``eval_``, ``test_`` or ``val_`` may stand before one."""

REPLY = "the app's reply"

_TESTED = ("eval_", "test_", "val_")
"""What stands before a figure of an evaluation, so that none of training has its name."""

_MOST_METRICS = 24
"""Of a reply; the rest stays here. Machine and silo have some of their own."""


def declared(path: Path) -> dict[str, Scalar]:
    """What an app's ``pyproject.toml`` says of its run configuration; tables in it become names with dots.

    Raises:
        ConfigError: it is no TOML.
    """
    if not path.is_file():
        return {}
    try:
        with open_data(path) as source:
            table = tomllib.load(source)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), "it is no TOML", "Mend it") from error
    for key in ("tool", "flwr", "app", "config"):
        table = table.get(key, {})
    return dict(_flat(table, ""))


def _flat(table: Mapping[str, Any], above: str) -> Iterator[tuple[str, Scalar]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def only(records: Sequence[T], kind: str) -> T:
    if len(records) != 1:
        raise ConfigError(REPLY, f"it has {len(records)} records of {kind}", "Reply with one")
    return records[0]


def figures_of(content: RecordDict) -> dict[str, float]:
    """The single numbers among a reply's metrics."""
    metrics = only(list(content.metric_records.values()), "metrics")
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)}


def sums_of(content: RecordDict, known: Container[str]) -> dict[str, tuple[float, ...]]:
    """Sums of statistics among a reply's metrics: lists of numbers by their keys, of which the run wants the known."""
    metrics = only(list(content.metric_records.values()), "metrics")
    return {key: tuple(map(float, each)) for key, each in metrics.items() if key in known and isinstance(each, list)}


def metrics_of(figures: Mapping[str, float]) -> dict[str, float]:
    """Those that travel beside the loss, under names that other programs take; what is not finite does not."""
    named = {
        re.sub(r"[^a-z0-9_]", "_", name.lower()): float(value)
        for name, value in figures.items()
        if name not in (EXAMPLES, *LOSSES) and -MAX_METRIC <= value <= MAX_METRIC
    }
    return {name: named[name] for name in list(named)[:_MOST_METRICS] if METRIC_NAME.fullmatch(name)}


def whole(samples: object, place: str) -> int:
    """A number of samples that code of a silo's own tells.

    Raises:
        ConfigError: it is not whole, or out of range.
    """
    try:
        count = int(samples)  # type: ignore[call-overload]
        if count == samples and 0 <= count <= MAX_TEST_SAMPLES:
            return int(count)
    except (TypeError, ValueError, OverflowError):
        pass
    problem = f"{samples!r} is no number of samples"
    raise ConfigError(place, problem, f"Say a whole number, 0 to {MAX_TEST_SAMPLES:,}")


def evaluation_of(figures: Mapping[str, float]) -> Evaluation:
    """Sums of what an app's evaluation says; of nothing, where it tells no loss and no score, or had no samples."""
    if EXAMPLES not in figures:
        raise ConfigError(f"{REPLY} to evaluate", f"its metrics lack {EXAMPLES}", "Say how many samples there were")
    samples = whole(figures[EXAMPLES], f"{REPLY} to evaluate, {EXAMPLES}")
    loss = next((name for name in _TEST_LOSSES if name in figures), None)
    known = {re.sub("^(eval|test|val)_", "", name): name for name in figures}
    score = next((known[name] for name in _SCORES if name in known), None)
    others = {name: (value, samples) for name, value in figures.items() if name not in (EXAMPLES, loss, score)}
    if not samples or (loss is None and score is None):
        return Evaluation(None, None, 0, tested(others))
    for name in (loss, score):
        if name is not None and not math.isfinite(figures[name]):
            raise ConfigError(f"{REPLY} to evaluate", f"{name} is {figures[name]}", "Mend the evaluation")
    lost, scored = (samples * figures[name] if name is not None else None for name in (loss, score))
    return Evaluation(lost, scored, samples, tested(others))


def tested(means: Mapping[str, tuple[float, int]]) -> dict[str, tuple[float, int]]:
    """Other figures of an evaluation, under names that other programs take; what is not finite stays here."""
    named = {re.sub(r"[^a-z0-9_]", "_", name.lower()): (float(mean), count) for name, (mean, count) in means.items()}
    named = {name if name.startswith(_TESTED) else f"{_TESTED[0]}{name}": pair for name, pair in named.items()}
    fine = [
        name
        for name, (mean, count) in named.items()
        if METRIC_NAME.fullmatch(name) and abs(mean) <= MAX_METRIC and count > 0
    ]
    return {name: named[name] for name in fine[:_MOST_METRICS]}
