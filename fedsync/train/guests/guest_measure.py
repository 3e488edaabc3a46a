"""Metrics of a silo's own evaluation: ``measure`` among the parameters of the function under ``@app.evaluate()``."""

from __future__ import annotations

from typing import Any

import torch

from fedsync.common.errors import ConfigError
from fedsync.evaluation.metrics.named import Wanted
from fedsync.tasks.metrics.measurement import Measuring, SumsByKey


class GuestMeasure:
    """Takes outputs and targets, batch by batch, and sums what the run wants.

    Args:
        wanted: what the run wants, of which the shipped metrics are measured.
        device: where sums are kept.
    """

    def __init__(self, wanted: Wanted, device: torch.device) -> None:
        self._measuring = Measuring(wanted.metrics(lambda: ()), device)
        self._found = self._measuring.begin()
        self._device = device
        self.samples = 0

    def __call__(self, outputs: Any, targets: Any, *, probabilities: bool = False) -> None:
        """Count a batch in.

        Args:
            outputs: tensors or arrays: a logit a class, or one for two classes; or what the metrics wanted are of.
            targets: what is true.
            probabilities: outputs are probabilities, as `predict_proba` gives them, [n, classes] or [n] of class 1.

        Raises:
            ConfigError: they do not fit each other; whether they fit the metrics is seen here or by `sums`.
        """
        given, truth = (torch.as_tensor(each).to(self._device) for each in (outputs, targets))
        if len(given) != len(truth):
            raise ConfigError("measure", f"{len(given)} outputs and {len(truth)} targets", "Give one of each a sample")
        if probabilities:
            given = torch.logit(given.double()) if given.ndim == 1 else torch.log(given.double())
        rows = torch.arange(self.samples, self.samples + len(given), device=self._device)
        self._found.add(self._measuring.of(given, truth, rows))
        self.samples += len(given)

    def sums(self) -> SumsByKey:
        """As they travel; nothing, where nothing was counted in."""
        return self._found.sums(self.samples) if self.samples else {}
