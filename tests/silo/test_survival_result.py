"""``fedsync survival --silo``: a real silo reads the result of an encrypted run from its own copy of the sums."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedsync.cli import app
from fedsync.common.errors import ConfigError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.extras.survival.survival_results import result_here, result_of_run
from fedsync.flower.flower_strategy import FedSync
from fedsync.simulation.run import run_virtual
from tests.flower.cut_off_runs import TIMING, with_keys
from tests.flower.grid import DirectGrid, keep_state, silos_in_this_process

EXAMPLE = Path(__file__).parents[2] / "examples" / "survival"
SILOS = ClusterConfig.load(EXAMPLE / "silos.yaml")


@pytest.mark.slow
def test_silos_have_the_result_and_the_server_has_none(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = StrategyConfig.load(str(EXAMPLE / "analysis.yaml"), ["local.steps=1"])
    home, keys = tmp_path_factory.mktemp("e"), with_keys(config, tmp_path / "keys", monkeypatch, SILOS)
    with silos_in_this_process():
        keep_state(monkeypatch, lambda identity: home / f"s{identity.index}" / "state" / "0123456789abcdef")
        FedSync(config, SILOS, out=tmp_path / "run", timing=TIMING, keys=keys).start(DirectGrid(4))
    with pytest.raises(ConfigError, match="the silos have the result"):
        result_of_run(tmp_path / "run")

    file = home / "silo.yaml"
    rules = f"data: ['{EXAMPLE / 'data'}'], emulate: true"
    file.write_text(f"{{name: graz, server: 'localhost:1', insecure: true, state: s3, index: 3, {rules}}}")
    done = CliRunner().invoke(app, ["survival", "--silo", str(file), "--out", str(tmp_path / "found.json")])
    assert done.exception is None, done.exception
    run_virtual(config, SILOS, tmp_path / "virtual")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == result_here(file) == result_of_run(tmp_path / "virtual")
    assert found["cox"]["converged"] and found["silos"] == 4
    with pytest.raises(ConfigError, match="no encrypted run of survival analysis"):
        result_here(file, "another")
