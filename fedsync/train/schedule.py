"""How the learning rate goes within an order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Shape = Literal["constant", "cosine", "linear"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Begins anew with each order, and goes by the most steps that the order may have.

    Without a warm-up the rates are those of `torch.optim.lr_scheduler.CosineAnnealingLR` and ``LinearLR`` over that
    many steps.

    Args:
        shape: ``constant``, ``cosine`` or ``linear``.
        warmup: steps in which the rate climbs, by equal amounts, to the order's; at least 0.
        end: share of the order's rate to which it falls after the last step, 0..1.
    """

    shape: Shape
    warmup: int = 0
    end: float = 0.0

    def factor(self, step: int, steps: int) -> float:
        """Share of the order's rate in step number ``step``, from 0, of ``steps``; above 0, and at most 1."""
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        gone = (step - self.warmup) / max(1, steps - self.warmup)
        match self.shape:
            case "cosine":
                return self.end + (1 - self.end) * (1 + math.cos(math.pi * gone)) / 2
            case "linear":
                return 1 - (1 - self.end) * gone
            case "constant":
                return 1.0
