"""Privacy budgets as owners and operators see them: the plan before a run, the result after it, and the ledger."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from fedsync.common.errors import ConfigError, RunError
from fedsync.config.silo_start import SiloStartConfig
from fedsync.privacy.accounting import shown
from fedsync.privacy.release import Release
from fedsync.silo.owner.owner_policy import ALL_DATA, OwnerPolicy
from fedsync.silo.owner.privacy_guard import ledger_of
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


def ran(folder: Path, silos: Path, *settings: str, strategy: str = "private.yaml") -> tuple[str, dict[str, Any]]:
    """Output of a run of the example, and its summary."""
    sets = [word for each in settings for word in ("--set", each)]
    told = call("run", HEART / strategy, "--silos", silos, "--out", folder / "run", "--runtime", "virtual", *sets)
    return told, json.loads((folder / "run" / "summary.json").read_text())


@pytest.mark.slow
def test_a_plan_is_printed_and_a_run_goes_on_without_a_spent_silo(silos: Path, tmp_path: Path) -> None:
    privacy = "privacy={kind: dp-sgd, clip: 1.0, noise_multiplier: 2.0}"
    told, summary = ran(tmp_path, silos, privacy, "stop.rounds=3", "min_silos=3")
    assert "planned privacy loss of 3 rounds, in orders of 10 steps" in " ".join(told.split()) and "cleveland" in told
    (lost,) = summary["lost"]
    assert lost["silo"] == "cleveland" and "cleveland answers BUDGET" in lost["why"]
    assert "the order would exceed the privacy budget" in lost["why"]
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


def test_nothing_is_left_of_a_budget_whose_delta_allows_no_epsilon(short: Path) -> None:
    """The owner has lowered delta below what the accountant can bound after runs that spent more."""
    text = "name: a\nserver: localhost:1\ninsecure: true\nstate: state\nprivacy: {epsilon: 3, delta: %s}\n"
    (short / "silo.yaml").write_text(text % "1.0e-5")
    config = SiloStartConfig.load(short / "silo.yaml")
    Path(config.state).mkdir(mode=0o700)
    ledger = ledger_of(OwnerPolicy.of(config), ALL_DATA)
    ledger.enter("heart 0a1b", "a/1", {Release(0.1, 2.0): 40})
    (short / "silo.yaml").write_text(text % "1.0e-40")
    lines = [line.split() for line in call("silo", "privacy", "--silo", short / "silo.yaml").splitlines()]
    assert ["heart", "0a1b", "40", "2", "infinite"] in lines and ["left", "0.000"] in lines


TARGET = "privacy={kind: dp-sgd, clip: 1.0, target_epsilon: 1.0, delta: 1.0e-3, score_noise: 12}"
"""Scores alone cost more than cleveland has."""


@pytest.mark.slow
def test_a_silo_without_budget_at_the_start_is_refused_and_the_run_goes_on(silos: Path, tmp_path: Path) -> None:
    told, summary = ran(tmp_path, silos, TARGET, "stop.rounds=2", "min_silos=3")
    assert [each["silo"] for each in summary["lost"]] == ["cleveland"] and summary["rounds"] == 2
    (refused,) = [note for note in summary["notes"] if note.startswith("took no part")]
    assert "cleveland answers BUDGET" in refused and "no noise is enough for the plan to have epsilon 0.3" in refused
    assert "cleveland answers BUDGET" in " ".join(told.split())
    assert "cleveland" not in summary["privacy"]
    assert re.search(r"accuracy 0\.\d+ \(with noise\)", told)


@pytest.mark.slow
def test_a_run_without_enough_silos_with_budget_names_those_without(silos: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"needs 4 silos, and at most 3 .* can take part\. cleveland answers BUDGET"):
        ran(tmp_path, silos, TARGET, "stop.rounds=2")


@pytest.mark.slow
def test_a_run_s_end_tells_what_each_simulated_silo_has_spent(silos: Path, tmp_path: Path) -> None:
    """For cleveland against its budget, which the run's target exceeds; for others at the run's delta."""
    told, summary = ran(tmp_path, silos, "stop.rounds=2", "balancer={kind: fixed}")
    spent = summary["privacy"]
    assert list(spent) == ["cleveland", "hungarian", "switzerland", "va"]
    assert {name: each["budget"] for name, each in spent.items()} == {**dict.fromkeys(spent), "cleveland": 0.3}
    assert 0.29 < spent["cleveland"]["epsilon"] <= 0.3
    assert all(0.98 < spent[name]["epsilon"] <= 1.0 and spent[name]["delta"] == 1e-3 for name in list(spent)[1:])
    end = told[told.index("privacy spent") :]
    assert all(name in end and shown(each["epsilon"]) in end for name, each in spent.items())
    assert "protects nobody" in " ".join(end.split())


@pytest.mark.slow
def test_a_run_without_privacy_has_no_line_about_it(tmp_path: Path) -> None:
    _, summary = ran(tmp_path, HEART / "silos.yaml", "stop.rounds=1", strategy="strategy.yaml")
    assert "privacy" not in summary


def private(folder: Path, **changes: Any) -> Path:
    """The heart example with other sections."""
    said = yaml.safe_load((HEART / "private.yaml").read_text())
    said["task"]["files"] = [str(HEART / file) for file in said["task"]["files"]]
    (folder / "private.yaml").write_text(yaml.safe_dump({**said, "stop": {"rounds": 2}, **changes}))
    return folder / "private.yaml"


LOUD = {"kind": "dp-sgd", "clip": 1.0, "target_epsilon": 1.0, "delta": 1.0e-3}
SPENT = {"kind": "dp-sgd", "clip": 1.0, "noise_multiplier": 2.0}
PLANS = {
    "too little for one": (
        {**LOUD, "score_noise": 12},
        4,
        "no noise is enough at cleveland, and the run needs 4 silos",
    ),
    "too little for all": (
        {**LOUD, "score_noise": 1},
        1,
        "no noise is enough at cleveland, hungarian, switzerland, va",
    ),
    "spent on the way": (SPENT, 4, "the run exceeds the budget of cleveland, and 4 silos are needed to end"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("privacy", "least", "problem"), PLANS.values(), ids=PLANS)
def test_a_plan_without_enough_silos_is_no_valid_one(
    privacy: dict[str, Any], least: int, problem: str, silos: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=problem):
        call("validate", private(tmp_path, privacy=privacy, min_silos=least), "--silos", silos)


@pytest.mark.parametrize("plan", ["too little for one", "spent on the way"])
@pytest.mark.slow
def test_a_plan_that_some_silos_leave_is_valid_and_names_them(plan: str, silos: Path, tmp_path: Path) -> None:
    told = call("validate", private(tmp_path, privacy=PLANS[plan][0], min_silos=3), "--silos", silos)
    words = " ".join(told.split())
    assert re.search(r"Warning: (no noise is enough at|the run exceeds the budget of) cleveland\b", words)
    assert "no errors" in words and "hungarian" not in words.partition("Warning")[2]


@pytest.mark.slow
@pytest.mark.parametrize("members", [None, 3])
def test_sums_of_more_silos_than_are_left_open_no_version(members: int | None, silos: Path, tmp_path: Path) -> None:
    """Encrypted sums need as many silos as the run begins with, unless the strategy says how many."""
    cipher = {"kind": "bfv", "metrics": "plain", "members": members}
    file = private(tmp_path, privacy=SPENT, min_silos=members, cipher=cipher)
    if members is not None:
        assert "Warning: the budget has no room at cleveland" in call("validate", file, "--silos", silos)
        return
    with pytest.raises(ConfigError, match="the budget has no room at cleveland, and the run needs 4 silos to begin"):
        call("validate", file, "--silos", silos)


def test_an_owner_sees_budgets_where_neither_certificates_nor_keys_are(short: Path) -> None:
    (short / "silo.yaml").write_text(
        "name: a\nserver: localhost:1\nauthority: ca.crt\nnode_key: a.node\nkeys: keys\nstate: state\ndata: [.]\n"
        "privacy: {epsilon: 3, delta: 1.0e-5}\n"
    )
    assert "epsilon 3 at delta 1e-05" in call("silo", "privacy", "--silo", short / "silo.yaml")
    with pytest.raises(ConfigError, match=r"ca\.crt does not exist"):
        call("silo", "start", "--silo", short / "silo.yaml")
