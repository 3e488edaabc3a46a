"""The room of a silo's training process: a user's code has the data, and neither keys nor state nor a network."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from fedsync.common.errors import ConfigError, OwnerRefusal, RunError, UserCodeError
from fedsync.common.processes import INTERPRETER
from fedsync.common.sandbox.confinement import can_confine, emptied
from fedsync.common.sandbox.path_sandbox import ALLOWED, Fence
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import Cursor, Split, Subject, WorkOrder
from fedsync.silo.owner.owner_policy import OwnerPolicy
from fedsync.silo.protocol import Identity
from fedsync.silo.room import program
from fedsync.silo.room.process import TrainingProcess
from fedsync.silo.session.trainer_folder import HOME, tidy
from fedsync.silo.session.trainer_socket import listen
from tests.e2e.deployed import wait_for

Start = Callable[..., TrainingProcess]

pytestmark = pytest.mark.skipif(not can_confine(), reason="this kernel has no Landlock")

TASK = """
import ctypes, json, os, socket, subprocess, sys, time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fedsync.tasks.task_protocol import SiloData, SiloSlot, Task

HERE = Path(__file__).parent


def checked(result):
    if result < 0:
        raise PermissionError(ctypes.get_errno())


def datagram(port):
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", port))


def tried(attempts):
    found = []
    for name, attempt in attempts.items():
        try:
            attempt()
            found.append(name)
        except (OSError, KeyError, subprocess.CalledProcessError):
            continue
    return found


def attack(keys, state, trainer, port, shared):
    parent, library = os.getppid(), ctypes.CDLL(None, use_errno=True)
    return {
        "reads a key": lambda: Path(keys, "group.key").read_bytes(),
        "lists the keys": lambda: os.listdir(keys),
        "reads the state": lambda: Path(state, "audit.jsonl").read_bytes(),
        "lists other runs": lambda: os.listdir(Path(state, "trainers")),
        "lists its trainer's folder": lambda: os.listdir(Path.cwd().parent),
        "reads a key by a child": lambda: subprocess.run(["cat", f"{keys}/group.key"], check=True, capture_output=True),
        "links a key": lambda: os.link(f"{keys}/group.key", "hard"),
        "asks a trainer": lambda: socket.socket(socket.AF_UNIX).connect(trainer),
        "asks a server": lambda: socket.create_connection(("127.0.0.1", port), timeout=5),
        "sends by UDP": lambda: checked(-datagram(port)),
        "reads its parent's environment": lambda: Path(f"/proc/{parent}/environ").read_bytes(),
        "reads its parent's memory": lambda: Path(f"/proc/{parent}/mem").open("rb").read(1),
        "opens its parent's files": lambda: os.open(f"/proc/{parent}/fd/2", os.O_RDONLY),
        "goes by its parent's folder": lambda: os.listdir(Path("/proc", str(parent), "root", "etc")),
        "traces its parent": lambda: checked(library.ptrace(16, parent, 0, 0)),
        "signals its parent": lambda: os.kill(parent, 0),
        "finds a passphrase": lambda: os.environ["KEY_PASSPHRASE"],
        "finds where keys are": lambda: os.environ["FEDSYNC_KEYS"],
        "reads shared memory of others": lambda: Path("/dev/shm", shared).read_bytes(),
        "writes to the data": lambda: (HERE / "task.py").write_text("x"),
        "writes beside it": lambda: Path("/tmp/fedsync-room-escape").write_text("x"),
        "reads the shadow": lambda: Path("/etc/shadow").read_bytes(),
        "makes namespaces": lambda: checked(library.unshare(0x10000000)),
        "mounts": lambda: checked(library.mount(b"tmpfs", b"/mnt", b"tmpfs", 0, None)),
    }


class Rows(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, row):
        return torch.full((3,), float(row % 5)), row % 2


class Made(Task):
    def __init__(self, way="", keys="", state="", trainer="", port=0, shared=""):
        self.way = way
        if way == "forks":
            for leave in (os.setsid, lambda: os.setpgid(0, 0)):
                if os.fork() == 0:
                    leave()
                    time.sleep(600)
            Path("found.json").write_text(json.dumps([each for each in os.listdir("/proc") if each.isdigit()]))
        if way == "attack":
            found = tried(attack(keys, state, trainer, port, shared))
            rows = DataLoader(Rows(), batch_size=8, num_workers=2)
            read = sum(len(labels) for _, labels in rows)
            Path("found.json").write_text(json.dumps([found, read, os.environ["MINE"]]))

    def model(self):
        return nn.Linear(3, 2)

    def data(self, slot: SiloSlot):
        x = torch.arange(60.0).reshape(20, 3) / 60
        return SiloData(TensorDataset(x, torch.arange(20) % 2), TensorDataset(x, torch.arange(20) % 2))

    def loss(self, model, batch):
        if self.way == "raises":
            raise LookupError("value 42 of a row")
        if self.way == "slow":
            time.sleep(0.05)
        if self.way == "stands":
            time.sleep(600)
        if self.way == "ends":
            os._exit(3)
        return super().loss(model, batch)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("data", "keys", "state/trainers/other", "silo"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "data" / "task.py").write_text(TASK)
    (tmp_path / "keys" / "group.key").write_text("secret")
    (tmp_path / "state" / "audit.jsonl").write_text("{}")
    return tmp_path


