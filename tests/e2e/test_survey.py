"""A survey on real processes, under masks, while a trainer is killed in the middle of it."""

import json
import threading
import time
from pathlib import Path

import pytest

from fedsync.common.locks import wait_until
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.evaluation.survey.findings import STATISTICS
from fedsync.observe.ledger import Ledger
from fedsync.ops.local import run_local
from fedsync.simulation.run import run_virtual
from tests.e2e.deployed import TRAINER, children

HEART = Path(__file__).parents[2] / "examples" / "heart"
SILOS = ClusterConfig.model_validate(
    {"silos": [{"name": name, "speed": 40.0} for name in ("cleveland", "hungarian", "switzerland", "va")]}
)
# 5 steps of 32 samples at 40 samples/s: a round of the survey takes 4 s, long enough to be hit in the middle.
QUICK = ["stop.rounds=1", "task.standardise=federated", "task.statistics={bins: 6}"]
MASKED = "cipher={kind: masked, inner: {kind: bfv, members: 3}}"


def kill_a_trainer(out: Path, killed: list[int]) -> None:
    """Once orders of the survey are in work, and before the first of them is done."""
    journal = out / "survey" / "journal.jsonl"
    if wait_until(lambda: journal.exists() and journal.read_text().count('"Dispatch"') >= len(SILOS.silos), 120, 0.05):
        time.sleep(1.0)
        assert '"UpdateArrived"' not in journal.read_text()
        victim = children(TRAINER)[0]
        victim.kill()
        killed.append(victim.pid)


@pytest.mark.full
def test_a_survey_survives_the_death_of_a_trainer_and_all_silos_found_the_same(tmp_path: Path) -> None:
    config = StrategyConfig.load(str(HEART / "strategy.yaml"), [*QUICK, MASKED])
    found: list[str] = []
    killed: list[int] = []

    class Look:
        def follow(self, ledger: Ledger) -> None:
            """What silos keep is gone at the end."""
            files = sorted((tmp_path / "local" / "state").glob(f"*/{STATISTICS}"))
            if len(files) == len(SILOS.silos) and not found:
                found.extend(file.read_text() for file in files)

    killer = threading.Thread(target=kill_a_trainer, args=(tmp_path / "local", killed), daemon=True)
    killer.start()
    summary = run_local(config, SILOS, tmp_path / "local", listeners=[Look()])
    killer.join()
    assert killed and summary["rounds"] == 1
    run_virtual(StrategyConfig.load(str(HEART / "strategy.yaml"), QUICK), SILOS, tmp_path / "virtual")
    expected = json.loads((tmp_path / "virtual" / STATISTICS).read_text())
    assert [json.loads(text) for text in found] == [expected] * len(SILOS.silos), "and as it is in the clear"
    assert expected["silos"] == len(SILOS.silos)
    assert not (tmp_path / "local" / STATISTICS).exists(), "the server has none"
