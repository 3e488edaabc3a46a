"""``fedsync silo export``: how a silo gets the model of an encrypted run."""

import hashlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsync.cipher.silo.history import History, LinkRecords
from fedsync.cipher.silo.replica_state import ReplicaState, Scales
from fedsync.common.errors import ConfigError, FedSyncError, OwnerRefusal, RunError
from fedsync.config.run_spec import RunSpec
from fedsync.config.silo_start import SiloStartConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.flower.flower_strategy import FedSync
from fedsync.ops.approval_summary import code_of
from fedsync.silo.owner.approvals import APPROVALS, Approvals, AwaitsApproval, with_code
from fedsync.silo.protocol import COPY, Identity
from fedsync.silo.session.session import SiloSession
from tests.commands.call import call
from tests.flower.cut_off_runs import TIMING, named_silos, with_keys
from tests.flower.grid import DirectGrid, keep_state, silos_in_this_process, trainers

QUICK = ["local.steps=1", "local.batch_size=8", "stop.rounds=2", "cipher={kind: pad}"]
TASK = """\
import torch
from torch.utils.data import TensorDataset
from fedsync import SiloData, Task

class Small(Task):
    def model(self):
        return torch.nn.Linear(4, 2)

    def data(self, slot):
        inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(slot.index))
        share = TensorDataset(inputs, (inputs[:, 0] > 0).long())
        return SiloData(share, share)
"""
LOOP = """\
import torch
from fedsync.client import SiloApp

app = SiloApp()

@app.setup()
def setup(silo):
    return silo.use(lambda: torch.nn.Linear(4, 2), torch.zeros(32, 4))

@app.train()
def fit(work, model, train):
    for batch in work.loader(train):
        model.bias.data += work.learning_rate
"""
FLOWER = """\
import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

def first():
    return [np.zeros((4, 2), np.float32), np.zeros(2, np.float32)]

@app.train()
def train(msg, context):
    arrays = [array + 1 for array in msg.content["arrays"].to_numpy_ndarrays()]
    content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"loss": 1.0, "num-examples": 32})})
    return Message(content, reply_to=msg)
"""
TASKS = {
    "custom": (TASK, "{kind: custom, file: FILE}"),
    "silo-app": (LOOP, "{kind: silo-app, file: FILE}"),
    "clientapp": (FLOWER, "{kind: clientapp, app: 'FILE:app', model: 'FILE:first'}"),
}
VALUES = 4 * 2 + 2


@pytest.fixture
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a silo, with its state folder ``s`` beside it, whose path may not be long, and a task."""
    path = tmp_path_factory.mktemp("e") / "silo.yaml"
    path.with_name("small.py").touch()
    path.write_text(
        "{name: berlin, server: 'localhost:1', insecure: true, state: s, data: [.], emulate: true, "
        "code_files: [small.py, 'small.py:first']}",
        encoding="utf-8",
    )
    return path


def config_of(file: Path, kind: str = "custom", *settings: str) -> StrategyConfig:
    code, task = TASKS[kind]
    file.with_name("small.py").write_text(code, encoding="utf-8")
    return StrategyConfig.load(
        "fedavg", [*QUICK, *settings, f"task={task.replace('FILE', str(file.with_name('small.py')))}"]
    )


def keep(file: Path, run: str, at_s: float, version: int = 1, silo: str = "berlin", values: int = VALUES) -> Path:
    """A trainer's folder with a model that is ``version`` everywhere; returns the copy."""
    folder = file.parent / "s" / "state" / f"{run}-{silo}"
    folder.mkdir(parents=True)
    spec = RunSpec.of(config_of(file), None, 2).model_copy(update={"run": run}).dump()
    Identity(spec, 0, silo).save(folder)
    # An exponent for each of the task's two tensors.
    model, history = np.full(values, version, dtype=np.float32), History(bytes(32), LinkRecords(version, ()))
    ReplicaState(version, model, Scales(((0, 0),)), {}, history).save(folder / COPY)
    os.utime(folder / COPY, (at_s, at_s))
    return folder / COPY


def export(file: Path, out: Path, *more: str) -> str:
    return call("silo", "export", "--silo", file, "--out", out, *more)


def model_in(out: Path, name: str = "model.pt") -> np.ndarray:
    tensors = torch.load(out / name, weights_only=True)
    return np.concatenate([tensor.numpy().ravel() for tensor in tensors.values()])


