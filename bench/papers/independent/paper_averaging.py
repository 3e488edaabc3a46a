"""Aggregation of updates, written from memory of the papers: FedBuff, FedAsync, FedNova and SCAFFOLD.

Sources, whose text was not at hand:
- Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation" (arXiv 2106.06639), Algorithm 1.
- Xie et al., "Asynchronous Federated Optimization" (arXiv 1903.03934), Algorithm 1 and section 5.2.
- Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization" (FedNova,
  arXiv 2007.07481), section 4.
- Karimireddy et al., "SCAFFOLD" (arXiv 1910.06378), Algorithm 1.

Staleness is the number of versions between an update's model and the model it is added to; 0 for a fresh update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def fedbuff(staleness: Sequence[int], server_rate: float = 1.0) -> list[float]:
    """Coefficient of each buffered update in the new model: ``eta_g / K * 1 / sqrt(1 + tau)``."""
    return [server_rate / len(staleness) / (1 + tau) ** 0.5 for tau in staleness]


def fedasync(staleness: int, alpha: float, kind: str, a: float = 0.5, b: int = 4) -> float:
    """Mixing rate ``alpha_t = alpha * s(t - tau)`` of ``x = (1 - alpha_t) x + alpha_t x_new``."""
    if kind == "constant":
        return alpha
    if kind == "polynomial":
        return alpha * (staleness + 1) ** -a
    return alpha if staleness <= b else alpha / (a * (staleness - b) + 1)  # hinge


def local_norm(steps: int, momentum: float = 0.0, decay: float = 0.0) -> float:
    """FedNova's ``||a_i||_1``: weights of the gradients of ``steps`` local steps, summed.

    Counted step by step, not by the paper's closed forms: the distance that a local model moves along a gradient of 1.
    The proximal term of FedProx adds ``mu (moved)`` to the gradient; ``decay = eta mu``.
    """
    moved = velocity = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1.0 - decay * moved
        moved += velocity
    return moved


def fedasync_model(
    start: Vector, moves: Sequence[Vector], bases: Sequence[int], rates: Sequence[float]
) -> list[Vector]:
    """Models of FedAsync's Algorithm 1: ``x_t = (1 - alpha_t) x_{t-1} + alpha_t x_new``.

    Args:
        moves: update of each arrival: ``x_new`` less the model of version ``bases[t]``.
        rates: ``alpha_t``.
    """
    models = [start]
    for move, base, rate in zip(moves, bases, rates, strict=True):
        models.append((1 - rate) * models[-1] + rate * (models[base] + move))
    return models


def fednova(shares: Sequence[float], norms: Sequence[float]) -> list[float]:
    """Coefficient of each update: ``tau_eff p_i / ||a_i||_1``, with ``tau_eff = sum p_i ||a_i||_1``."""
    tau_eff = sum(p * norm for p, norm in zip(shares, norms, strict=True))
    return [tau_eff * p / norm for p, norm in zip(shares, norms, strict=True)]


def scaffold(
    gradients: Sequence[Callable[[Vector], Vector]],
    start: Vector,
    steps: int,
    rate: float,
    server_rate: float,
    rounds: Sequence[Sequence[int]],
) -> tuple[list[Vector], Vector]:
    """Algorithm 1 with option II.

    Args:
        gradients: of the clients' objectives.
        rounds: the clients that take part in each round.

    Returns:
        The server's model after each round, and its control variate after the last.
    """
    model, control = start.copy(), np.zeros_like(start)
    own = [np.zeros_like(start) for _ in gradients]
    models = []
    for clients in rounds:
        moves, changes = [], []
        for client in clients:
            local = model.copy()
            for _ in range(steps):
                local = local - rate * (gradients[client](local) - own[client] + control)
            new = own[client] - control + (model - local) / (steps * rate)
            moves.append(local - model)
            changes.append(new - own[client])
            own[client] = new
        model = model + server_rate * np.mean(moves, axis=0)
        control = control + len(clients) / len(gradients) * np.mean(changes, axis=0)
        models.append(model)
    return models, control
