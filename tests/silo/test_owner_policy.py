"""What a run asks for against what a silo's owner allows."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from fedsync.cipher.plan import EncryptionPlan
from fedsync.common.errors import ConfigError, OwnerRefusal
from fedsync.common.sandbox.path_sandbox import ALLOWED, Fence
from fedsync.config.cluster import SiloConfig
from fedsync.config.run_spec import RunSpec
from fedsync.config.sections.privacy import BudgetConfig
from fedsync.config.silo_start import LimitsConfig, SealConfig, SiloStartConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.model.layout import Layout
from fedsync.silo.owner.audit_chain import AuditPlace
from fedsync.silo.owner.key_lookup import KEYS
from fedsync.silo.owner.owner_policy import OwnerPolicy, owner_environment

LAYOUT = Layout(("body.weight", "body.bias", "head.bias"), ((8, 4), (8,), (2,)))
SPEC = RunSpec.of(StrategyConfig.load("fedavg"), None, 3)


def plan(cipher: dict[str, Any]) -> EncryptionPlan | None:
    """Of a run that says this."""
    return RunSpec.model_validate({**SPEC.model_dump(), "cipher": cipher}).encryption_plan(LAYOUT)


TWO = {"members": 2}
BFV = {"kind": "bfv", **TWO}
PAD = {"kind": "pad", **TWO}
MASKED = {"kind": "masked", "inner": BFV}
NO_MASKS = r"^cipher\.kind: .* has no masks.*Write cipher: \{kind: masked\}.*seal\.masks"
DEMANDS: list[tuple[dict[str, Any], dict[str, Any], str | None]] = [
    # What the run says, what the owner says, and the refusal.
    *((cipher, {}, None) for cipher in (PAD, BFV, MASKED)),
    (PAD, {"masks": True}, NO_MASKS),
    (BFV, {"masks": True}, NO_MASKS),
    (MASKED, {"masks": True}, None),
    ({**BFV, "metrics": "sealed"}, {}, None),
    ({**BFV, "metrics": "plain"}, {}, r"^cipher\.metrics: .*Write metrics: sealed.*seal\.metrics"),
    ({**BFV, "metrics": "plain"}, {"metrics": "plain"}, None),
    ({**BFV, "members": 1}, {}, r"^cipher\.members: a version may add 1 updates.*demands 2.*members: 2"),
    ({**BFV, "members": 1}, {"members": 1}, None),
    ({"kind": "masked"}, {"members": 3}, None),  # masks take three
    # The owner's floors win over what the server says.
    (BFV, {"members": 3}, r"^cipher\.members: .*demands 3"),
    (BFV, {"quorum": 3}, r"^min_silos: .*assumes 2 .*demands 3"),
    (MASKED, {"colluding": 2}, r"^cipher\.colluding: .*assumes 1 .*demands 2"),
    (MASKED, {"work_ratio": 2.0}, r"^cipher\.work_ratio: .*may be 4 times.*allows 2"),
]


@pytest.mark.parametrize(("cipher", "seal", "refused"), DEMANDS)
def test_a_run_seals_as_its_owner_demands(cipher: dict[str, Any], seal: dict[str, Any], refused: str | None) -> None:
    with nullcontext() if refused is None else pytest.raises(OwnerRefusal, match=refused):
        OwnerPolicy(seal=SealConfig(**seal)).check_seal(plan(cipher))


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
def test_owners_name_what_is_in_the_clear(only: list[str], clear: list[str], told: str | None, masked: bool) -> None:
    inner = {"kind": "bfv", "only": only, **TWO}
    made = plan({"kind": "masked", "inner": inner} if masked else inner)
    refusal = rf"^cipher\.only: {told} travel in the clear.*seal\.clear of silo\.yaml"
    with nullcontext() if told is None else pytest.raises(ConfigError, match=refusal):
        OwnerPolicy(seal=SealConfig(clear=clear)).check_seal(made)


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
    assert OwnerPolicy.here().checked(SPEC, 1) is SPEC


BUDGET = BudgetConfig(epsilon=3.0, delta=1e-5)


@pytest.mark.parametrize(
    ("more", "seal"),
    [
        ({}, None),
        ({"keys": "/k"}, SealConfig()),
        ({"keys": "/k", "seal": SealConfig(masks=True)}, SealConfig(masks=True)),
        ({"hub_hosts": ["fed.example.org", "10.0.0.5"]}, None),
        ({"data": {"train": "/d"}, "privacy": {"train": BUDGET}}, None),
    ],
)
def test_what_the_file_says_arrives_at_the_trainer(
    more: dict[str, Any], seal: SealConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SiloStartConfig(name="a", server="localhost:1", insecure=True, state="/s", **{"data": ["/d"], **more})
    for name, value in owner_environment(config).items():
        monkeypatch.setenv(name, value)
    never = sorted(["/s", *([more["keys"]] if "keys" in more else [])])
    assert OwnerPolicy.here() == OwnerPolicy(
        code_files=[],
        seal=seal,
        data=["/d"],
        named=more.get("data", {}),
        never=never,
        limits=LimitsConfig(),
        counts="/s/orders.json",
        state_bytes=20_000_000_000,
        approvals=None,
        audit=AuditPlace("/s/audit", "localhost:1"),
        statistics="sealed",
        emulate=False,
        share_local=False,
        first_model=None,
        hub_hosts=more.get("hub_hosts", ["localhost"]),
        privacy=dict.fromkeys(more.get("privacy", {}), BUDGET),
        ledgers="/s/privacy",
        authority=None,
    )


def test_the_authority_of_the_owner_s_file_is_that_of_the_hub() -> None:
    config = SiloStartConfig(name="a", server="[::1]:1", authority="/ca.crt", node_key="/k", state="/s", data=["/d"])
    policy = OwnerPolicy.of(config)
    assert (policy.hub_hosts, policy.authority) == (["::1"], "/ca.crt")


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
    checked = OwnerPolicy(data=[str(folder / "none"), str(folder / "mine")]).checked(spec(images(folder / path)), 1)
    assert checked.task.source.file == str(folder / "mine" / "data.npz")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "path", ["theirs/data.npz", "mine/outside", "mine/../theirs/data.npz", "mine-not", "nowhere", "/etc/passwd"]
)
@pytest.mark.parametrize("kind", ["images", "custom", "csv"])
def test_a_path_that_leads_elsewhere_is_refused(kind: str, path: str, folder: Path) -> None:
    own = folder / "mine" / "data.npz"
    task = {"images": images(folder / path), "csv": csv(own, folder / path, own)}
    task["custom"] = {"kind": "custom", "file": str(folder / path)}
    allowed = OwnerPolicy(data=[str(folder / "mine")])
    with pytest.raises(
        ConfigError, match=r"^task: .*outside the folders that this silo's owner allows .* to data in silo\.yaml"
    ):
        allowed.checked(spec(task[kind]), 1)


def test_other_silos_files_are_none_of_this_silos(folder: Path) -> None:
    """Its owner need not allow them, and is not asked about them."""
    own, theirs = folder / "mine" / "data.npz", Path("/elsewhere/b.csv")
    allowed = OwnerPolicy(data=[str(folder / "mine")])
    for task in (csv(own, theirs, theirs), {"kind": "survey", "of": csv(own, theirs, theirs)}):
        found = allowed.checked(spec(task), 0).task
        assert str(own) in str(found) and str(theirs) not in str(found)
    with pytest.raises(ConfigError, match=r"task\.files: 2 files for 3 silos"):
        allowed.checked(spec(csv(own, theirs)), 0)


def test_a_run_asks_for_data_by_the_name_each_owner_gave(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsync.config.silo_start.LONGEST_STATE", 200)
    own = folder / "mine" / "data.npz"
    (folder / "mine" / "beside.npz").write_bytes(b"")
    written = {"name": "a", "server": "localhost:1", "insecure": True, "state": str(folder / "s")}
    (folder / "silo.yaml").write_text(json.dumps({**written, "data": {"train": "mine/data.npz"}}))
    config = SiloStartConfig.load(folder / "silo.yaml")
    allowed = OwnerPolicy.of(config)
    by_name = {"kind": "csv", "file": "data:train", "target": "y"}
    assert allowed.checked(spec(by_name), 1).task.file == str(own)  # type: ignore[union-attr]
    found = allowed.checked(spec(images(Path("data:train"))), 1).task
    assert found.source.file == str(own)  # type: ignore[union-attr]
    fence = Fence(tuple(config.paths))
    assert fence.open(own).read() == own.read_bytes()
    with pytest.raises(OwnerRefusal, match="outside the folders"):
        fence.located(folder / "mine" / "beside.npz")
    with pytest.raises(OwnerRefusal, match=r"by the name 'test'.* data: \{test: PATH\} in silo\.yaml"):
        allowed.checked(spec({**by_name, "file": "data:test"}), 1)
    with pytest.raises(OwnerRefusal, match="by the name 'train'"):
        OwnerPolicy(data=[str(folder / "mine")]).checked(spec(by_name), 1)


def test_a_silo_reads_no_file_and_is_no_other_machine_unless_its_owner_says_so(folder: Path) -> None:
    """Tasks without files go on, and machines whose speed is in no file."""
    config = SiloStartConfig(name="a", server="localhost:1", insecure=True, state=str(folder / "s"))
    strict, emulates = (OwnerPolicy.of(config.model_copy(update={"emulate": each})) for each in (False, True))
    plain, traced = (SiloConfig(name="b", speed=1.0, trace=each) for each in (None, str(folder / "mine" / "data.npz")))
    assert strict.checked(SPEC, 1).task == SPEC.task
    with pytest.raises(OwnerRefusal, match="outside the folders that this silo's owner allows"):
        strict.checked(spec(images(folder / "mine" / "data.npz")), 1)
    with pytest.raises(OwnerRefusal, match=r"^emulate: .*emulate other machines.*emulate: true"):
        strict.checked(SPEC.model_copy(update={"emulate": [plain]}), 1)
    emulates.checked(SPEC.model_copy(update={"emulate": [plain]}), 1)
    with pytest.raises(OwnerRefusal, match="outside the folders"):
        emulates.checked(SPEC.model_copy(update={"emulate": [traced]}), 1)


def test_keys_stay_closed_where_data_names_the_folder_above_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("keys", "state", "certs"):
        (folder / name).mkdir()
    for name in ("keys/group.key", "certs/ca.crt", "certs/a.node"):
        (folder / name).write_text("secret")
    (folder / "silo.yaml").write_text(
        "{name: a, server: 'localhost:1', authority: certs/ca.crt, node_key: certs/a.node, state: state, "
        "keys: keys, data: [.]}"
    )
    monkeypatch.setattr("fedsync.config.silo_start.LONGEST_STATE", 200)
    config = SiloStartConfig.load(folder / "silo.yaml")
    allowed = OwnerPolicy.of(config)
    allowed.checked(spec(images(folder / "mine" / "data.npz")), 1)
    (folder / "mine" / "link").symlink_to(folder / "keys" / "group.key")
    closed = "keys/group.key certs/ca.crt certs/a.node silo.yaml state/x mine/link keys/../keys/x"
    for name in closed.split():
        with pytest.raises(OwnerRefusal):
            allowed.checked(spec(csv(*[folder / name] * 3)), 1)


@pytest.mark.parametrize("survey", [False, True])
def test_an_owner_s_least_count_wins_over_the_run_s(survey: bool) -> None:
    said = {"kind": "csv", "files": ["a"], "target": "y", "statistics": {"least": 2}}
    task = {"kind": "survey", "of": said} if survey else said
    spec = RunSpec.model_validate({**SPEC.model_dump(), "task": task})
    allowed = OwnerPolicy(limits=LimitsConfig(statistics=2))
    allowed.checked(spec, 0)
    with pytest.raises(OwnerRefusal, match=r"^task\.statistics\.least: counts from 2 .*allows 5"):
        OwnerPolicy(limits=LimitsConfig()).checked(spec, 0)
