"""A whole run among registered nodes, some of which are not to take part."""

from pathlib import Path

import pytest

from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.flower.flower_strategy import FedSync
from fedsync.server.driver import Timeouts
from tests.e2e.deployed import SMALL
from tests.flower.grid import DirectGrid

pytestmark = pytest.mark.usefixtures("silos_here")

SHORT = [SMALL, "local.steps=1", "local.batch_size=8", "stop.rounds=1", "min_silos=2"]
CLUSTER = ClusterConfig.model_validate({"silos": [{"name": name, "speed": 1e6} for name in ("a", "b", "c")]})


@pytest.mark.parametrize(
    ("third", "silos", "asked", "logged"),
    [
        ("d", None, True, "registered as another's"),
        ("", None, False, "registered under no name"),
        ("c", "[a, b]", False, "'c' is not among the strategy's silos"),
    ],
)
def test_who_is_not_to_take_part_gets_no_order(
    third: str, silos: str | None, asked: bool, logged: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = StrategyConfig.load("fedavg", [*SHORT, *([] if silos is None else [f"silos={silos}"])])
    grid = DirectGrid(3)  # they say that they are a, b and c
    grid.names = {1: "a", 2: "b", 3: third}
    cluster = CLUSTER if silos is None else CLUSTER.model_copy(update={"silos": CLUSTER.silos[:2]})
    strategy = FedSync(config, cluster, out=tmp_path, timing=Timeouts(poll_s=0.001), registered=True)
    strategy.start(grid)
    assert strategy.run_summary is not None
    assert [silo["name"] for silo in strategy.run_summary["silos"]] == ["a", "b"]
    assert [kind for node, kind in grid.pushed if node == 3] == (["Describe"] if asked else [])
    assert caplog.text.count(logged) == 1
