"""The room of ClientApps: what a lying server has a silo run there reaches no key, no data, no process and no host."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsync.common.processes import INTERPRETER, OWNER
from fedsync.common.sandbox.confinement import NETWORK_ABI, can_confine, landlock_abi
from fedsync.common.sandbox.path_sandbox import ALLOWED
from fedsync.silo.agent.joins import INBOX
from tests.e2e.deployed import wait_for

pytestmark = pytest.mark.skipif(not can_confine(), reason="this kernel has no Landlock")

CLIENT = """
import ctypes, json, os, resource, socket, subprocess, sys
from pathlib import Path
from fedsync.silo.agent.joins import enter

home, inbox, port, secret, unix, other, victim, shared = sys.argv[1:]
enter(Path(home), Path(inbox), int(port), Path(shared))
ATTEMPTS = {
    "reads a key": lambda: Path(secret).read_bytes(),
    "lists the folder of keys": lambda: os.listdir(Path(secret).parent),
    "reads it by a child": lambda: subprocess.run(["cat", secret], check=True, capture_output=True).stdout,
    "reads it by a link": lambda: (os.symlink(secret, f"{home}/link"), Path(home, "link").read_bytes()),
    "links it": lambda: os.link(secret, f"{home}/hard"),
    "writes beside it": lambda: Path(secret).with_name("x").write_text("x"),
    "removes it": lambda: os.unlink(secret),
    "renames it": lambda: os.rename(secret, f"{home}/stolen"),
    "reads the inbox": lambda: [Path(inbox, name).read_text() for name in ["other.join"]],
    "lists the inbox": lambda: os.listdir(inbox),
    "makes a device": lambda: os.mkfifo(f"{home}/fifo"),
    "asks the trainer": lambda: socket.socket(socket.AF_UNIX).connect(unix),
    "asks another host": lambda: socket.create_connection(("127.0.0.1", int(other)), timeout=5),
    "listens": lambda: socket.create_server(("127.0.0.1", 0)),
    "sends by UDP": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9)),
    "sends raw packets": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1),
    "reads an environment": lambda: Path(f"/proc/{victim}/environ").read_bytes(),
    "reads memory": lambda: Path(f"/proc/{victim}/mem").open("rb").read(1),
    "opens files of a process": lambda: os.open(f"/proc/{victim}/cwd/Makefile", os.O_RDONLY),
    "kills": lambda: os.kill(int(victim), 0),
    "reads the shadow": lambda: Path("/etc/shadow").read_bytes(),
    "reads kernel keys": lambda: checked(ctypes.CDLL(None, use_errno=True).syscall(250, 0, -3, 0, 0, 0)),
    "goes round by io_uring": lambda: checked(ctypes.CDLL(None, use_errno=True).syscall(425, 1, bytes(120))),
    "gets rights back": lambda: checked(ctypes.CDLL(None).setuid(0) or len(os.listdir("/root"))),
    "asks another host by MPTCP": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262),
    "asks another host by TCP Fast Open": lambda: socket.socket().sendto(b"x", 0x20000000, ("127.0.0.1", int(other))),
    "listens anywhere": lambda: socket.socket().listen(),
    "sends to a Unix socket by its path": lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM),
    "watches a folder": lambda: checked(inotify(Path(secret).parent)),
    "takes another's files from it": lambda: resource.prlimit(int(victim), resource.RLIMIT_NOFILE, (0, 0)),
    "moves another to one processor": lambda: os.sched_setaffinity(int(victim), {0}),
    "slows another down": lambda: os.setpriority(os.PRIO_PROCESS, int(victim), 19),
    "makes a namespace": lambda: checked(ctypes.CDLL(None, use_errno=True).unshare(0x10000000)),
    "makes one by clone": lambda: checked(ctypes.CDLL(None, use_errno=True).syscall(56, 0x10000011, 0, 0, 0, 0)),
    "shares memory": lambda: checked(ctypes.CDLL(None, use_errno=True).shmget(1234, 100, 0o1666)),
    "finds a secret variable": lambda: os.environ["FEDSYNC_PASSPHRASE"],
}


def inotify(folder):
    library = ctypes.CDLL(None, use_errno=True)
    return library.inotify_add_watch(library.inotify_init(), bytes(folder), 0xFFF)


def checked(result):
    if result < 0:
        raise PermissionError(ctypes.get_errno())
    return result


succeeded = {}
for name, attempt in ATTEMPTS.items():
    try:
        attempt()
        succeeded[name] = True
    except (OSError, subprocess.CalledProcessError, KeyError):
        succeeded[name] = False
