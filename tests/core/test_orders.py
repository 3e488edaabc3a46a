"""Curves, orders, views, errors, and how values are built."""

import pickle

import pytest

from fedsync.common.errors import ConfigError, FedSyncError, PolicyError, ProtocolError
from fedsync.core.speed.curve import Curve


@pytest.mark.parametrize(
    ("curve", "batch", "seconds"),
    [
        (Curve(100.0), 50, 0.5),
        (Curve(100.0, launch_s=0.25), 50, 0.75),
        (Curve(100.0, launch_s=0.25, saturation=64), 50, 0.89),  # as long as 64
        (Curve(100.0, saturation=64), 65, 0.65),
    ],
)
def test_a_step_takes_launch_plus_samples_by_speed(curve: Curve, batch: int, seconds: float) -> None:
    assert curve.step_s(batch) == pytest.approx(seconds, rel=1e-15)


@pytest.mark.parametrize(
    "error", [ConfigError("here", "bad", "Fix it"), ProtocolError("a", "loss", "nan"), PolicyError("broke", ["e"])]
)
def test_errors_cross_processes(error: FedSyncError) -> None:
    """Ray and process pools pickle what a worker raises."""
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back), vars(back)) == (type(error), str(error), vars(error))
