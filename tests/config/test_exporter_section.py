"""The section that says where else a run's figures go."""

import pytest

from fedsync.common.errors import ConfigError
from fedsync.config.strategy import StrategyConfig


def test_it_is_optional_and_metrics_are_served_to_this_machine_only() -> None:
    assert StrategyConfig.load("lb-bsp").export is None
    export = StrategyConfig.load("lb-bsp", ["export={prometheus: {}}"]).export
    assert export is not None
    assert export.prometheus is not None
    assert export.prometheus.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("export={prometheus: {port: 70000}}", "65535"),
        ("export={tensorbord: x}", "Did you mean 'tensorboard'"),
        ("export={mlflow: 'https://me:secret@tracker'}", "MLFLOW_TRACKING_PASSWORD"),
    ],
)
def test_what_cannot_be_meant_is_refused(assignment: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        StrategyConfig.load("lb-bsp", [assignment])
