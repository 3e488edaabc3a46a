"""Parsers of a Flower app's replies and of its ``pyproject.toml``."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fedsync.client.app import Scalar
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
"""Metric names for which larger is better; ``eval_``, ``test_`` or ``val_`` may precede the name."""

REPLY = "the app's reply"

_TESTED = ("eval_", "test_", "val_")
"""Prefixes of evaluation metrics, which keep them apart from training metrics."""

_MOST_METRICS = 24
"""Limit of metrics per reply; further metrics are dropped. Machine and silo add their own metrics."""


def declared(path: Path) -> dict[str, Scalar]:
    """Run configuration of an app's ``pyproject.toml``; nested tables become dotted names. `ConfigError` if invalid."""
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
    metrics = only(list(content.metric_records.values()), "metrics")
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)}


def sums_of(content: RecordDict, known: Container[str]) -> dict[str, tuple[float, ...]]:
    """Sums of statistics among a reply's metrics: lists of numbers whose key is in ``known``."""
    metrics = only(list(content.metric_records.values()), "metrics")
    return {key: tuple(map(float, each)) for key, each in metrics.items() if key in known and isinstance(each, list)}


def metrics_of(figures: Mapping[str, float]) -> dict[str, float]:
    """Metrics to send beside the loss: finite, within limits, with names changed to the characters a-z, 0-9 and _."""
    named = {
        re.sub(r"[^a-z0-9_]", "_", name.lower()): float(value)
        for name, value in figures.items()
        if name not in (EXAMPLES, *LOSSES) and -MAX_METRIC <= value <= MAX_METRIC
    }
    return {name: named[name] for name in list(named)[:_MOST_METRICS] if METRIC_NAME.fullmatch(name)}


def whole(samples: object, place: str) -> int:
    """Check a number of samples from user code; raises `ConfigError` if it is not whole, or out of range."""
    try:
        count = int(samples)  # type: ignore[call-overload]
        if count == samples and 0 <= count <= MAX_TEST_SAMPLES:
            return int(count)
    except (TypeError, ValueError, OverflowError):
        pass
    problem = f"{samples!r} is no number of samples"
    raise ConfigError(place, problem, f"Say a whole number, 0 to {MAX_TEST_SAMPLES:,}")


def evaluation_of(figures: Mapping[str, float]) -> Evaluation:
    """Convert an app's evaluation metrics to sums; 0 samples if it reports neither loss nor score, or no samples."""
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
    """Further evaluation metrics to send: finite, with an ``eval_`` prefix where no known prefix is present."""
    named = {re.sub(r"[^a-z0-9_]", "_", name.lower()): (float(mean), count) for name, (mean, count) in means.items()}
    named = {name if name.startswith(_TESTED) else f"{_TESTED[0]}{name}": pair for name, pair in named.items()}
    fine = [
        name
        for name, (mean, count) in named.items()
        if METRIC_NAME.fullmatch(name) and abs(mean) <= MAX_METRIC and count > 0
    ]
    return {name: named[name] for name in fine[:_MOST_METRICS]}
