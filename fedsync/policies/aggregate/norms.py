"""How large the updates of a commit are."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedsync.core.spans import give_back, spans
from fedsync.core.transfer import Payload
from fedsync.core.wire import WireFormat


def norms_of(
    weights: Mapping[str, float], updates: Mapping[str, Payload], size: int, wire: WireFormat
) -> tuple[float, float]:
    """Squared norm of the updates' mean, and mean of their squared norms; sums in float64 without BLAS.

    Args:
        weights: coefficient of each update, by id; how large they are together does not matter.
        updates: as they came, by id.
        size: values of each.
        wire: how they travelled.
    """
    total, squares = sum(weights.values()), [0.0, 0.0]
    for start, stop in spans(size, 8):
        mean = np.zeros(stop - start)
        for update_id, weight in weights.items():
            update = wire.decode(updates[update_id], start, stop).astype(np.float64)
            squares[1] += weight / total * float(np.square(update).sum())
            mean += weight / total * update
        squares[0] += float(np.square(mean).sum())
        give_back(*updates.values())
    return squares[0], squares[1]
