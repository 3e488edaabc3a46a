"""What tests of the aggregator in the clear share."""

import numpy as np

from fedsync.model.broadcast_compression import HeldModel
from fedsync.model.layout import Vector
from fedsync.model.plain_aggregator import PlainAggregator


def vector(*values: float) -> Vector:
    return np.array(values, dtype=np.float32)


def delivered(store: PlainAggregator, silo: HeldModel, name: str, version: int) -> Vector:
    model = silo.receive(store.outgoing(name), version)
    store.holds(name, silo.version)
    return model
