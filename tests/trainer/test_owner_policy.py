"""What a run asks for against what a silo's owner allows."""

from pathlib import Path
from typing import Any

import pytest

from fedsync.cipher.plan import EncryptionPlan
from fedsync.config.cluster import SiloConfig
from fedsync.config.run_spec import RunSpec
from fedsync.config.silo_start import SealConfig, SiloStartConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.errors import ConfigError
from fedsync.core.layout import Layout
from fedsync.trainer.key_lookup import KEYS
from fedsync.trainer.owner_policy import ALLOWED, OwnerPolicy, owner_environment
from fedsync.trainer.protocol import Identity
from fedsync.trainer.service import TrainerService

LAYOUT = Layout(("body.weight", "body.bias", "head.bias"), ((8, 4), (8,), (2,)))
SPEC = RunSpec.of(StrategyConfig.load("fedavg"), None, 3)


def plan(cipher: dict[str, Any]) -> EncryptionPlan | None:
    """Of a run that says this."""
    return RunSpec.model_validate({**SPEC.model_dump(), "cipher": cipher}).encryption_plan(LAYOUT)


SUITES: list[dict[str, Any]] = [{"kind": kind} for kind in ("pad", "bfv", "masked")]


@pytest.mark.parametrize("cipher", SUITES, ids=lambda cipher: cipher["kind"])
def test_every_suite_will_do_for_an_owner_who_says_nothing_more(cipher: dict[str, Any]) -> None:
    OwnerPolicy(seal=SealConfig()).check_seal(plan(cipher))


@pytest.mark.parametrize("cipher", SUITES, ids=lambda cipher: cipher["kind"])
def test_masks_that_are_demanded_must_be_there(cipher: dict[str, Any]) -> None:
    allowed = OwnerPolicy(seal=SealConfig(masks=True))
    if cipher["kind"] == "masked":
        allowed.check_seal(plan(cipher))
        return
    with pytest.raises(
        ConfigError, match=r"^cipher\.kind: .* has no masks.*Write cipher: \{kind: masked\}.*seal\.masks"
    ):
        allowed.check_seal(plan(cipher))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("only", "clear", "told"),
    [
        (["body.*"], [], "head.bias would"),
        (["*.weight"], [], "body.bias, head.bias would"),
        (["*.weight"], ["head.*"], "body.bias would"),
        (["*.weight"], ["*.bias"], None),
        (["*"], [], None),
        ([], [], None),
    ],
)
def test_what_travels_in_the_clear_must_be_named_by_the_owner(
    only: list[str], clear: list[str], told: str | None, masked: bool
) -> None:
    inner = {"kind": "bfv", "only": only}
    made = plan({"kind": "masked", "inner": inner} if masked else inner)
    allowed = OwnerPolicy(seal=SealConfig(clear=clear))
    if told is None:
        allowed.check_seal(made)
        return
    with pytest.raises(ConfigError, match=rf"^cipher\.only: {told} travel in the clear.*seal\.clear of silo\.yaml"):
        allowed.check_seal(made)


def test_metrics_that_are_to_be_sealed_must_be() -> None:
    allowed = OwnerPolicy(seal=SealConfig(metrics="sealed"))
    allowed.check_seal(plan({"kind": "bfv", "metrics": "sealed"}))
    with pytest.raises(ConfigError, match=r"^cipher\.metrics: .*Write metrics: sealed.*seal\.metrics"):
        allowed.check_seal(plan({"kind": "bfv"}))


@pytest.mark.parametrize("seal", [None, SealConfig()])
def test_a_silo_with_keys_refuses_a_run_in_the_clear(seal: SealConfig | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEYS, raising=False)
    OwnerPolicy().check_seal(None)
    monkeypatch.setenv(KEYS, "/k")
    with pytest.raises(ConfigError, match="in the clear, and this silo has keys"):
        OwnerPolicy(seal=seal).check_seal(None)


