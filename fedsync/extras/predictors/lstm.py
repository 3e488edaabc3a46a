"""Predictor with long short-term memory over the last speeds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedsync.extras.predictors.recurrent import Recurrent, Weights, finish
from fedsync.policies.schema import register

if TYPE_CHECKING:
    import torch


@register("lstm")
@dataclass(frozen=True, slots=True)
class LstmPredictor(Recurrent):
    """Network with long short-term memory over the last two speeds; a moving average before ``samples`` orders.

    Gates i, f, o and candidate g: ``c <- f c + i g``, ``h <- o tanh(c)``; see `Recurrent` for the rest.

    Source: LB-BSP, sections 3.2.2 and 5.4.1.
    """

    def cell(self) -> torch.nn.RNNBase:
        import torch

        return torch.nn.LSTM(1, self.hidden, batch_first=True)

    def output(self, weights: Weights, inputs: list[float]) -> float:
        read, keep = weights["cell.weight_ih_l0"][:, 0], weights["cell.weight_hh_l0"]
        bias = weights["cell.bias_ih_l0"] + weights["cell.bias_hh_l0"]
        size = self.hidden
        state, memory = np.zeros(size), np.zeros(size)
        for speed in inputs:
            gates = read * speed + bias + keep @ state
            # 1 / (1 + exp(-x)) without overflow; the third part, g, is a tanh of the gates themselves.
            open_ = 0.5 + 0.5 * np.tanh(0.5 * gates)
            memory = open_[size : 2 * size] * memory + open_[:size] * np.tanh(gates[2 * size : 3 * size])
            state = open_[3 * size :] * np.tanh(memory)
        return finish(weights, state)
