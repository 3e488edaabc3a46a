"""What a run asks for against what a silo's owner allows."""

import json
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsync.cipher.plan import EncryptionPlan
from fedsync.common.fence import ALLOWED, Fence
from fedsync.config.cluster import SiloConfig
from fedsync.config.presence import PresenceConfig
from fedsync.config.run_spec import RunSpec
from fedsync.config.silo_start import LimitsConfig, SealConfig, SiloStartConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.errors import ConfigError, LimitReached, OwnerRefusal
from fedsync.core.layout import Layout, as_vector
from fedsync.core.orders import WorkOrder, WorkReport
from fedsync.core.presence import Presence
from fedsync.train.local import Outcome
from fedsync.train.loop import Trainer
from fedsync.trainer import owner_policy
from fedsync.trainer.audit_chain import AuditPlace
from fedsync.trainer.key_lookup import KEYS
from fedsync.trainer.order_counts import OrderCounts
from fedsync.trainer.owner_policy import OwnerPolicy, owner_environment
from fedsync.trainer.protocol import (
    AskModel,
    Collect,
    Describe,
    Hello,
    Identity,
    InitialModel,
    Refusal,
    Refused,
    Train,
    exchange,
)
from fedsync.trainer.service import TrainerService

LAYOUT = Layout(("body.weight", "body.bias", "head.bias"), ((8, 4), (8,), (2,)))
SPEC = RunSpec.of(StrategyConfig.load("fedavg"), None, 3)


def plan(cipher: dict[str, Any]) -> EncryptionPlan | None:
    """Of a run that says this."""
    return RunSpec.model_validate({**SPEC.model_dump(), "cipher": cipher}).encryption_plan(LAYOUT)


TWO = {"members": 2}
SUITES: list[dict[str, Any]] = [
    {"kind": "pad", **TWO},
    {"kind": "bfv", **TWO},
    {"kind": "masked", "inner": {"kind": "bfv", **TWO}},
]


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
    inner = {"kind": "bfv", "only": only, **TWO}
    made = plan({"kind": "masked", "inner": inner} if masked else inner)
    allowed = OwnerPolicy(seal=SealConfig(clear=clear))
    if told is None:
        allowed.check_seal(made)
        return
    with pytest.raises(ConfigError, match=rf"^cipher\.only: {told} travel in the clear.*seal\.clear of silo\.yaml"):
        allowed.check_seal(made)


def test_metrics_that_are_to_be_sealed_must_be() -> None:
    allowed = OwnerPolicy(seal=SealConfig())
    allowed.check_seal(plan({"kind": "bfv", "metrics": "sealed", **TWO}))
    OwnerPolicy(seal=SealConfig(metrics="plain")).check_seal(plan({"kind": "bfv", "metrics": "plain", **TWO}))
    with pytest.raises(ConfigError, match=r"^cipher\.metrics: .*Write metrics: sealed.*seal\.metrics"):
        allowed.check_seal(plan({"kind": "bfv", "metrics": "plain", **TWO}))


def test_a_version_must_add_as_many_updates_as_the_owner_demands() -> None:
    with pytest.raises(OwnerRefusal, match=r"^cipher\.members: a version may add 1 updates.*demands 2.*members: 2"):
        OwnerPolicy(seal=SealConfig()).check_seal(plan({"kind": "bfv", "members": 1}))
    OwnerPolicy(seal=SealConfig(members=3)).check_seal(plan({"kind": "masked"}))  # masks take three
    OwnerPolicy(seal=SealConfig(members=1)).check_seal(plan({"kind": "bfv", "members": 1}))
    with pytest.raises(OwnerRefusal):
        OwnerPolicy(seal=SealConfig(members=3)).check_seal(plan({"kind": "bfv", **TWO}))


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
    never = sorted(["/s", *([more["keys"]] if "keys" in more else [])])
    assert OwnerPolicy.here() == OwnerPolicy(
        code_files=[],
        seal=seal,
        data=["/d"],
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
    )


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
    assert checked.task.data.file == str(folder / "mine" / "data.npz")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "path", ["theirs/data.npz", "mine/outside", "mine/../theirs/data.npz", "mine-not", "nowhere", "/etc/passwd"]
)
@pytest.mark.parametrize("kind", ["images", "custom", "csv"])
def test_a_path_that_leads_elsewhere_is_refused(kind: str, path: str, folder: Path) -> None:
    own = folder / "mine" / "data.npz"
    task = {"images": images(folder / path), "csv": csv(own, folder / path, own)}
    task["custom"] = {"kind": "custom", "file": str(folder / path)}
    allowed = OwnerPolicy(data=[str(folder / "mine")])
    with pytest.raises(ConfigError, match=r"^task: .*not where this silo's owner allows .* to data in silo\.yaml"):
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


