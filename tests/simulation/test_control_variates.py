"""SCAFFOLD in virtual time, with real training and real keys: the run's variate is the mean of the silos'."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.model.layout import Vector
from fedsync.observe.replay import read_ledger
from fedsync.silo.session import own_variate
from fedsync.silo.session.own_variate import StepControl
from fedsync.simulation import run as runs
from fedsync.simulation.run import run_virtual
from tests.e2e.deployed import SMALL

SPEEDS = {"a": 90, "b": 70, "c": 40}
SETS = [
    SMALL,
    *("local={steps: 6, batch_size: 8, learning_rate: 0.1}", "aggregation={kind: fednova, weight: examples}"),
    *("server_optimizer={kind: scaffold}", "stop={rounds: 8}"),
]


class Seen:
    """Silos and aggregator of the last run."""

    silos: dict[str, StepControl]
    aggregator: Any


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found, final = Seen(), runs.final_model
    found.silos = {}

    def control(silo: str, *given: Any) -> StepControl:
        found.silos[silo] = StepControl(silo, *given)
        return found.silos[silo]

    def ended(aggregator, replicas):  # type: ignore[no-untyped-def]
        found.aggregator = aggregator
        return final(aggregator, replicas)

    monkeypatch.setattr(own_variate, "StepControl", control)
    monkeypatch.setattr(runs, "final_model", ended)
    return found


def run(out: Path, *overrides: str, **machine: Any) -> None:
    """LB-BSP; ``machine`` is said of all machines."""
    silos = [{"name": name, "speed": speed, **machine} for name, speed in SPEEDS.items()]
    config = StrategyConfig.load("lb-bsp", [*SETS, *overrides])
    run_virtual(config, ClusterConfig.model_validate({"silos": silos}), out)


def apart(seen: Seen) -> tuple[float, Vector]:
    """How far the run's variate is from the mean of the silos', to the length of theirs; and the run's."""
    sealed = not hasattr(seen.aggregator, "model")
    weighted, lengths = [], []
    for name, silo in seen.silos.items():
        replica: Any = silo._replica
        if sealed:
            m, total = replica.control, replica._state.moments.powers[0]
            counted = replica.counted(name)
        else:
            m, total = seen.aggregator._moments.vectors[0], seen.aggregator._moments.powers[0]
            counted = seen.aggregator._counted[name]
        own = silo._variate.settled(counted).own.astype(np.float64)
        weighted.append((1 if total == len(SPEEDS) else replica._examples) * own)
        lengths.append(np.linalg.norm(own))
    return float(np.linalg.norm(sum(weighted) / total - m) / max(lengths)), m


MANY = {
    "plain": [],
    "lost and late": ["barrier={kind: quorum, share: 0.6, late: drop, inner: {kind: bsp}}"],
    "unequal steps": ["barrier={kind: a-bsp}", "balancer={kind: fixed}"],
    "by lot": ["barrier={kind: fraction, share: 0.5, least: 2, inner: {kind: bsp}}"],
    "equal weights": ["aggregation.weight=silo", "server_optimizer.rate=0.5"],
    "bfv": ["cipher={kind: bfv}"],
    "eight bits": ["cipher={kind: pad, bits: 8}", "barrier={kind: a-bsp}", "balancer={kind: fixed}"],
    "masked": ["cipher={kind: masked}"],
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MANY)
def test_the_run_s_variate_is_the_mean_of_the_silos(case: str, tmp_path: Path, seen: Seen, caplog: Any) -> None:
    """Whatever rounding takes of an update, whoever loses one, comes late or sits out."""
    shaky = {"jitter": 0.8, "crashes": {"mtbf_s": 6.0, "repair_s": 0.5}} if case == "lost and late" else {}
    run(tmp_path, *MANY[case], **shaky)
    far, control = apart(seen)
    assert far < 1e-5
    assert np.linalg.norm(control) > 0
    assert "is lost" not in caplog.text
    rounds = read_ledger(tmp_path / "journal.jsonl").rounds
    absent = {name for row in rounds for name in SPEEDS if name not in row.silos}
    assert (len(absent) > 1) == (case in ("lost and late", "by lot"))


@pytest.mark.slow
def test_encrypted_it_takes_silos_where_it_takes_them_in_the_clear(tmp_path: Path, seen: Seen) -> None:
    """Apart by what rounding loses, which is far less than control variates bring; and all silos have the same bits."""
    models, three_rounds = {}, ("task={kind: digits}", "stop={rounds: 3}")
    for case, sets in {"plain": [], "without": ["server_optimizer=null"]}.items():
        run(tmp_path / case, *three_rounds, *sets)
        models[case] = seen.aggregator.model
    run(tmp_path / "sealed", *three_rounds, "cipher={kind: bfv}")
    replicas: list[Any] = [silo._replica for silo in seen.silos.values()]
    states = [replica._state for replica in replicas]
    assert len({state.digest for state in states}) == 1 and len(states) == 3
    assert states[0].counted == dict.fromkeys(SPEEDS, 3)
    off = np.abs(states[0].model - models["plain"]).mean()
    assert off < 0.05 * np.abs(models["plain"] - models["without"]).mean()