def ran(kind: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *settings: str) -> list[SiloSession]:
    """An encrypted run of three silos, of which the last is berlin; their sessions."""
    config = config_of(file, kind, *settings)
    silos = named_silos(("a", "b", "berlin"))
    keys = with_keys(config, tmp_path / "keys", monkeypatch, silos)

    def folder_of(identity: Identity) -> Path:
        home = "s" if identity.index == 2 else f"other-{identity.index}"
        return file.parent / home / "state" / "0123456789abcdef"

    with silos_in_this_process():
        keep_state(monkeypatch, folder_of)
        FedSync(config, silos, out=tmp_path / "run", timing=TIMING, keys=keys).start(DirectGrid(3))
        return [trainer._session for trainer in trainers.values()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", TASKS)
def test_an_encrypted_model_is_written(kind: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = ran(kind, file, tmp_path, monkeypatch)
    assert not (tmp_path / "run" / "model.pt").exists()
    said = export(file, tmp_path / "out" / "new")
    assert "version 3 of run " in said, "that of the end: two rounds, and what scores them"
    assert (tmp_path / "out" / "new").stat().st_mode & 0o077 == 0
    for session in sessions:
        np.testing.assert_array_equal(model_in(tmp_path / "out" / "new"), session.replica.model)


@pytest.mark.slow
def test_all_silos_write_the_same_best_model_and_say_which_version_it_is(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is said is by the digest of the file, and is what the server heard of silos, which has no model."""
    better = "evaluation={best: {metric: loss}}"
    sessions = ran("custom", file, tmp_path, monkeypatch, "stop.rounds=3", "local.learning_rate=10", better)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert not [*(tmp_path / "run").glob("*.pt"), *(tmp_path / "run").glob("best.json")]
    stated = summary["best"]
    assert stated["version"] < summary["last"]["version"], "so these are two models"
    wanted = {"version": stated["version"], "value": stated["metrics"]["loss"], "metrics": stated["metrics"]}
    files = set()
    for index, session in enumerate(sessions):
        home = "s" if index == 2 else f"other-{index}"
        own = file.with_name(f"silo-{index}.yaml")
        own.write_text(file.read_text(encoding="utf-8").replace("state: s", f"state: {home}"), encoding="utf-8")
        out = tmp_path / f"out-{index}"
        assert f"best.pt: version {stated['version']};" in export(own, out)
        np.testing.assert_array_equal(model_in(out, "best.pt"), session.replica.best_model)
        np.testing.assert_array_equal(model_in(out, "last.pt"), session.replica.model)
        assert (out / "last.pt").read_bytes() == (out / "model.pt").read_bytes()
        digest = hashlib.sha256((out / "best.pt").read_bytes()).hexdigest()
        assert json.loads((out / "best.json").read_text()) == {digest: wanted}
        files.add(digest)
    assert len(files) == 1 and len(sessions) == 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", TASKS)
def test_private_parts_are_written_as_they_were_trained(
    kind: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "1" if kind == "clientapp" else "bias"
    sessions = ran(kind, file, tmp_path, monkeypatch, f"model={{private: ['{name}']}}")
    export(file, tmp_path / "out")
    tensors = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    kept = np.frombuffer(sessions[2].cursor.private[-8:], np.float32)
    assert tensors[name].tolist() == kept.tolist()
    others = [np.frombuffer(each.cursor.private[-8:], np.float32).tolist() for each in sessions[:2]]
    assert kind != "custom" or kept.tolist() not in others, "each silo has its own"


@pytest.mark.slow
def test_the_newest_run_is_meant_however_short(file: Path, tmp_path: Path) -> None:
    keep(file, "long", at_s=1e9, version=40)
    keep(file, "short", at_s=1e9 + 60, version=3)

    said = export(file, tmp_path)
    assert "version 3 of run short (2001-09-09 01:47 UTC)" in said
    assert "run long (2001-09-09 01:46 UTC); for its model add --run long" in said
    assert set(model_in(tmp_path)) == {3.0}
    assert "version 40 of run long" in export(file, tmp_path, "--run", "long")
    assert set(model_in(tmp_path)) == {40.0}


@pytest.mark.slow
def test_of_one_runs_trainers_the_one_that_got_furthest_counts(file: Path, tmp_path: Path) -> None:
    """And no best model of another run stays where the run has none."""
    keep(file, "run", at_s=1e9, version=7)
    keep(file, "run", at_s=1e9 + 1, version=5, silo="before-it-was-renamed")
    for name in ("best.pt", "best.json"):
        (tmp_path / name).write_text("{}")
    said = export(file, tmp_path)
    assert said.split(": ")[1] == "version 7 of run run (2001-09-09 01:46 UTC)\n" and "best.pt" not in said
    assert not [*tmp_path.glob("best.*")]


@pytest.mark.slow
def test_two_runs_that_a_server_calls_by_one_name_are_two(file: Path, tmp_path: Path) -> None:
    """Else the older one, which got further, would be written for the newer."""
    old = keep(file, "run", at_s=1e9, version=40)
    other = json.loads(Identity.load(old.parent).spec) | {"seed": 5}
    Identity(json.dumps(other), 0, "berlin").save(old.parent)
    keep(file, "run", at_s=1e9 + 60, version=3, silo="again")

    said = export(file, tmp_path)
    assert "version 3 of run run (2001-09-09 01:47 UTC)" in said and "not written: run run (2001-09-09 01:46" in said
    assert set(model_in(tmp_path)) == {3.0}


def _marked(file: Path) -> None:
    """The run's code ends with an error from now on, wherever it runs."""
    code = file.with_name("small.py")
    code.write_text(f"raise RuntimeError\n{code.read_text()}")


@pytest.mark.slow
def test_code_that_the_owner_does_not_name_any_more_is_not_run_for_an_export(file: Path, tmp_path: Path) -> None:
    keep(file, "run", at_s=1e9)
    _marked(file)
    named = file.read_text()
    file.write_text(named.replace("code_files: [small.py, 'small.py:first']", "code_files: []"))
    with pytest.raises(OwnerRefusal, match="named no code"):
        export(file, tmp_path / "out")
    file.write_text(named)
    with pytest.raises(FedSyncError, match=r"small\.py, line 1: running the file failed"):
        export(file, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["export", "evaluate"])
def test_code_that_changed_since_the_approval_is_not_run_by_the_owner_either(
    command: str, file: Path, tmp_path: Path
) -> None:
    identity = Identity.load(keep(file, "run", at_s=1e9).parent)
    file.write_text(file.read_text().replace("emulate:", "approve: ask, emulate:"))

    carried_out = (
        partial(export, file, tmp_path / "out") if command == "export" else partial(call, "evaluate", "--silo", file)
    )
    with pytest.raises(AwaitsApproval):
        carried_out()
    config = SiloStartConfig.load(file)
    approvals = Approvals(Path(config.state) / APPROVALS)
    (run,) = approvals.waiting()
    code = code_of(run, config)
    approvals.decide(with_code(run.digest, code), approve=True, code=code)
    assert approvals.covers(identity.text.digest, code)
    _marked(file)
    with pytest.raises(OwnerRefusal, match="has changed since"):
        carried_out()


def test_a_silo_without_a_model_says_why(file: Path, tmp_path: Path) -> None:
    """None of that run, or none of any."""
    with pytest.raises(ConfigError, match=r"no encrypted run has left a model in .*the server has model\.pt"):
        export(file, tmp_path / "out")
    keep(file, "in-the-clear", at_s=1e9).unlink()
    with pytest.raises(ConfigError, match="no encrypted run has left a model"):
        export(file, tmp_path / "out")
    keep(file, "one", at_s=1e9)
    keep(file, "two", at_s=1e9 + 60)
    with pytest.raises(ConfigError, match=r"there is no model of run 'three'\. Choose one of: two .*, one "):
        export(file, tmp_path / "out", "--run", "three")
    assert not (tmp_path / "out").exists()


def test_a_task_that_the_owner_does_not_allow_is_not_run(file: Path, tmp_path: Path) -> None:
    keep(file, "run", at_s=1e9)
    file.write_text(file.read_text(encoding="utf-8").replace("data: [.], ", ""), encoding="utf-8")
    with pytest.raises(ConfigError, match="outside the folders that this silo's owner allows runs to read"):
        export(file, tmp_path)


def damaged(file: Path) -> None:
    copy = keep(file, "run", at_s=1e9)
    copy.write_bytes(copy.read_bytes()[:-3])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "out", "error", "message"),
    [
        (damaged, "out", RunError, r"copy\.bin is damaged"),
        (lambda file: keep(file, "run", 1e9, values=5), "out", ConfigError, "does not fit the task any more"),
        (lambda file: keep(file, "run", 1e9), "silo.yaml", ConfigError, "cannot be made: File exists"),
    ],
    ids=["damaged", "another-task", "no-folder"],
)
def test_what_is_in_the_way_is_named(
    file: Path, harm: Callable[[Path], object], out: str, error: type[FedSyncError], message: str
) -> None:
    harm(file)
    with pytest.raises(error, match=message):
        export(file, file.with_name(out))
    assert not file.with_name(out).joinpath("model.pt").exists()