def test_a_run_asks_for_data_by_the_name_that_each_owner_gave_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert found.data.file == str(own)  # type: ignore[union-attr]
    fence = Fence(tuple(config.paths))
    assert fence.open(own).read() == own.read_bytes()
    with pytest.raises(OwnerRefusal, match="not where"):
        fence.located(folder / "mine" / "beside.npz")
    with pytest.raises(OwnerRefusal, match=r"by the name 'test'.* data: \{test: PATH\} in silo\.yaml"):
        allowed.checked(spec({**by_name, "file": "data:test"}), 1)
    with pytest.raises(OwnerRefusal, match="by the name 'train'"):
        OwnerPolicy(data=[str(folder / "mine")]).checked(spec(by_name), 1)


def test_no_folder_is_no_file_and_tasks_without_files_go_on(folder: Path) -> None:
    none = OwnerPolicy(data=[])
    assert none.checked(SPEC, 1).task == SPEC.task
    with pytest.raises(ConfigError):
        none.checked(spec(images(folder / "mine" / "data.npz")), 1)
    machine = SiloConfig(name="a", speed=1.0, trace=str(folder / "mine" / "data.npz"))
    with pytest.raises(ConfigError):
        none.checked(SPEC.model_copy(update={"emulate": [machine]}), 1)


def test_a_trainer_runs_no_python_file_from_elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "theirs" / "task.py"
    file.write_text("from pathlib import Path\nPath(__file__).with_name('was-here').touch()\n")
    monkeypatch.setenv(ALLOWED, OwnerPolicy(data=[str(folder / "mine")]).model_dump_json())
    with pytest.raises(ConfigError, match=r"task\.py is not where"):
        TrainerService(Identity(spec({"kind": "custom", "file": str(file)}).dump(), 0, "a"))
    assert not (folder / "theirs" / "was-here").exists()


def test_a_silo_reads_no_file_and_is_no_other_machine_unless_its_owner_says_so(folder: Path) -> None:
    config = SiloStartConfig(name="a", server="localhost:1", insecure=True, state=str(folder / "s"))
    with pytest.raises(OwnerRefusal, match="not where this silo's owner allows"):
        OwnerPolicy.of(config).checked(spec(images(folder / "mine" / "data.npz")), 1)
    emulated = SPEC.model_copy(update={"emulate": [SiloConfig(name="b", speed=1.0)]})
    with pytest.raises(OwnerRefusal, match=r"^emulate: .*pretend to be other machines.*emulate: true"):
        OwnerPolicy.of(config).checked(emulated, 1)
    OwnerPolicy.of(config.model_copy(update={"emulate": True})).checked(emulated, 1)


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
    for name in (
        "keys/group.key",
        "certs/ca.crt",
        "certs/a.node",
        "silo.yaml",
        "state/x",
        "mine/link",
        "keys/../keys/x",
    ):
        with pytest.raises(OwnerRefusal):
            allowed.checked(spec(csv(*[folder / name] * 3)), 1)


# What orders may ask.


def order(
    serial: int = 1, batch_size: int = 8, max_steps: int = 2, *, evaluate: bool = False, **more: Any
) -> WorkOrder:
    return WorkOrder(f"a/{serial}", 0, serial, batch_size, max_steps, 0.1, 1, evaluate=evaluate, **more)


def limited(folder: Path, **limits: int) -> OwnerPolicy:
    return OwnerPolicy(limits=LimitsConfig(**limits), counts=str(folder / "orders.json"))


@pytest.mark.parametrize(
    ("asked", "limit"),
    [
        (order(batch_size=3), "batch_size: an order of 3, and this silo's owner allows 4"),
        (order(batch_size=4, max_steps=3), "samples: an order of 12, and this silo's owner allows 16"),
    ],
)
def test_an_order_that_is_too_small_is_refused_and_not_counted(asked: WorkOrder, limit: str, tmp_path: Path) -> None:
    owner = limited(tmp_path, batch_size=4, samples=16, orders_per_hour=1)
    with pytest.raises(LimitReached, match=limit):
        owner.begin(asked)
    owner.begin(order(batch_size=4, max_steps=4))


