"""Metrics in a silo's own evaluation code: the ``measure`` argument of the function under ``@app.evaluate()``."""

from __future__ import annotations

from typing import Any

import torch

from fedsync.common.errors import ConfigError
from fedsync.evaluation.metrics.named import Wanted
from fedsync.tasks.metrics.measurement import Measuring, SumsByKey


class GuestMeasure:
    """Accumulator of a run's metrics over batches; only metrics shipped with FedSync are measured."""

    def __init__(self, wanted: Wanted, device: torch.device) -> None:
        self._measuring = Measuring(wanted.metrics(lambda: ()), device)
        self._found = self._measuring.begin()
        self._device = device
        self.samples = 0

    def __call__(self, outputs: Any, targets: Any, *, probabilities: bool = False) -> None:
        """Add a batch.

        Args:
            outputs: tensors or arrays [n, ...]: logits per class, a single logit for two classes, or the values
                that the run's metrics need.
            targets: true values [n, ...].
            probabilities: outputs are probabilities as from `predict_proba`, [n, classes] or [n] of class 1.

        Raises:
            ConfigError: the lengths differ. A mismatch with the metrics is raised here or by `sums`.
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
        """Return the sums by metric key; empty if no batch was added."""
        return self._found.sums(self.samples) if self.samples else {}
