"""NARX' forward pass and the gradient of its error, written from the paper.

Source: LB-BSP, section 3.2.2, Equation 4 and Figure 3: one hidden layer over the last two speeds, and the present and
the last two values of processor and memory use. The activation of the hidden layer is tanh here; the paper names none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def features(speeds: Sequence[float], drivers: Sequence[Sequence[float]], look_back: int = 2) -> list[float]:
    """Input of Equation 4: ``v[k-1] .. v[k-d]``, then for each driver ``c[k] .. c[k-d]``.

    Args:
        speeds: up to iteration k - 1.
        drivers: series up to iteration k.
    """
    row = [speeds[-lag] for lag in range(1, look_back + 1)]
    for series in drivers:
        row += [series[-1 - lag] for lag in range(look_back + 1)]
    return row


def forward(
    inputs: torch.Tensor,
    hidden: torch.Tensor,
    hidden_bias: torch.Tensor,
    out: torch.Tensor,
    out_bias: torch.Tensor,
    direct: torch.Tensor | None = None,
) -> torch.Tensor:
    """Predictions, shape [rows], of inputs, shape [rows, features]; ``hidden`` has shape [features, units].

    ``direct``, shape [features], is not in the paper: connections from the inputs to the output.
    """
    output = torch.tanh(inputs @ hidden + hidden_bias) @ out + out_bias
    return output if direct is None else output + inputs @ direct
