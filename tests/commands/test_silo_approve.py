"""``fedsync silo approve``: an owner reads what a run asks for, and says yes or no."""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from fedsync.common.errors import ConfigError, OwnerRefusal
from fedsync.config.run_spec import RunSpec
from fedsync.config.silo_start import SiloStartConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.ops.approval_summary import summary
from fedsync.silo.owner.approvals import APPROVALS, Approvals, AskedRun, AwaitsApproval
from fedsync.silo.owner.audit_chain import AUDIT, AuditReader
from fedsync.silo.protocol import Identity
from tests.commands.call import call

OVERRIDES = [
    "stop.rounds=5",
    "cipher={kind: bfv, members: 2}",
    "silos=[berlin, paris]",
    "local.steps=7",
    "model={share: [a]}",
]


@pytest.fixture
def silo() -> Iterator[Path]:
    """A silo's file, in a folder of a short name."""
    with TemporaryDirectory() as name:
        yield made(Path(name))


def made(folder: Path) -> Path:
    (folder / "data").mkdir()
    (folder / "data" / "task.py").write_text("pass")
    said = {"name": "berlin", "server": "fl.example.org:9092", "insecure": True, "state": "state", "data": ["data"]}
    (folder / "silo.yaml").write_text(json.dumps({**said, "approve": "ask"}))
    (folder / "state").mkdir(mode=0o700)
    return folder / "silo.yaml"


def asked(folder: Path, **changes: str) -> Identity:
    spec = RunSpec.of(StrategyConfig.load("fedavg", OVERRIDES), None, 2).model_copy(update={"run": "run-1"})
    task = {"kind": "custom", "file": str(folder / "data" / "task.py"), "options": {"a": 1}}
    dumped = {**spec.model_dump(mode="json"), "task": task, **changes}
    return Identity(RunSpec.model_validate(dumped).dump(), 0, "berlin", run_config='{"rate": 1}')


def wait(silo: Path, identity: Identity) -> str:
    approvals = Approvals(silo.parent / "state" / APPROVALS)
    with pytest.raises(AwaitsApproval):
        approvals.check(identity)
    return approvals.waiting()[-1].digest


def test_the_owner_sees_what_the_run_asks_for_and_confirms_it(silo: Path) -> None:
    assert call("silo", "approve", "--silo", silo) == "no run waits\n"
    plain = wait(silo, asked(silo.parent))
    task = silo.parent.resolve() / "data" / "task.py"
    code = {str(task): hashlib.sha256(task.read_bytes()).hexdigest()}
    digest = f"{plain}+{hashlib.sha256(json.dumps(code).encode()).hexdigest()}"
    told = call("silo", "approve", "--silo", silo)
    with pytest.raises(ConfigError, match="not the digest of the run with its current code"):
        call("silo", "approve", "--silo", silo, plain)
    for part in (
        f"run {digest}", code[str(task)],
        "fl.example.org:9092, without TLS", '"run-1"', '"kind": "custom"', "data/task.py", "SHA-256",
        "FedSync's, as installed here",
        '"kind": "bfv"', '"members": 2', "7 steps of", '"rounds": 5', '"berlin", "paris"',
        '{"share": ["a"]}', '{\\"rate\\": 1}', '"orders_per_hour": 36000',
    ):  # fmt: skip
        assert part in told, part
    done = call("silo", "approve", "--silo", silo, digest)
    assert "7 steps of" in done and done.endswith(f"approved {digest}\n")
    Approvals(silo.parent / "state" / APPROVALS).check(asked(silo.parent))
    assert call("silo", "approve", "--silo", silo) == f"approved {plain}\n"
    decided = list(AuditReader(silo.parent / "state" / AUDIT).lines())
    found = [(line["kind"], line["run"], line["spec"], line["said"]) for line in decided]
    assert found == [("decided", "run-1", plain, "approved")], "the log says which run the digest names"
    assert decided[0]["code"] == digest.partition("+")[2]
    task.write_text("pass  # otherwise")
    assert "its code has changed since" in call("silo", "approve", "--silo", silo)


def test_a_run_is_refused(silo: Path) -> None:
    digest = wait(silo, asked(silo.parent))
    with pytest.raises(ConfigError, match="no run is named"):
        call("silo", "approve", "--silo", silo, "--refuse")
    assert call("silo", "approve", "--silo", silo, "--refuse", digest).endswith(f"refused {digest}\n")
    with pytest.raises(OwnerRefusal, match="has refused"):
        Approvals(silo.parent / "state" / APPROVALS).check(asked(silo.parent))


def test_a_run_whose_code_cannot_be_confirmed_is_listed_with_the_others_and_refused(silo: Path) -> None:
    """A server names a Python file in a folder where a pipe, or too much, lies."""
    os.mkfifo(silo.parent / "data" / "pipe.py")
    digest = wait(silo, asked(silo.parent))
    other = wait(silo, asked(silo.parent, task={"kind": "digits"}))
    told = call("silo", "approve", "--silo", silo)
    assert f"run {digest}\n" in told and f"run {other}\n" in told
    assert "cannot be approved" in told and "pipe.py" in told
    with pytest.raises(ConfigError, match="no file"):
        call("silo", "approve", "--silo", silo, digest)
    call("silo", "approve", "--silo", silo, "--refuse", digest)
    (decided,) = AuditReader(silo.parent / "state" / AUDIT).lines()
    assert (decided["spec"], decided["said"]) == (digest, "refused")


def test_no_field_of_a_specification_is_left_out(silo: Path) -> None:
    """Whatever differs between two of them differs in what an owner reads."""
    config = SiloStartConfig.load(silo)
    spec = RunSpec.parse(asked(silo.parent).spec)
    seen = summary(AskedRun(spec.dump(), "{}", ""), config)[1:]
    changes = {
        "seed": 99, "silos": 3, "quorum": 9, "run": "run-2", "began": "run-0", "admitted": ["rome"],
        "train_config": {"a": 1}, "evaluate_config": {"a": 1}, "aggregation": {"kind": "fedavg", "weight": "silo"},
        "server_optimizer": {"kind": "fedavgm"}, "model": {"share": ["b"]}, "wire": {"up": "fp16"},
        "stop": {"rounds": 6}, "versions": 12, "evaluation": {"metrics": ["accuracy"]}, "cipher": {"kind": "plain"},
        "local": {"steps": 8}, "task": {"kind": "digits"}, "survey": {"spec": "", "columns": {"age": True}, "sums": ""},
        "emulate": [{"name": "a", "speed": 1.0}], "on_round": {"kind": "decay"},
        "privacy": {"kind": "dp-sgd", "clip": 1.0, "noise_multiplier": 1.0},
    }  # fmt: skip
    assert set(changes) == set(RunSpec.model_fields)
    for name, value in changes.items():
        other = RunSpec.model_validate({**spec.model_dump(mode="json"), name: value})
        assert other.dump() != spec.dump(), name
        assert summary(AskedRun(other.dump(), "{}", ""), config)[1:] != seen, name


def test_no_terminal_obeys_what_the_server_wrote(silo: Path) -> None:
    nasty = "\x1b[2J\u202e\nrun approved"
    wait(silo, replace(asked(silo.parent, run=nasty), run_config=json.dumps({nasty: nasty}, ensure_ascii=False)))
    wait(silo, Identity("{" + nasty, 0, "berlin"))
    told = call("silo", "approve", "--silo", silo)
    assert "\x1b" not in told and "\u202e" not in told and "\nrun approved" not in told
    assert "unreadable" in told
