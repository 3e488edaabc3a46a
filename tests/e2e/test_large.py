"""Large models on real processes: they go over the hub as files."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.observe.ledger import Ledger
from fedsync.ops.local import run_local
from fedsync.simulation.run import run_virtual

SETTINGS = [
    "task={kind: mlp, data: {kind: digits28}, hidden: [200]}",
    "stop.rounds=3",
    "local={steps: 2, batch_size: 16, threads: 1}",
]
SILOS = {"silos": [{"name": "a", "speed": 1e5}, {"name": "b", "speed": 1e5}]}


@pytest.mark.full
def test_a_large_model_goes_as_a_file_and_is_the_same_as_in_virtual_time(tmp_path: Path) -> None:
    out, seen = tmp_path / "real", set()

    class Watch:
        def follow(self, ledger: Ledger) -> None:
            seen.update(path.name for path in (out / "state").glob("*/*.parcel"))

    config, cluster = StrategyConfig.load("fedavg", SETTINGS), ClusterConfig.model_validate(SILOS)
    summary = run_local(config, cluster, out, listeners=[Watch()])
    assert summary["rounds"] == 3 and len(seen) >= 2, "each version is a file at the silos"
    run_virtual(config, cluster, tmp_path / "virtual")
    real, virtual = (torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("real", "virtual"))
    for name, values in real.items():
        # Updates are added in the order in which they come.
        np.testing.assert_allclose(values, virtual[name], rtol=1e-5, atol=1e-6)