def test_emulated_silos_go_by_the_run_s_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOWED, raising=False)
    OwnerPolicy.here().check_seal(plan({"kind": "bfv", "only": ["*.bias"]}))
    assert OwnerPolicy.here().checked(SPEC) is SPEC


@pytest.mark.parametrize(
    ("more", "seal"),
    [
        ({}, None),
        ({"keys": "/k"}, SealConfig()),
        ({"keys": "/k", "seal": SealConfig(masks=True)}, SealConfig(masks=True)),
    ],
)
def test_what_the_file_says_arrives_at_the_trainer(
    more: dict[str, Any], seal: SealConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SiloStartConfig(name="a", server="localhost:1", insecure=True, state="/s", data=["/d"], **more)
    for name, value in owner_environment(config).items():
        monkeypatch.setenv(name, value)
    assert OwnerPolicy.here() == OwnerPolicy(seal=seal, data=["/d"])


# Files.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two folders, of which ``mine`` is allowed, and links from it."""
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data.npz").touch()
    (tmp_path / "mine" / "inside").symlink_to("data.npz")
    (tmp_path / "mine" / "outside").symlink_to(tmp_path / "theirs" / "data.npz")
    (tmp_path / "theirs" / "inside").symlink_to(tmp_path / "mine" / "data.npz")
    return tmp_path


def images(path: Path) -> dict[str, Any]:
    return {"kind": "images", "data": {"kind": "npz", "file": str(path)}, "partition": {"kind": "own"}}


def csv(*paths: Path) -> dict[str, Any]:
    return {"kind": "csv", "files": [str(path) for path in paths], "target": "y"}


def spec(task: dict[str, Any]) -> RunSpec:
    return RunSpec.model_validate({**SPEC.model_dump(), "task": task})


@pytest.mark.parametrize("path", ["mine/data.npz", "mine/inside", "theirs/inside", "mine/../mine/data.npz"])
def test_a_path_that_leads_below_an_allowed_folder_is_resolved(path: str, folder: Path) -> None:
    checked = OwnerPolicy(data=[str(folder / "none"), str(folder / "mine")]).checked(spec(images(folder / path)))
    assert checked.task.data.file == str(folder / "mine" / "data.npz")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "path", ["theirs/data.npz", "mine/outside", "mine/../theirs/data.npz", "mine-not", "nowhere", "/etc/passwd"]
)
@pytest.mark.parametrize("kind", ["images", "custom", "csv"])
def test_a_path_that_leads_elsewhere_is_refused(kind: str, path: str, folder: Path) -> None:
    own = folder / "mine" / "data.npz"
    task = {"images": images(folder / path), "csv": csv(own, folder / path)}
    task["custom"] = {"kind": "custom", "file": str(folder / path)}
    allowed = OwnerPolicy(data=[str(folder / "mine")])
    with pytest.raises(ConfigError, match=r"^task: .*not where this silo's owner allows .* to data in silo\.yaml"):
        allowed.checked(spec(task[kind]))


def test_no_folder_is_no_file_and_tasks_without_files_go_on(folder: Path) -> None:
    none = OwnerPolicy(data=[])
    assert none.checked(SPEC).task == SPEC.task
    with pytest.raises(ConfigError):
        none.checked(spec(images(folder / "mine" / "data.npz")))
    machine = SiloConfig(name="a", speed=1.0, trace=str(folder / "mine" / "data.npz"))
    with pytest.raises(ConfigError):
        none.checked(SPEC.model_copy(update={"emulate": [machine]}))


def test_a_trainer_runs_no_python_file_from_elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "theirs" / "task.py"
    file.write_text("from pathlib import Path\nPath(__file__).with_name('was-here').touch()\n")
    monkeypatch.setenv(ALLOWED, OwnerPolicy(data=[str(folder / "mine")]).model_dump_json())
    with pytest.raises(ConfigError, match=r"task\.py is not where"):
        TrainerService(Identity(spec({"kind": "custom", "file": str(file)}).dump(), 0, "a"))
    assert not (folder / "theirs" / "was-here").exists()
