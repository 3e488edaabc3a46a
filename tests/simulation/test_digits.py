"""Real training in virtual time: the same seed gives the same bytes, and the journal holds all decisions."""

import hashlib
import json
from pathlib import Path

import pytest

from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.observe.ledger import Ledger
from fedsync.observe.replay import read_ledger, replay

pytest.importorskip("sklearn")


@pytest.mark.slow
def test_two_runs_of_digits_write_the_same_bytes_and_replay(tmp_path: Path) -> None:
    from fedsync.simulation.run import run_virtual

    config, cluster = StrategyConfig.load("lb-bsp", ["stop.rounds=3"]), ClusterConfig.load("hetero")
    summaries = [run_virtual(config, cluster, tmp_path / name) for name in ("one", "two")]
    for file in ("journal.jsonl", "rounds.jsonl", "summary.json", "config.yaml"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    assert summaries[0]["seconds"] == pytest.approx(3 * 3.2)
    first = 40 + 19 + 15 + 10  # two that are done by 3.2 s, and three that stop about then
    assert summaries[0]["samples"] == (first + 2 * 100) * 32, "balancing keeps the total"

    journal = tmp_path / "one" / "journal.jsonl"
    known = read_ledger(journal)
    ledger = Ledger(model_bytes=known.model_bytes, measured=known.measured)
    for entry in replay(journal):
        ledger.add(entry)
    figures = json.loads(json.dumps(ledger.summary()))
    written = json.loads((tmp_path / "one" / "summary.json").read_text())
    for name in ("best", "last"):
        file = (tmp_path / "one" / f"{name}.pt").read_bytes()
        assert hashlib.sha256(file).hexdigest() == written[name].pop("digest")
    assert figures == {name: written[name] for name in figures}, "the summary follows from the journal alone"
    assert written["accuracy"] > 0.1, "it has learnt something: ten classes"

    found = written["evaluation"]["test"]["last"]
    assert found["version"] == 3
    assert found["pooled"]["accuracy"]["value"] == written["accuracy"]
    name = next(iter(found["silos"]))
    assert found["pooled"].keys() == found["silos"][name].keys() == {"accuracy", "loss", "balanced_accuracy", "f1"}
    cell = found["silos"][name]["f1"]
    assert cell["low"] < cell["value"] < cell["high"] and sum(cell["support"].values()) == 360
    (*_, row) = (json.loads(line) for line in (tmp_path / "one" / "rounds.jsonl").read_text().splitlines())
    assert row["evaluation"]["pooled"] == {name: each["value"] for name, each in found["pooled"].items()}
    assert row["evaluation"]["silos"][name]["f1"] == cell["value"]
