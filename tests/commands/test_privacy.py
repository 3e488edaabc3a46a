"""Privacy budgets as owners and operators see them: the plan before a run, the result after it, and the ledger."""

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from fedsync.config.silo_start import SiloStartConfig
from fedsync.privacy.accounting import shown
from fedsync.privacy.release import Release
from fedsync.silo.owner.privacy_ledger import PrivacyLedger
from tests.commands.call import call

HEART = Path(__file__).parents[2] / "examples" / "heart"


@pytest.fixture
def silos(tmp_path: Path) -> Path:
    """Four hospitals, of which the first may spend little."""
    path = tmp_path / "silos.yaml"
    speeds = {"cleveland": 800, "hungarian": 600, "switzerland": 200, "va": 400}
    lines = [f"  - {{name: {name}, speed: {speed}}}" for name, speed in speeds.items()]
    lines[0] = "  - {name: cleveland, speed: 800, privacy: {epsilon: 0.3, delta: 1.0e-3}}"
    path.write_text("\n".join(["silos:", *lines]) + "\n")
    return path


def test_a_plan_is_printed_and_a_run_goes_on_without_a_silo_that_has_spent_its_budget(
    silos: Path, tmp_path: Path
) -> None:
    privacy = "privacy={kind: dp-sgd, clip: 1.0, noise_multiplier: 2.0}"
    out = tmp_path / "run"
    arguments = [HEART / "private.yaml", "--silos", silos, "--out", out, "--runtime", "virtual"]
    told = call("run", *arguments, "--set", privacy, "--set", "stop.rounds=3", "--set", "min_silos=3")
    assert "planned privacy loss of 3 rounds of 10 steps" in told and "cleveland" in told
    summary = json.loads((out / "summary.json").read_text())
    (lost,) = summary["lost"]
    assert lost["silo"] == "cleveland" and "the order would exceed the privacy budget" in lost["why"]
    assert [silo["orders"] for silo in summary["silos"]] == [0, 3, 3, 3] and summary["rounds"] == 3


@pytest.fixture
def short() -> Iterator[Path]:
    """Folder of a silo, whose path may have sixty bytes."""
    with TemporaryDirectory() as folder:
        yield Path(folder)


def test_an_owner_sees_what_each_run_spent_and_what_is_left(short: Path) -> None:
    (short / "patients.csv").write_text("age,ill\n50,1\n")
    (short / "silo.yaml").write_text(
        "name: a\nserver: localhost:1\ninsecure: true\nstate: state\ndata: {patients: patients.csv}\n"
        "privacy: {patients: {epsilon: 3, delta: 1.0e-5}}\n"
    )
    config = SiloStartConfig.load(short / "silo.yaml")
    folder = Path(config.state) / "privacy"
    for name in ("patients", "forgotten"):
        ledger = PrivacyLedger(name, config.privacy["patients"], folder / f"{name}.jsonl")  # type: ignore[index]
        Path(config.state).mkdir(mode=0o700, exist_ok=True)
        ledger.enter("heart 0a1b", "a/1", {Release(0.1, 2.0): 40})
    told = call("silo", "privacy", "--silo", short / "silo.yaml")
    spent = shown(ledger.epsilon())
    assert "epsilon 3 at delta 1e-05" in told and "heart 0a1b" in told and spent in told
    assert f"{3 - float(shown(ledger.epsilon())):.3f}" in told  # rounded to the safe side
    assert "forgotten.jsonl has entries, and no budget in silo.yaml is of that name" in " ".join(told.split())
