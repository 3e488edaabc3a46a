"""Trainers of several silos on one machine, forked by one process that has imported what they need."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fedsync.common.fork_server import FORK_SERVER, start_fork_server
from fedsync.common.processes import OWNER, end_processes
from fedsync.config.cluster import ClusterConfig, SiloConfig
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.silo.owner.key_lookup import KEYS, emulated_rings
from fedsync.silo.protocol import STATE, Describe, Hello, Identity, exchange
from fedsync.silo.session.trainer_client import SHARED_MODULES, TrainerClient, stop_trainers
from fedsync.silo.session.trainer_folder import tenant
from tests.e2e.deployed import SMALL

CONFIG = StrategyConfig.load("fedavg", [SMALL])
SILOS = [SiloConfig(name=name, speed=1e6) for name in "abc"]


def link(index: int, **changes: object) -> TrainerClient:
    spec = RunSpec(seed=7, silos=3, task=CONFIG.task, local=CONFIG.local, emulate=SILOS)
    return TrainerClient(Identity(spec.model_copy(update=changes).dump(), index, "abc"[index]))


def greeted(link: TrainerClient, name: str) -> psutil.Process:
    """The trainer's process, once it has said its name."""
    hello = exchange(link.ask, Describe())[0]
    assert isinstance(hello, Hello) and hello.silo == name
    return psutil.Process(tenant(link._folder))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[bytes]]:
    """One for all tests, for it imports PyTorch; the last of them ends it."""
    folder = tmp_path_factory.mktemp("n")
    folder.chmod(0o700)
    started = start_fork_server(folder / "n", [*SHARED_MODULES, *CONFIG.task.libraries], os.environ, folder / "log")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FORK_SERVER, str(folder / "n"))
        yield started
    end_processes([started], grace_s=0.0)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    tmp_path.chmod(0o700)
    monkeypatch.setenv(STATE, str(tmp_path / "s"))
    monkeypatch.setenv(OWNER, str(os.getpid()))
    yield tmp_path
    stop_trainers(tmp_path / "s")


@pytest.mark.slow
def test_a_silos_trainers_seal_with_nonces_and_keys_of_their_own(
    root: Path, server: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = StrategyConfig.load("fedavg", [SMALL, "cipher={kind: masked}", "min_silos=3"])
    rings = emulated_rings(config, ClusterConfig(silos=SILOS), root)
    assert rings is not None
    monkeypatch.setenv(KEYS, str(rings[0]))
    greetings = []
    for _ in range(2):
        trainer = link(0, cipher=config.cipher)
        _, greeting = exchange(trainer.ask, Describe())
        assert greeting is not None
        greetings.append(bytes(greeting))
        process = psutil.Process(tenant(trainer._folder))
        assert process.ppid() == server.pid
        process.kill()
        psutil.wait_procs([process])
    assert len(greetings[0]) == len(greetings[1]) > 1000
    same = sum(one == two for one, two in zip(*greetings, strict=True)) / len(greetings[0])
    assert same < 0.1, "they share what is drawn by chance: a 256th of the bytes, and a short head"


@pytest.mark.slow
def test_trainers_are_forked_outlive_and_do_without_their_server(root: Path, server: subprocess.Popen[bytes]) -> None:
    """The last test with the server."""
    links = [link(index) for index in range(3)]
    one, two = (greeted(each, name) for each, name in zip(links[:2], "ab", strict=True))
    assert one.ppid() == two.ppid() == server.pid
    for each, of in zip((one, two), links[:2], strict=True):
        assert each.cmdline()[-2:] == ["fedsync.silo.session.resident_trainer", str(of._folder)]
        assert os.getsid(each.pid) == each.pid
    # What nobody writes to is there once: most of what a trainer has is the server's.
    memory = one.memory_full_info()
    assert memory.uss < memory.rss / 2
    server.send_signal(signal.SIGKILL)
    server.wait()
    assert greeted(links[0], "a") == one, "it goes on"
    one.kill()
    psutil.wait_procs([one])
    again = greeted(links[0], "a")
    assert again.ppid() == os.getpid() and again.cmdline()[-1] == str(links[0]._folder)


@pytest.mark.slow
def test_what_trainers_share_holds_no_cipher_and_no_thread_and_what_they_train_with_no_compiler() -> None:
    """A library that draws random numbers of its own is imported after the fork, where it seeds itself."""
    code = (
        "import sys; from importlib import import_module;"
        "from fedsync.silo.session.trainer_client import SHARED_MODULES;"
        "[import_module(each) for each in (*SHARED_MODULES, 'sklearn.datasets')];"
        "assert 'torch' in sys.modules;"
        "assert not {'tenseal', 'flwr', 'grpc'} & set(sys.modules);"
        "import torch; assert not torch.cuda.is_initialized() and not torch.cuda._is_in_bad_fork();"
        "from fedsync.core.orders import Cursor;"
        "from tests.train.make import LocalOptions, order, trainer;"
        "options = LocalOptions(momentum=0.9, clip_norm=1.0, device='cpu');"
        "subject = trainer(options=options);"
        "assert subject.run(order(), subject.initial_model(), Cursor()).update.any();"
        "assert 'torch._dynamo' not in sys.modules, 'a second of imports, and 70 MB'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
