"""Arrays of checkpoints: written once, linked where they are in a file already, and whole whenever the server dies."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedsync.core.actions import Commit
from fedsync.core.journal import JOURNAL
from fedsync.model import chunked_arrays
from fedsync.model.chunked_arrays import ArrayKeeper, digest, file_part, map_file
from fedsync.model.layout import Layout, Vector
from fedsync.model.plain_aggregator import PlainAggregator
from fedsync.server import array_files, checkpoints
from fedsync.server.array_files import ArrayFiles, in_own_file, read
from fedsync.server.checkpoints import FOLDER, Checkpoints, Origin, prepare

VALUES = 300


@pytest.fixture(autouse=True)
def _everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_arrays, "LARGE_BYTES", 1000)


class Killed(BaseException):
    """The server dies."""


def vector(*seed: int) -> Vector:
    return np.random.default_rng(seed).standard_normal(VALUES).astype(np.float32)


class Server:
    """An aggregator and its checkpoints, round after round: one of two updates is committed, the other waits."""

    def __init__(self, out: Path, *, required: bool = False, keep: int = 2) -> None:
        out.mkdir(exist_ok=True)
        (out / JOURNAL).touch()
        self.out = out
        self.aggregator = PlainAggregator(vector(0), keeper=ArrayKeeper(out / "arrays"))
        spec = json.dumps({"run": "first", "cipher": {"kind": "pad" if required else "plain"}})
        origin = Origin("config", spec, Layout(("x",), ((VALUES,),)))
        self.checkpoints = Checkpoints(out, origin, keep, required=required)
        self.begun = self.saved = -1
        self.models: dict[int, Vector] = {}

    def save(self, version: int) -> None:
        self.begun, self.models[version] = version, self.aggregator.model.copy()
        coordinator: Any = SimpleNamespace(version=version, state=lambda: {"version": version})
        self.checkpoints.save(coordinator, self.aggregator.state(), 0.0, 0, ())
        self.saved = version

    def round(self, version: int) -> None:
        for silo in "ab":
            self.aggregator.begin(f"{silo}/{version}")
            self.aggregator.put(silo, f"{silo}/{version}", vector(version, ord(silo)))
        late = {f"b/{version - 1}": 0.5} if version > 1 else {}
        self.aggregator.commit(Commit(version, {f"a/{version}": 0.5, **late}))
        self.save(version)

    def go(self, rounds: int) -> None:
        self.save(0)
        for version in range(1, rounds + 1):
            self.round(version)
        self.checkpoints.close()


def files(out: Path, suffix: str) -> set[str]:
    return {path.name for path in (out / FOLDER).glob(f"*{suffix}")}


def checked(server: Server) -> int:
    """Go on from what is on disk as another process would; the version, whose model and waiting update are whole."""
    moment = prepare(server.out, "config").moment
    other = PlainAggregator(np.zeros(VALUES, np.float32))
    other.restore(moment.aggregator)
    np.testing.assert_array_equal(other.model, server.models[moment.version])
    assert other.pending == ((f"b/{moment.version}",) if moment.version else ())
    for update in moment.aggregator["pending"].values():
        np.testing.assert_array_equal(update, vector(moment.version, ord("b")))
    return moment.version


def test_a_restored_aggregator_goes_on_as_the_one_that_died(tmp_path: Path) -> None:
    server = Server(tmp_path / "run")
    server.go(2)
    assert checked(server) == 2
    other = PlainAggregator(np.zeros(VALUES, np.float32), keeper=ArrayKeeper(tmp_path / "other"))
    other.restore(prepare(server.out, "config").moment.aggregator)
    for aggregator in (server.aggregator, other):
        aggregator.put("a", "a/3", vector(3, ord("a")))
        aggregator.commit(Commit(3, {"a/3": 0.25, "b/2": 0.75}))
    np.testing.assert_array_equal(other.model, server.aggregator.model)
    for aggregator in (server.aggregator, other):
        aggregator.rollback()
    np.testing.assert_array_equal(other.model, vector(0))


def test_what_is_in_a_file_is_linked_and_what_was_written_is_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path / "run", required=True)
    monkeypatch.setattr(array_files, "write_pieces", None)
    server.go(3)
    before = files(server.out, ".raw")
    # Version 0, to which a run may go back, and of two versions the model, the update that waits, and its base.
    assert len(before) == 6, "the base of 3 is the model of 2"
    assert {(server.out / FOLDER / name).stat().st_mode & 0o777 for name in before} == {0o600}
    hashed: list[object] = []
    monkeypatch.setattr(array_files, "digest", lambda value: hashed.append(value) or digest(value))
    server.round(4)
    assert len(before & files(server.out, ".raw")) == 4, "what only version 2 had is gone"
    assert len(hashed) == 2, "the model and the update that are new"


def test_what_changes_or_is_small_is_no_file(tmp_path: Path) -> None:
    still = vector(1)
    assert not in_own_file(still), "whoever may write to it will"
    still.flags.writeable = False
    assert in_own_file(still) and in_own_file(still.tobytes())
    assert not any(map(in_own_file, (still[::2], still[:9], b"", "a" * 5000)))


@pytest.mark.parametrize("value", [b"sealed" * 999, np.frombuffer(vector(3).tobytes(), np.float32)], ids=type)
def test_a_value_in_memory_comes_back(tmp_path: Path, value: array_files.Large) -> None:
    (name,) = ArrayFiles(tmp_path).write([value])
    found = read(tmp_path, name)
    assert type(found) is type(value)
    np.testing.assert_array_equal(found, value)
    assert isinstance(found, bytes) or file_part(found) is not None


def test_a_part_of_a_file_comes_back_as_that_part(tmp_path: Path) -> None:
    (tmp_path / "longer").write_bytes(vector(1).tobytes() + b"more")
    part = map_file(tmp_path / "longer", np.float32, 0, VALUES)
    (name,) = ArrayFiles(tmp_path).write([part])
    np.testing.assert_array_equal(read(tmp_path, name), vector(1))


@pytest.mark.parametrize("at_once", [False, True], ids=["beside", "at once"])
def test_at_whatever_moment_the_server_dies_a_whole_checkpoint_is_there(
    at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies before its first change of the disk, before its second, and so on.

    What is done beside training is done whenever it is, or all at once, and then it also dies in the midst of that.
    """
    versions = []
    for moment in range(1, 300):
        server = Server(tmp_path / str(moment))
        if at_once:
            server.checkpoints._disk = AtOnce()  # type: ignore[assignment]
        with monkeypatch.context() as patch:
            died = _dies_before(patch, moment)
            with contextlib.suppress(Killed):
                server.go(2)
            dead = died()
        if server.saved >= 0:
            versions.append(checked(server))
            assert server.saved <= versions[-1] <= server.begun
        if not dead:
            break
    assert not dead and set(versions) == {0, 1, 2}
    assert len(versions) > (25 if at_once else 10), "it changes the disk as often"