@pytest.fixture
def process(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a training process that has its own way to train."""
    started = list[TrainingProcess]()

    def start(**what: object) -> TrainingProcess:
        file = str(place / "data" / "task.py")
        never = [str(place / "keys"), str(place / "state")]
        owner = OwnerPolicy(data=[str(place / "data")], code_files=[file], never=never)
        monkeypatch.setenv(ALLOWED, owner.model_dump_json())
        task = {"kind": "custom", "file": file, "options": what}
        text = RunSpec.of(StrategyConfig.load("fedavg", [f"task={json.dumps(task)}"]), None, 2).dump()
        started.append(TrainingProcess(Identity(text, 0, "clinic-a"), RunSpec.parse(text), owner, place / "silo"))
        return started[-1]

    yield start
    for each in started:
        each.end()


def order(steps: int = 3, name: str = "u1") -> WorkOrder:
    return WorkOrder(
        update_id=name, base_version=0, round=0, batch_size=4, max_steps=steps, learning_rate=0.1, seed=1, evaluate=True
    )


@pytest.mark.slow
def test_a_users_code_gets_nothing_but_the_data(place: Path, monkeypatch: pytest.MonkeyPatch, process: Start) -> None:
    """Each attempt succeeds where there is no room, but for those that take another user's rights."""
    monkeypatch.setenv("KEY_PASSPHRASE", "open sesame")
    monkeypatch.setenv("FEDSYNC_PASSPHRASE_ENV", "KEY_PASSPHRASE")
    monkeypatch.setenv("FEDSYNC_KEYS", str(place / "keys"))
    monkeypatch.setenv("MINE", "42")
    shared = Path("/dev/shm", f"fedsync-{secrets.token_hex(4)}")
    shared.write_text("another run's rows")
    trainer = listen(place / "state" / "s")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(server.getsockname())
        threading.Thread(target=server.accept, daemon=True).start()
        try:
            paths = {"keys": str(place / "keys"), "state": str(place / "state"), "trainer": str(place / "state" / "s")}
            process(way="attack", port=server.getsockname()[1], shared=shared.name, **paths)
        finally:
            shared.unlink()
            trainer.close()
        datagrams.setblocking(False)
        with pytest.raises(BlockingIOError):
            datagrams.recv(1)
    found, rows, variable = json.loads((place / "silo" / HOME / "found.json").read_text())
    assert found == []
    assert rows == 40, "loaders with processes work"
    assert variable == "42", "the owner's own variables are there"


@pytest.mark.slow
def test_it_trains_and_judges_as_in_the_sessions_own_process(process: Start) -> None:
    from fedsync.silo.session.silo_setup import local_trainer

    far = process()
    text = RunSpec.parse(far._set_up.spec)
    near = local_trainer(text, Identity(far._set_up.spec, 0, "clinic-a"))
    assert far.facts == near.facts
    model = far.initial_model()
    np.testing.assert_array_equal(model, near.initial_model())
    one, other = far.run(order(), model, Cursor()), near.run(order(), model, Cursor())
    np.testing.assert_array_equal(one.update, other.update)
    assert one.cursor == other.cursor
    timed = {"compute_s": 0.0, "overhead_s": {}, "windows": (), "metrics": {}}
    assert replace(one.report, **timed) == replace(other.report, **timed)
    for gains in (False, True):
        found = [each.judge(model, one.cursor, Split.TEST, Subject.LAST, gains=gains) for each in (far, near)]
        assert found[0] == found[1]


@pytest.mark.slow
def test_an_order_is_halted_and_told_how_far_it_is(process: Start) -> None:
    far = process(way="slow")
    seen = list[int]()

    def watch(steps: int, samples: int) -> bool:
        seen.append(steps)
        return steps < 3

    outcome = far.run(order(1000), far.initial_model(), Cursor(), watch=watch)
    assert 3 <= outcome.report.steps < 20
    assert seen == sorted(seen)
    assert far.run(order(2, "u2"), far.initial_model(), Cursor(), watch=lambda *_: True).report.steps == 2


@pytest.mark.slow
def test_one_that_stands_says_where(process: Start) -> None:
    far = process(way="stands")
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(far.run, order(), far.initial_model(), Cursor())
        try:
            wait_for(lambda: "task.py, line" in far.where(0), "it says where it stands", 30.0)
        finally:
            os.kill(far._started._process.pid, signal.SIGKILL)
        with pytest.raises(RunError, match="ended by signal 9"):
            work.result(30)


@pytest.mark.slow
def test_what_its_code_raises_is_the_codes_and_what_ends_it_is_started_again(process: Start) -> None:
    far = process(way="raises")
    for _ in range(2):  # it lives
        with pytest.raises(UserCodeError, match=r"task.py, line \d+: LookupError: value 42"):
            far.run(order(), far.initial_model(), Cursor())
    first = far._started._process.pid
    os.kill(first, signal.SIGKILL)
    assert far._started.exit_code(10.0) == -signal.SIGKILL
    with pytest.raises(UserCodeError):
        far.run(order(), np.zeros(far.facts.layout.size, np.float32), Cursor())
    with pytest.raises(UserCodeError):
        far.run(order(), far.initial_model(), Cursor())
    assert far._started._process.pid != first
    with pytest.raises(RunError, match="ended with code 3"):
        ending = process(way="ends")
        ending.run(order(), ending.initial_model(), Cursor())


@pytest.mark.slow
def test_data_that_changed_meanwhile_are_not_trained_on(place: Path, process: Start) -> None:
    far = process()
    (place / "data" / "task.py").write_text(
        TASK.replace("arange(60.0).reshape(20", "arange(57.0).reshape(19").replace("arange(20)", "arange(19)")
    )
    os.kill(far._started._process.pid, signal.SIGKILL)
    assert far._started.exit_code(10.0) == -signal.SIGKILL
    with pytest.raises(ConfigError, match="model or data have changed"):
        far.run(order(), np.zeros(far.facts.layout.size, np.float32), Cursor())


def test_a_second_name_of_a_key_in_the_data_stops_the_training_process(place: Path, process: Start) -> None:
    (place / "data" / "second").hardlink_to(place / "keys" / "group.key")
    with pytest.raises(OwnerRefusal, match="second name"):
        process()


@pytest.mark.slow
def test_a_task_that_cannot_be_built_is_the_same_error_as_without_a_room(place: Path, process: Start) -> None:
    (place / "data" / "task.py").write_text("x = 1\n")
    with pytest.raises(ConfigError, match="one subclass"):
        process()


WITHOUT_NAMESPACES = """
import json, socket, sys
from pathlib import Path
from fedsync.silo.room import program

program.own_namespaces = lambda: False
alone = program.enter(Path(sys.argv[1]), [])
made = []
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
        try:
            made.append(str(socket.socket(family, kind)))
        except PermissionError:
            continue
print(json.dumps([alone, made, socket.socketpair()[0].fileno() > 0]))
"""


def test_without_namespaces_there_is_no_socket_at_all(tmp_path: Path) -> None:
    command = [*INTERPRETER[:2], "-c", WITHOUT_NAMESPACES, str(tmp_path)]
    (tmp_path / "tmp").mkdir()
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert json.loads(found.stdout) == [False, [], True]


def alive_in(place: Path) -> list[int]:
    """Processes whose working folder is the room's."""
    found = list[int]()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(place / "silo" / HOME):
                found.append(process.pid)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["end", "end of a stopped one", "guard", "process"])
