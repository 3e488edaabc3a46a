"""What a strategy exports is written by the process that runs the strategy."""

from pathlib import Path

from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.flower.flower_strategy import FedSync
from fedsync.server.timeouts import Timeouts
from tests.e2e.deployed import SMALL
from tests.flower.grid import DirectGrid, silos_in_this_process

SHORT = [SMALL, "local.steps=1", "local.batch_size=8", "stop.rounds=2", "export={csv: true}"]


def test_the_server_writes_the_tables(tmp_path: Path) -> None:
    cluster = ClusterConfig.model_validate({"silos": [{"name": name, "speed": 1e6} for name in ("a", "b")]})
    timing = Timeouts(poll_s=0.001, order_timeout_s=20, join_timeout_s=60)
    with silos_in_this_process():
        FedSync(StrategyConfig.load("fedavg", SHORT), cluster, out=tmp_path, timing=timing).start(DirectGrid(2))
    assert [row.split(",")[0] for row in (tmp_path / "rounds.csv").read_text().splitlines()[1:]] == ["1", "2"]
    assert len((tmp_path / "rounds-silos.csv").read_text().splitlines()) == 1 + 2 * 2
    metrics = (tmp_path / "rounds-metrics.csv").read_text().splitlines()[1:]
    assert [row.rpartition(",")[0] for row in metrics][:3] == [f"1,{name},peak_memory_bytes" for name in ("", "a", "b")]