class AtOnce:
    """Does what it is given instead of having a thread do it."""

    def submit(self, work: Callable[..., None], *given: Any) -> None:
        work(*given)

    def shutdown(self) -> None: ...


def test_arrays_of_a_checkpoint_that_is_written_meanwhile_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a thread removes old files, the server writes two checkpoints, and dies before it has the second."""
    server, listed = Server(tmp_path / "run"), checkpoints._newest_first
    monkeypatch.setattr(server.checkpoints, "_settle", lambda *_: None)
    server.save(0)
    for version in range(1, 4):
        server.round(version)
    server.checkpoints._settled = 3

    def listing(folder: Path) -> list[Path]:
        files = listed(folder)
        monkeypatch.setattr(checkpoints, "_newest_first", listed)
        server.round(4)
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(checkpoints, "write_atomically", _die)
            server.round(5)
        return files

    monkeypatch.setattr(checkpoints, "_newest_first", listing)
    server.checkpoints._prune()
    monkeypatch.setattr(checkpoints, "_newest_first", listed)
    assert checked(server) == 4 and not (server.out / FOLDER / "1.ckpt").exists()


def _die(*_: Any, **__: Any) -> None:
    raise Killed


KILLED = """
import sys
from pathlib import Path
from tests.server.test_array_files import Server, vector
from fedsync.model import chunked_arrays

