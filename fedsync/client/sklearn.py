"""Linear estimators of scikit-learn as torch modules, whose weights FedSync can average; needs ``scikit-learn``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from sklearn.base import clone
from torch import nn

from fedsync.common.errors import ConfigError

_FITTED = ("coef_", "intercept_")
_STEPS = ("t_", "_standard_coef", "_standard_intercept", "_average_coef", "_average_intercept")
"""State of stochastic gradient descent after a fit, without which the next steps start from ``coef_``."""


class SklearnModel(nn.Module):
    """Linear estimator whose ``coef_`` and ``intercept_`` travel; both start at zero.

    Args:
        estimator: must continue from its ``coef_``: by ``partial_fit``, or by ``fit`` with ``warm_start=True``.
        features: number of columns of the data.
        classes: labels of a classifier, in any order; ``coef_`` has them sorted, as always in scikit-learn.

    Raises:
        ConfigError: the estimator is not linear, or each fit forgets the previous one.
    """

    def __init__(self, estimator: Any, features: int, classes: Sequence[Any] = ()) -> None:
        super().__init__()
        # A fit on one row per class reveals the shapes, the order of classes, and what predictions need besides.
        labels = classes if len(classes) else [1.0, 2.0]
        self._fitted = fitted = clone(estimator).fit(np.zeros((len(labels), features)), labels)
        for name in _FITTED:
            value = getattr(fitted, name, None)
            if not isinstance(value, np.ndarray | float):
                problem = f"{type(estimator).__name__} has no array {name}"
                raise ConfigError("SklearnModel", problem, "Use a linear estimator that fits an intercept")
            self.register_buffer(name, torch.zeros(np.shape(value), dtype=torch.float64))
        for name in _STEPS:
            vars(fitted).pop(name, None)
        warm = getattr(estimator, "warm_start", False) and getattr(estimator, "solver", "") != "liblinear"
        if not (warm or hasattr(estimator, "partial_fit")):
            problem = f"{type(estimator).__name__} starts each fit anew, and would ignore the global model"
            remedy = "Set warm_start=True (the solver liblinear ignores it), or use an estimator with partial_fit"
            raise ConfigError("SklearnModel", problem, remedy)

    @contextmanager
    def estimator(self) -> Iterator[Any]:
        """Return the estimator with the model's values, to fit, predict or score; the model then takes its values. The
        estimator is new each time: only ``coef_`` and ``intercept_`` persist between orders.
        """
        estimator = deepcopy(self._fitted)
        for name in _FITTED:
            setattr(estimator, name, getattr(self, name).cpu().numpy().copy())
        yield estimator
        classes, found = (vars(each).get("classes_", []) for each in (self._fitted, estimator))
        if not np.array_equal(found, classes):
            problem = f"a fit found the classes {list(found)}, but the model has {list(classes)}"
            raise ConfigError("SklearnModel, classes", problem, "Write the labels of the data, or use partial_fit")
        for name in _FITTED:
            getattr(self, name).copy_(torch.from_numpy(np.asarray(getattr(estimator, name))))