def test_nothing_of_a_room_outlives_it(place: Path, process: Start, killed: str) -> None:
    far = process(way="forks")
    assert len(alive_in(place)) == 3
    match killed:
        case "end":
            far.end()
        case "end of a stopped one":  # it hears of nothing
            psutil.Process(far._started._process.pid).children()[0].suspend()
            far.end()
        case "guard":
            os.kill(far._started._process.pid, signal.SIGTERM)
        case "process":
            psutil.Process(far._started._process.pid).children()[0].kill()
    wait_for(lambda: not alive_in(place), "no process is left", 20.0)


def test_a_link_in_the_data_leads_nowhere(tmp_path: Path) -> None:
    data, keys = tmp_path / "data", tmp_path / "data" / "keys"
    keys.mkdir(parents=True)
    (keys / "group.key").write_text("secret")
    (data / "link").symlink_to(keys)
    (data / "rows.csv").write_text("1")
    fence = Fence((str(data),), (str(keys),))
    assert fence.ways() == (data / "rows.csv",)
    fence.check_names()


def test_a_deep_folder_is_removed_and_measured(tmp_path: Path) -> None:
    home = tmp_path / "run" / HOME
    home.mkdir(parents=True)
    descriptor = os.open(home, os.O_DIRECTORY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=descriptor)
        deeper = os.open("d", os.O_DIRECTORY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = deeper
    os.close(descriptor)
    assert tidy(tmp_path, 10**9)
    emptied(home)
    assert sorted(path.name for path in home.iterdir()) == ["tmp"]


def test_nothing_that_starts_a_thread_is_imported_before_the_room() -> None:
    """Landlock confines the threads that there are later, not those that there were before."""
    heavy = ("numpy", "torch", "tenseal", "pydantic")
    code = f"import sys, {program.__name__}; print(*[name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