chunked_arrays.LARGE_BYTES = 1000
server = Server(Path(sys.argv[1]))
server.save(0)
for version in range(1, 100_000):
    server.round(version)
    (server.out / "journal.jsonl").open("ab").write(b"x")
    print(version, flush=True)
"""


@pytest.mark.slow
def test_a_server_that_is_killed_goes_on_from_the_last_checkpoint_that_it_wrote(tmp_path: Path) -> None:
    """A real process, killed where it happens to be; four times, the next one going on in the same folder."""
    out, draw = tmp_path / "run", np.random.default_rng(11)
    for _ in range(4):
        command = [sys.executable, "-c", KILLED, str(out)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2], text=True) as server:
            assert server.stdout is not None
            seen = [int(server.stdout.readline()) for _ in range(draw.integers(1, 30))]
            time.sleep(float(draw.uniform(0, 0.02)))
            server.kill()
            seen += [int(line) for line in server.stdout if line.endswith("\n")]
        moment = prepare(out, "config").moment
        assert moment.version in (seen[-1], seen[-1] + 1), "whoever was told of a version, a checkpoint has it"
        other = PlainAggregator(np.zeros(VALUES, np.float32))
        other.restore(moment.aggregator)
        (update,) = moment.aggregator["pending"].values()
        np.testing.assert_array_equal(update, vector(moment.version, ord("b")))
        shutil.rmtree(out / FOLDER)


def _dies_before(patch: pytest.MonkeyPatch, moment: int) -> Callable[[], bool]:
    """From this change of the disk on, nothing is changed any more; returns whether it has come to that."""
    done, unlink = 0, os.unlink

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            nonlocal done
            if change is unlink and not str(given[0]).endswith((".ckpt", ".raw")):
                return change(*given, **more)
            if threading.current_thread() is threading.main_thread():
                done += 1
            if done >= moment:
                raise Killed
            return change(*given, **more)

        return call

    for name in ("link", "replace", "fsync", "open", "unlink"):
        patch.setattr(os, name, counted(getattr(os, name)))
    return lambda: done >= moment


@pytest.mark.parametrize("damage", ["flipped", "torn", "gone"])
@pytest.mark.parametrize("of", ["model", "pending"])
def test_a_damaged_array_is_noticed_and_the_checkpoint_before_is_gone_on_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str, of: str
) -> None:
    server = Server(tmp_path / "run")
    server.go(3)
    value = server.aggregator.state()[of]
    path = server.out / FOLDER / f"{digest(value if of == 'model' else value['b/3']).hex()}.raw"
    data = bytearray(path.read_bytes())
    path.unlink()  # the array that is in use has the same file
    if damage != "gone":
        data[-1] ^= damage == "flipped"
        path.write_bytes(data[: len(data) - (damage == "torn")])
    assert checked(server) == 2
    assert f"3.ckpt: its array {path.name} is" in caplog.text
    assert not path.exists(), "nobody takes it for whole later"


@pytest.mark.parametrize("keep", [1, 2])
def test_older_checkpoints_stay_until_one_is_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int) -> None:
    server, slow, settle = Server(tmp_path / "run", keep=keep), threading.Event(), ArrayFiles.settle

    def waits(arrays: ArrayFiles, names: Any) -> None:
        slow.wait(20)
        settle(arrays, names)

    monkeypatch.setattr(ArrayFiles, "settle", waits)
    server.save(0)
    for version in range(1, 5):
        server.round(version)
    assert files(server.out, ".ckpt") == {f"{version}.ckpt" for version in range(5)}
    assert checked(server) == 4, "it outlives the process already"
    slow.set()
    server.checkpoints.close()
    assert files(server.out, ".ckpt") == {f"{version}.ckpt" for version in range(5 - keep, 5)}
    assert checked(server) == 4


def test_what_is_required_is_on_disk_before_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, seen, settle = Server(tmp_path / "run", required=True), list[set[str]](), ArrayFiles.settle

    def looks(arrays: ArrayFiles, names: Any) -> None:
        seen.append(files(server.out, ".ckpt"))
        settle(arrays, names)

    monkeypatch.setattr(ArrayFiles, "settle", looks)
    server.save(0)
    server.round(1)
    assert seen == [set(), {"0.ckpt"}], "the arrays of a checkpoint come before it"
    assert checked(server) == 1
