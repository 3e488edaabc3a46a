"""The resident trainer as a real process on a real socket."""

import errno
import os
import re
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import psutil
import pytest

from fedsync.common.errors import ConfigError, FedSyncError
from fedsync.common.fork_server import FORK_SERVER, start_fork_server
from fedsync.common.locks import wait_until
from fedsync.common.processes import OWNER, end_processes
from fedsync.config.cluster import SiloConfig
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import Evaluation, WorkOrder, WorkReport
from fedsync.model.transfer import VersionMismatch
from fedsync.silo.owner.refusals import last_refusals
from fedsync.silo.protocol import (
    IDENTITY,
    STATE,
    Collect,
    Describe,
    EvaluateModel,
    Hello,
    Identity,
    InProgress,
    Refusal,
    Refused,
    Reply,
    Request,
    Train,
    exchange,
)
from fedsync.silo.session import liveness, trainer_client
from fedsync.silo.session.trainer_client import SHARED_MODULES, TrainerClient, stop_trainers, trainer_folder
from fedsync.silo.session.trainer_folder import tenant
from fedsync.train.weights import TaskModel
from tests.e2e.deployed import SMALL

CONFIG = StrategyConfig.load("fedavg", [SMALL])


def identity(speed: float = 1e6, **changes: object) -> Identity:
    spec = RunSpec(seed=7, silos=1, task=CONFIG.task, local=CONFIG.local, emulate=[SiloConfig(name="a", speed=speed)])
    return Identity(spec.model_copy(update=changes).dump(), 0, "unused")


def order(number: int, steps: int = 3) -> WorkOrder:
    return WorkOrder(f"a/{number}", 0, number, 16, steps, 0.1, seed=number, evaluate=False)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Trainers are forked, for each would import PyTorch; those of `test_hangs` start by themselves."""
    folder = tmp_path_factory.mktemp("s")
    folder.chmod(0o700)
    server = start_fork_server(folder / "n", SHARED_MODULES, os.environ, folder / "log")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STATE, str(folder))
        patch.setenv(OWNER, str(os.getpid()))
        patch.setenv(FORK_SERVER, str(folder / "n"))
        yield folder
        stop_trainers(folder)
    end_processes([server], grace_s=0.0)


@pytest.fixture(autouse=True)
def _few_trainers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test is a run of the same silo, which has three trainers at most."""
    yield
    if "root" in request.fixturenames:
        root = request.getfixturevalue("root")
        stop_trainers(root)
        # One that is ending still has its socket, which the next test would call.
        wait_until(lambda: all(tenant(folder) is None for folder in root.glob("*")), 10, 0.02)


@pytest.fixture(scope="module")
def model() -> np.ndarray:
    return TaskModel(CONFIG.task.build(), 7).initial()


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o700)
    monkeypatch.setenv(STATE, str(tmp_path))
    return tmp_path


def put(link: TrainerClient, request: Request, payload: np.ndarray | None = None) -> Reply:
    return exchange(link.ask, request, payload)[0]


def refused(reply: Reply, code: Refusal, reason: str) -> None:
    """The reply is this code; emulated silos say why, too."""
    assert isinstance(reply, Refused) and reply.code is code
    assert re.search(reason, reply.text), reply.text


def trained(link: TrainerClient, order: WorkOrder, model: np.ndarray) -> tuple[WorkReport, np.ndarray]:
    """Report and update of an order, once it is done."""
    report, update = exchange(link.ask, Train(order), model)
    assert isinstance(report, WorkReport) and update is not None
    return report, update


def process(link: TrainerClient) -> psutil.Process:
    return psutil.Process(tenant(link._folder))


def kill(link: TrainerClient) -> None:
    trainer = process(link)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    assert tenant(link._folder) is None


def test_progress_and_halt_reach_a_silo_at_work(root: Path, model: np.ndarray) -> None:
    link = TrainerClient(identity(speed=160.0, run="2"))  # 16 samples: 0.1 s a step, 10 s in all
    put(link, Describe())
    begin = time.monotonic()
    answer = put(link, Train(order(1, steps=100), 0.5), model)
    assert isinstance(answer, InProgress)
    assert 1 <= answer.steps < 50 and answer.samples == 16 * answer.steps
    while isinstance(answer, InProgress):
        answer = put(link, Collect("a/1", 1.0, halt=True))
    assert isinstance(answer, WorkReport)
    assert answer.steps < 100
    assert time.monotonic() - begin < 9


def test_a_killed_trainer_is_started_again_and_goes_on_in_its_data(root: Path, model: np.ndarray) -> None:
    straight = TrainerClient(identity(run="3"))
    expected = [trained(straight, order(number), model) for number in (1, 2)][1]
    link = TrainerClient(identity(run="4"))
    trained(link, order(1), model)
    kill(link)
    np.testing.assert_array_equal(trained(link, order(2), model)[1], expected[1])


def test_the_same_order_twice_trains_once_also_after_a_kill(root: Path, model: np.ndarray) -> None:
    link = TrainerClient(identity(run="7"))
    hello = put(link, Describe())
    assert isinstance(hello, Hello) and (hello.silo, hello.facts.declared_speed) == ("a", 1e6)
    assert put(link, Collect("a/99", 0.1)) == VersionMismatch(0), "an order that nobody knows is to be sent again"
    first, again = trained(link, order(1), model), [trained(link, order(1), model)]
    kill(link)
    again.append(trained(link, order(1), model))
    for report, update in again:
        assert report == first[0], "a second training would have measured other times"
        np.testing.assert_array_equal(first[1], update)
    assert put(link, Collect("a/1", 0.0)) == first[0]
    assert trained(link, order(1, steps=4), model)[0].steps == 4, "the same name, but another order"


