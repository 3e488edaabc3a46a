"""Parsers of a Flower app's replies and ``pyproject.toml``, and the app's model: named arrays of any numeric type."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedsync.client.app import Scalar
from fedsync.common.errors import ConfigError
from fedsync.common.sandbox.path_sandbox import open_data
from fedsync.core.orders import Evaluation
from fedsync.core.report_checks import MAX_METRIC, MAX_TEST_SAMPLES, METRIC_NAME
from fedsync.model.layout import REAL_KINDS, Layout, Vector, as_type
from fedsync.model.tensor_parts import UNSAID, PartPatterns, TensorFacts, divide
from fedsync.train.module_parts import check_built, check_finite, frozen_digest
from fedsync.train.weights import rounded, say_rounded

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
        raise ConfigError(str(path), "it is not TOML", "Correct it") from error
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
    """Metrics to send beside the loss, as `sendable`, with names changed to the characters a-z, 0-9 and _."""
    others = sendable({name: value for name, value in figures.items() if name not in (EXAMPLES, *LOSSES)})
    named = {re.sub(r"[^a-z0-9_]", "_", name.lower()): float(value) for name, value in others.items()}
    return {name: value for name, value in named.items() if METRIC_NAME.fullmatch(name)}


def sendable(figures: Mapping[str, float]) -> dict[str, float]:
    """Metrics that the server accepts: finite and within its limits. A refused metric would cost the whole update."""
    finite = [name for name, value in figures.items() if -MAX_METRIC <= value <= MAX_METRIC]
    return {name: figures[name] for name in finite[:_MOST_METRICS]}


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
            raise ConfigError(f"{REPLY} to evaluate", f"{name} is {figures[name]}", "Correct the evaluation")
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


Arrays = Mapping[str, NDArray[np.generic]]


class NamedArrays:
    """Named arrays of a model, with conversion to and from the flat vector that travels.

    Not to be confused with `fedsync.train.weights.Weights`, which holds the tensors of a module in training. Whole
    numbers are rounded to the nearest when a vector is loaded.

    Args:
        run: model parts that the strategy file names.
        tied: for each tied name, the name that owns the array; the array of a tied name does not travel.
        gradients: whether a parameter has a gradient, by name; all names not listed are buffers.

    Raises `ConfigError` if there are no arrays, their type cannot travel, or ``run`` names unknown parts.
    """

    def __init__(
        self,
        arrays: Arrays,
        run: PartPatterns = UNSAID,
        tied: Mapping[str, str] | None = None,
        gradients: Mapping[str, bool] | None = None,
    ) -> None:
        odd = [f"{name} ({array.dtype})" for name, array in arrays.items() if array.dtype.kind not in REAL_KINDS]
        if odd or not arrays:
            problem = f"{', '.join(odd)}: no real numbers" if odd else "the model has no arrays"
            raise ConfigError("task.model", problem, "Give a model of real numbers")
        self._tied = tied or {}
        self._gradients = gradients or dict.fromkeys(arrays, True)
        places = {name: place for place, name in enumerate(arrays)}
        owners = {name: self._tied.get(name, name) for name in arrays}
        facts = {name: TensorFacts(places[owner], self._gradients.get(owner, True)) for name, owner in owners.items()}
        self.parts = divide(facts, run)
        self.layout = Layout.of({name: arrays[name] for name in self.parts.shared if name not in self._tied})
        self.ties: Mapping[str, str] = {name: self._tied[name] for name in self.parts.shared if name in self._tied}
        self.rounds = any(arrays[name].dtype == np.float16 for name in self.layout.names)
        tensors = {name: torch.from_numpy(np.asarray(arrays[name])) for name in self.layout.names}
        check_finite(tensors)
        say_rounded(rounded(tensors))
        self.arrays: Arrays = arrays
        self._first = arrays

    @classmethod
    def of_module(cls, module: nn.Module, run: PartPatterns = UNSAID) -> NamedArrays:
        """Build from a module's state dict; raises `ConfigError` as the constructor, or if NumPy lacks a type."""
        owners: dict[int, str] = {}
        tied: dict[str, str] = {}
        arrays = {}
        gradients: dict[str, bool] = {}
        check_built(module)
        for name, tensor in module.state_dict(keep_vars=True).items():
            if isinstance(tensor, nn.Parameter):
                gradients[name] = tensor.requires_grad
            owner = owners.setdefault(id(tensor), name)
            if owner != name:
                tied[name] = owner
            try:
                arrays[name] = tensor.detach().cpu().numpy().copy()
            except TypeError as error:
                problem = f"{name} is {tensor.dtype}, which Flower cannot carry"
                raise ConfigError("task.model", problem, "Use float32") from error
        return cls(arrays, run, tied, gradients)

    @property
    def frozen_digest(self) -> bytes:
        return frozen_digest((name, torch.from_numpy(self._first[name])) for name in self.parts.frozen)

    @property
    def private(self) -> Arrays:
        return {name: self.arrays[name] for name in self.parts.private}

    def restore(self, private: Arrays) -> None:
        self.arrays = {**self.arrays, **{name: private.get(name, self._first[name]) for name in self.parts.private}}

    def load(self, vector: Vector) -> None:
        """Set every array that travels, float32 [layout.size]; ValueError for a wrong length or non-finite value."""
        self.layout.check(vector)
        parts = self.layout.split(vector.copy())  # not the caller's memory
        new = {name: as_type(parts[self._tied.get(name, name)], self.arrays[name].dtype) for name in self.parts.shared}
        self.arrays = {**self.arrays, **new}

    def take(self, arrays: Arrays, place: str) -> None:
        """Set every array to its value after training; frozen arrays may be missing. Raises `ConfigError` if an array
        is missing, a shape differs, or training changed a frozen parameter.
        """
        frozen = frozenset(self.parts.frozen)
        taken: dict[str, NDArray[np.generic]] = {}
        for name, old in self.arrays.items():
            new = arrays.get(name)
            if name in frozen:
                # Frozen buffers, such as a running mean, may change without training.
                if new is not None and name in self._gradients and not np.array_equal(new, old):
                    problem = f"training changed {name}, which is frozen and does not travel"
                    remedy = "Build it with a gradient, or name it below model.share or model.private"
                    raise ConfigError(place, problem, remedy)
                continue
            if new is None:
                known = ", ".join(list(arrays)[:4])
                raise ConfigError(place, f"its arrays ({known}, ...) lack {name}", "Reply with the whole model")
            if new.shape != old.shape:
                raise ConfigError(place, f"{name} has the shape {new.shape}, not {old.shape}", "Reply with the model")
            taken[name] = new.astype(old.dtype, copy=False)
        self.arrays = {**self.arrays, **taken}

    def read(self) -> Vector:
        return self.layout.join(self.arrays)

    def state(self) -> Mapping[str, torch.Tensor]:
        return {name: torch.from_numpy(array.copy()) for name, array in self.arrays.items()}