def test_orders_are_counted_over_runs_and_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1e9
    monkeypatch.setattr(time, "time", lambda: now_s)
    for serial in range(3):
        limited(tmp_path, orders_per_hour=3).begin(order(serial))  # a trainer of another run each
        now_s += 60
    with pytest.raises(LimitReached, match=r"3 orders within an hour.*limits\.orders_per_hour"):
        limited(tmp_path, orders_per_hour=3).begin(order())
    now_s -= 7200  # a clock that is set back gives no orders
    with pytest.raises(LimitReached):
        limited(tmp_path, orders_per_hour=3).begin(order())
    now_s += 7200 + 3600
    limited(tmp_path, orders_per_hour=3).begin(order())


def test_portions_of_large_limits_are_counted_before_they_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousandth of 5000 is 5: a trainer that ends after one order has counted five."""
    now_s = 1e9
    monkeypatch.setattr(time, "time", lambda: now_s)
    file, most = tmp_path / "orders.json", {"orders": 5000}

    def on_disk() -> int:
        return sum(json.loads(file.read_text())["orders"].values())

    first = OrderCounts(file, most)
    for counted in (5, 5, 5, 5, 5, 10):
        first.take("orders")
        assert on_disk() == counted
    now_s += 60
    first.take("orders")
    assert on_disk() == 15, "what is left of a minute is gone with it"
    file.write_text(json.dumps({"orders": {str(int(now_s // 60)): 4999}}))
    OrderCounts(file, most).take("orders")
    with pytest.raises(LimitReached):
        OrderCounts(file, most).take("orders")


def test_an_order_that_evaluates_counts_as_an_evaluation_too(tmp_path: Path) -> None:
    owner = limited(tmp_path, evaluations_per_hour=2)
    owner.begin(order(evaluate=True))
    owner.begin_evaluation()
    for asked in (owner.begin_evaluation, lambda: owner.begin(order(2, evaluate=True))):
        with pytest.raises(LimitReached, match="2 evaluations"):
            asked()
    owner.begin(order(2))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"orders": {"x": 1}}', '{"orders": {"1": "1"}}', '{"orders": 3}'])
def test_counts_that_are_damaged_are_not_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "orders.json").write_text(text)
    with pytest.raises(ConfigError, match="damaged: nobody knows how many"):
        OrderCounts(tmp_path / "orders.json", {"orders": 1}).take("orders")


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainerService:
    """Of a silo whose owner allows two orders an hour, of 12 samples at least."""
    allowed = limited(tmp_path, samples=12, orders_per_hour=2, evaluations_per_hour=1)
    monkeypatch.setenv(ALLOWED, allowed.model_dump_json())
    monkeypatch.delenv(KEYS, raising=False)
    return TrainerService(Identity(SPEC.dump(), 0, "a"))


def test_a_trainer_holds_to_the_limits(service: TrainerService) -> None:
    reply, model = exchange(service.ask, AskModel())
    assert isinstance(reply, InitialModel) and model is not None
    vector = as_vector(model, reply.layout, "a")

    def code(asked: WorkOrder) -> Refusal | None:
        answer, _ = exchange(service.ask, Train(asked), vector)
        return answer.code if isinstance(answer, Refused) else None

    assert code(order(1)) is None
    assert code(order(1)) is None, "the same again is no other order"
    assert code(order(2, batch_size=8, max_steps=1)) is Refusal.LIMIT, "too small"
    assert code(order(3, batch_size=4, max_steps=9, budget_s=1e-9)) is Refusal.LIMIT, "out of time after one step"
    assert code(order(4)) is Refusal.LIMIT, "the third"


def test_a_trainer_says_what_its_owner_demands_of_an_order(service: TrainerService) -> None:
    hello, _ = exchange(service.ask, Describe())
    assert isinstance(hello, Hello) and (hello.facts.least_batch, hello.facts.least_samples) == (1, 12)


def test_a_trainer_says_how_long_its_silo_is_there(
    service: TrainerService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Durations: a window from 22:00 to 06:00, at 05:00 and at 07:00. Other silos say nothing of it."""
    reply, model = exchange(service.ask, AskModel())
    assert isinstance(reply, InitialModel) and model is not None
    vector = as_vector(model, reply.layout, "a")
    hello, _ = exchange(service.ask, Describe())
    assert isinstance(hello, Hello) and hello.facts.presence is None
    window = PresenceConfig(begin="22:00", until="06:00", zone="UTC")
    monkeypatch.setenv(ALLOWED, OwnerPolicy(presence=window).model_dump_json())
    monkeypatch.setattr(owner_policy, "utc_now", lambda: datetime(2026, 1, 11, 5, tzinfo=UTC))
    nightly = TrainerService(Identity(SPEC.dump(), 0, "a"))
    hello, _ = exchange(nightly.ask, Describe())
    assert isinstance(hello, Hello) and hello.facts.presence == Presence(3600.0, 17 * 3600.0)
    done, _ = exchange(nightly.ask, Train(order(1)), vector)
    assert isinstance(done, WorkReport) and done.presence == Presence(3600.0, 17 * 3600.0)
    monkeypatch.setattr(owner_policy, "utc_now", lambda: datetime(2026, 1, 11, 7, tzinfo=UTC))
    again, _ = exchange(nightly.ask, Collect(order(1).update_id))
    assert isinstance(again, WorkReport) and again.presence == Presence(0.0, 15 * 3600.0), "as it is when it speaks"
    refused, _ = exchange(nightly.ask, Train(order(2)), vector)
    assert refused == Refused(Refusal.AWAY, refused.text if isinstance(refused, Refused) else "", 15 * 3600.0)


