"""Predictor with a plain recurrent network over the last speeds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedsync.extras.predictors.recurrent import Recurrent, Weights, finish
from fedsync.policies.schema import register

if TYPE_CHECKING:
    import torch


@register("rnn")
@dataclass(frozen=True, slots=True)
class RnnPredictor(Recurrent):
    """Plain recurrent network over the last two speeds; a moving average before ``samples`` orders.

    ``h <- tanh(W_x v + b_x + W_h h + b_h)``; see `Recurrent` for the rest.

    Source: LB-BSP, sections 3.2.2 and 5.4.1 (SimpleRNN).
    """

    def cell(self) -> torch.nn.RNNBase:
        import torch

        return torch.nn.RNN(1, self.hidden, batch_first=True)

    def output(self, weights: Weights, inputs: list[float]) -> float:
        read, keep = weights["cell.weight_ih_l0"][:, 0], weights["cell.weight_hh_l0"]
        bias = weights["cell.bias_ih_l0"] + weights["cell.bias_hh_l0"]
        state = np.tanh(read * inputs[0] + bias)
        for speed in inputs[1:]:
            state = np.tanh(read * speed + bias + keep @ state)
        return finish(weights, state)
