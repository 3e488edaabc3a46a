"""Silos train alone when a run is over: real processes are killed in the middle of that."""

import json
from pathlib import Path

import pytest

from fedsync.common.errors import RunError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.observe.ledger import Ledger
from fedsync.ops.local import run_local
from tests.e2e.deployed import SMALL, TRAINER, children

SERVER = "flwr-serverapp"
SILOS = [{"name": "fast", "speed": 120.0}, {"name": "slow", "speed": 80.0}]
RUN = (
    "stop={rounds: 3}",
    "local={steps: 5, batch_size: 16}",
    SMALL,
    "evaluation={cross_site: {local: true, fine_tune: 10}}",
)


class _Killer:
    """Kills a trainer once silos train alone, and the server once one of them is two orders further."""

    def __init__(self, out: Path) -> None:
        self._journal = out / "journal.jsonl"
        self.killed: list[str] = []

    def follow(self, ledger: Ledger) -> None:
        text = self._journal.read_text()
        for word, sign in ((TRAINER, '"subject":"local"'), (SERVER, '"after":2')):
            if word not in self.killed and sign in text:
                children(word)[0].kill()
                self.killed.append(word)
                return


@pytest.mark.full
def test_what_silos_train_alone_survives_the_death_of_a_trainer_and_of_the_server(tmp_path: Path) -> None:
    config, cluster = StrategyConfig.load("fedavg", RUN), ClusterConfig.model_validate({"silos": SILOS})
    killer = _Killer(tmp_path)
    with pytest.raises(RunError, match="the ServerApp died"):
        run_local(config, cluster, tmp_path, listeners=[killer])
    assert killer.killed == [TRAINER, SERVER]
    summary = run_local(config, cluster, tmp_path, resume=True)
    assert summary["stopped_by"] == "3 rounds done"
    document = json.loads((tmp_path / "cross_site.json").read_text())
    expected = [(subject, silo) for subject in ("local", "tuned") for silo in ("fast", "slow")]
    assert [(each["subject"], each["silo"]) for each in document["models"]][-4:] == expected
    assert not document["missing"]
    alone = [each["samples"] for each in document["models"] if each["subject"] == "local"]
    assert alone == [3 * 5 * 16] * 2, "three orders, as in the run: what was done before the deaths counts once"