def test_a_full_disk_fails_the_order_and_the_trainer_lives(root: Path, model: np.ndarray) -> None:
    link = TrainerClient(identity())
    put(link, Describe())
    unlimited = psutil.RLIM_INFINITY
    process(link).rlimit(psutil.RLIMIT_FSIZE, (0, unlimited))
    refused(put(link, Train(order(11)), model), Refusal.DISK, r"answer\.bin: cannot be written: File too large")
    process(link).rlimit(psutil.RLIMIT_FSIZE, (unlimited, unlimited))
    trained(link, order(12), model)


def test_what_is_to_be_evaluated_twice_is_evaluated_once(root: Path, model: np.ndarray) -> None:
    link = TrainerClient(identity())
    found = put(link, EvaluateModel(3), model)
    assert isinstance(found, Evaluation) and put(link, EvaluateModel(3), model) == found
    assert put(link, EvaluateModel(3), model + 1) != found, "another model of the same version is another"


def test_what_prevents_the_trainer_is_said(root: Path) -> None:
    task = StrategyConfig.load("fedavg", ["task={kind: custom, file: nowhere.py}"]).task
    reason = r"nowhere\.py: there is no such file"
    refused(put(TrainerClient(identity(task=task)), Describe()), Refusal.CONFIG, reason)
    note = last_refusals(root)[-1]
    assert note.code is Refusal.CONFIG and re.search(reason, note.reason), "put down for `fedsync doctor`"


SLOW = """
import time
from pathlib import Path

from torch import nn, zeros
from torch.utils.data import TensorDataset

from fedsync import SiloData, Task

assert sum(range(30_000_000)) > 0  # lets no other thread run
while not Path(__file__).with_name("go").exists():
    time.sleep(0.01)


class Slow(Task):
    def model(self):
        return nn.Linear(2, 2)

    def data(self, slot):
        data = TensorDataset(zeros(8, 2), zeros(8).long())
        return SiloData(data, data)
"""


def test_a_slow_trainer_is_let_be_and_found_later(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    task = StrategyConfig.load("fedavg", [f"task={{kind: custom, file: {tmp_path / 'slow.py'}}}"]).task
    slow = identity(run="slow", task=task)
    folder = trainer_folder(slow)
    folder.mkdir(mode=0o700)
    (folder / ".answer.bin.12").write_bytes(b"half")  # as a killed one leaves it
    monkeypatch.setattr(trainer_client, "_LOAD_S", 0.5)
    monkeypatch.setattr(liveness, "PROBE_S", 0.05)
    loads = r"has been loading its task, data and model for \d+ s\. It continues"
    refused(put(TrainerClient(slow), Describe()), Refusal.LOADING, loads)
    pid = tenant(folder)
    seen = liveness.Trainers(root)
    monkeypatch.setattr(liveness, "PROBE_S", 10.0)
    seen.look()
    told = seen.told()["trainers"][folder.name]
    assert (told["pid"], told["state"]) == (pid, "loading")
    (tmp_path / "go").touch()
    monkeypatch.setattr(trainer_client, "_LOAD_S", 60.0)
    assert isinstance(put(TrainerClient(slow), Describe()), Hello)
    assert tenant(folder) == pid
    assert not (folder / ".answer.bin.12").exists()


def test_a_trainer_that_hangs_is_ended_and_the_next_message_starts_another(
    state: Path, model: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = TrainerClient(identity())
    put(link, Describe())
    assert stat.S_IMODE(link._socket.stat().st_mode) == 0o600, "only the owner can reach it"
    first = process(link)
    monkeypatch.setattr(liveness, "PROBE_S", 0.05)
    first.suspend()
    large = np.zeros(4_000_000, np.float32)  # does not even get in
    with pytest.raises(FedSyncError, match=rf"hung, process {first.pid}, and was ended"):
        trained(link, order(1), large)
    assert tenant(link._folder) is None
    monkeypatch.setattr(liveness, "PROBE_S", 5.0)
    trained(link, order(1), model)
    second = process(link)
    second.suspend()
    monkeypatch.setattr(trainer_client, "_TELL_S", 0.1)
    stop_trainers(state)
    assert tenant(link._folder) is None


def test_a_folder_that_was_removed_comes_back_for_its_owner_alone(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FORK_SERVER, raising=False)
    monkeypatch.setattr(subprocess, "Popen", Mock(side_effect=OSError(errno.EAGAIN, "no more processes")))
    with pytest.raises(ConfigError, match="no trainer can be started here: no more processes"):
        put(TrainerClient(identity()), Describe())
    (folder,) = filter(Path.is_dir, state.iterdir())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert Identity.load(folder) == identity()
    state.chmod(0o755)
    with pytest.raises(FedSyncError, match="open to others"):
        TrainerClient(identity())


def test_an_identity_is_written_only_if_another_is_there(tmp_path: Path) -> None:
    mine = identity()
    mine.save(tmp_path)
    before = (tmp_path / IDENTITY).stat().st_mtime_ns
    mine.save(tmp_path)
    assert (tmp_path / IDENTITY).stat().st_mtime_ns == before
    (tmp_path / IDENTITY).write_text("")  # as a full disk left it once
    with pytest.raises(ValueError, match="Expecting value"):
        Identity.load(tmp_path)
    mine.save(tmp_path)
    assert Identity.load(tmp_path) == mine
    assert [file.name for file in tmp_path.iterdir()] == [IDENTITY]