os.chmod(secret, 0o777)  # each says that it is done
os.utime(secret, (1, 1))
os.setxattr(secret, "user.x", b"1")
allowed = {
    "its own files": lambda: Path(home, "own").write_text("x"),
    "a join": lambda: (Path(inbox, "a.part").write_text("x"), os.rename(f"{inbox}/a.part", f"{inbox}/a.join")),
    "its SuperNode": lambda: socket.create_connection(("127.0.0.1", int(port)), timeout=5),
    "a new process": lambda: subprocess.run(
        [sys.executable, "-c", "import flwr.clientapp, fedsync.flower.client_app"], check=True
    ),
}
worked = {}
for name, attempt in allowed.items():
    try:
        attempt()
        worked[name] = True
    except Exception as error:
        worked[name] = repr(error)
print(json.dumps([succeeded, worked]))
"""


@pytest.fixture
def port() -> Iterator[int]:
    with _listening() as listener:
        yield listener.getsockname()[1]


def _listening() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_let_in, args=(listener,), daemon=True).start()
    return listener


def _let_in(listener: socket.socket) -> None:
    while True:
        try:
            listener.accept()[0].close()
        except OSError:
            return


@pytest.mark.slow
def test_a_client_that_the_server_sends_gets_nothing(tmp_path: Path, port: int) -> None:
    secret = tmp_path / "keys" / "berlin.key"
    secret.parent.mkdir()
    secret.write_text("secret")
    secret.chmod(0o600)
    before, shared = secret.stat(), tmp_path / "shared"
    shared.write_text("of SuperNode and SuperExec")
    inbox, home = tmp_path / "inbox", tmp_path / "room"
    for folder in (inbox, home):
        folder.mkdir()
    (inbox / "other.join").write_text("of another run")
    trainer = socket.socket(socket.AF_UNIX)
    trainer.bind(str(tmp_path / "trainer.sock"))
    trainer.listen()
    victim = subprocess.Popen(["sleep", "60"])
    with _listening() as elsewhere:
        other = elsewhere.getsockname()[1]
        named = [home, inbox, port, secret, tmp_path / "trainer.sock", other, victim.pid, shared]
        environment = {**os.environ, "FEDSYNC_PASSPHRASE": "words"}
        command = [sys.executable, "-c", CLIENT, *map(str, named)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    victim.kill()
    victim.wait()
    trainer.close()
    assert done.returncode == 0, done.stderr
    succeeded, worked = json.loads(done.stdout.splitlines()[-1])
    if landlock_abi() < NETWORK_ABI:
        del succeeded["asks another host"], succeeded["listens"]
    assert not [name for name, so in succeeded.items() if so]
    assert set(worked.values()) == {True}, worked
    after = secret.stat()
    assert (after.st_mode, after.st_mtime) == (before.st_mode, before.st_mtime) and not os.listxattr(secret)
    assert secret.read_text() == "secret" and (inbox / "a.join").exists()


@pytest.mark.slow
def test_flowers_program_runs_in_the_room_with_all_of_its_threads(tmp_path: Path, port: int) -> None:
    home, inbox, secret = tmp_path / "room", tmp_path / "inbox", tmp_path / "secret"
    inbox.mkdir()
    secret.write_bytes(bytes(32))
    (home / "tmp").mkdir(parents=True)
    (home / "left").symlink_to(secret)
    command = [*INTERPRETER, "fedsync.flower.launch", "superexec", "--room", str(home), str(inbox), "--insecure"]
    command += ["--runtime-api-address", f"127.0.0.1:{port}", "--superexec-auth-secret-file", str(secret)]
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    told = {**os.environ, "FEDSYNC_PASSPHRASE": "words", INBOX: str(inbox), ALLOWED: "{}", OWNER: str(owner.pid)}
    with (tmp_path / "log").open("w+b") as log:
        process = subprocess.Popen(command, env=told, stdout=log, stderr=log)
        try:
            started = b"Starting Flower SuperExec"
            wait_for(
                lambda: started in (tmp_path / "log").read_bytes() or process.poll() is not None, "it starts", 60.0
            )
            assert process.poll() is None, (tmp_path / "log").read_text()
            threads = [file.read_text() for file in Path(f"/proc/{process.pid}/task").glob("*/status")]
            assert threads and all("Seccomp:\t2" in each and "NoNewPrivs:\t1" in each for each in threads)
            assert b"FEDSYNC_PASSPHRASE" not in Path(f"/proc/{process.pid}/environ").read_bytes()
            assert not (home / "left").exists() and secret.exists(), "what others left there is gone"
            owner.kill()
            owner.wait()
            assert process.wait(30), "the room ends with its supervisor, however that ended"
        finally:
            owner.kill()
            owner.wait()
            process.kill()
            process.wait()