def test_an_order_that_is_halted_goes_on_until_enough_samples_are_in_it(service: TrainerService) -> None:
    reply, model = exchange(service.ask, AskModel())
    assert isinstance(reply, InitialModel) and model is not None
    exchange(service.ask, Train(order(1, batch_size=4, max_steps=10**6), 0.0), as_vector(model, reply.layout, "a"))
    report, _ = exchange(service.ask, Collect("a/1", None, halt=True))
    assert report.samples >= 12  # type: ignore[union-attr]
    assert np.isfinite(report.loss)  # type: ignore[union-attr]


def test_an_order_that_only_scores_ends_with_the_samples_that_the_owner_demands_and_changes_nothing(
    service: TrainerService, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Trainer.run

    def drifting(self: Trainer, *arguments: Any) -> Outcome:
        """As running means do, whatever the learning rate."""
        outcome = run(self, *arguments)
        return replace(outcome, update=outcome.update + np.float32(1))

    monkeypatch.setattr(Trainer, "run", drifting)
    reply, model = exchange(service.ask, AskModel())
    assert isinstance(reply, InitialModel) and model is not None
    asked = replace(order(1, batch_size=4, max_steps=10**6, evaluate=True), learning_rate=0.0)
    report, update = exchange(service.ask, Train(asked), as_vector(model, reply.layout, "a"))
    assert report.samples == 12 and report.evaluation is not None  # type: ignore[union-attr]
    assert update is not None and not as_vector(update, reply.layout, "a").any()


FLOORS: list[tuple[dict[str, Any], str, str]] = [
    ({"colluding": 2}, r"^cipher\.colluding: .*goes by 1 .*demands 2", "masked"),
    ({"quorum": 3}, r"^min_silos: .*goes by 2 .*demands 3", "bfv"),
    ({"members": 3}, r"^cipher\.members: .*demands 3", "bfv"),
    ({"work_ratio": 2.0}, r"^cipher\.work_ratio: .*may be 4 times.*allows 2", "masked"),
]


@pytest.mark.parametrize(("seal", "refused", "kind"), FLOORS, ids=[",".join(floor[0]) for floor in FLOORS])
def test_an_owner_s_floor_wins_over_what_the_server_says(seal: dict[str, Any], refused: str, kind: str) -> None:
    inner = {"kind": "bfv", **TWO}
    made = plan(inner if kind == "bfv" else {"kind": "masked", "inner": inner})
    OwnerPolicy(seal=SealConfig()).check_seal(made)
    with pytest.raises(OwnerRefusal, match=refused):
        OwnerPolicy(seal=SealConfig(**seal)).check_seal(made)


@pytest.mark.parametrize("survey", [False, True])
def test_an_owner_s_least_count_wins_over_the_run_s(survey: bool) -> None:
    said = {"kind": "csv", "files": ["a"], "target": "y", "statistics": {"least": 2}}
    task = {"kind": "survey", "of": said} if survey else said
    spec = RunSpec.model_validate({**SPEC.model_dump(), "task": task})
    allowed = OwnerPolicy(limits=LimitsConfig(statistics=2))
    allowed.checked(spec, 0)
    with pytest.raises(OwnerRefusal, match=r"^task\.statistics\.least: counts from 2 .*allows 5"):
        OwnerPolicy(limits=LimitsConfig()).checked(spec, 0)
