"""Start and end of a silo's training process, for runs and for the owner's command that exports a model.

In an export, the training process runs the run's code and returns tensors; the command's process writes the files.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

from fedsync.common import foreign
from fedsync.common.environment import FLOWER_IDS
from fedsync.common.errors import RunError
from fedsync.common.files import OWNER_FILE, remove_tree
from fedsync.common.processes import INTERPRETER, start_apart
from fedsync.common.sandbox.confinement import emptied
from fedsync.common.sandbox.named_code import CONFIRMED
from fedsync.common.sandbox.path_sandbox import ALLOWED, Fence, allowed_here
from fedsync.config.run_spec import RunSpec
from fedsync.model.layout import Layout, Vector
from fedsync.silo.owner.owner_policy import OwnerPolicy
from fedsync.silo.protocol import Identity
from fedsync.silo.room import room_messages as messages
from fedsync.silo.room.room_messages import Part, RoomChannel, RoomReply, RoomRequest, checked_layout, raise_failure
from fedsync.silo.session.trainer_folder import HOME

if TYPE_CHECKING:
    from fedsync.train.local_trainer import ModelKeeper

_PROGRAM = "fedsync.silo.room.program"
_OWN = ("data", "never", "code_files", "reviewers")
_END_S, _MOST_LOG = 5.0, 2**16


class StartedProcess:
    """A started training process with its folder ``home``, which is emptied first; it ends with this object.
    `ConfigError` if the folder cannot be emptied, or a data folder holds a second name of a closed file.
    """

    def __init__(self, home: Path, owner: OwnerPolicy) -> None:
        emptied(home)
        fence = Fence(tuple(owner.data or ()), tuple(owner.never))
        fence.check_names()
        ours, theirs = socket.socketpair()
        with theirs:
            command = [*INTERPRETER, _PROGRAM, str(theirs.fileno())]
            self._process = start_apart(command, subprocess.PIPE, _environment(home), (theirs.fileno(),))
        ours.sendall(json.dumps([str(home), [str(each) for each in fence.ways()]]).encode() + b"\n")
        self.channel = RoomChannel(ours, RoomRequest, RoomReply, trusted=False)
        assert self._process.stdout is not None
        threading.Thread(target=_log, args=(self._process.stdout,), daemon=True).start()
        self.end = weakref.finalize(self, _end, self._process, self.channel)
        """Kills the process and all processes that it started."""

    def exit_code(self, wait_s: float = 0.0) -> int | None:
        if wait_s > 0:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_s)
        return self._process.poll()


def _environment(home: Path) -> Mapping[str, str]:
    from fedsync.cipher.keys.passphrase import NAMED_BY

    secret = os.environ.get(NAMED_BY, "")
    kept = {key: value for key, value in os.environ.items() if key != secret and not key.startswith("FEDSYNC_")}
    kept[FLOWER_IDS] = os.environ.get(FLOWER_IDS, "")
    allowed = allowed_here()
    kept[ALLOWED] = json.dumps({key: allowed[key] for key in _OWN if key in allowed})
    if CONFIRMED in os.environ:  # the original is where no process of the room may read
        kept[CONFIRMED] = str(shutil.copy(Path(os.environ[CONFIRMED]), home / "approval.json"))
    return kept


def _log(output: IO[bytes]) -> None:
    """Copy the process's output to the log, indented, so that none of it passes as a record of the session's."""
    with output:
        while data := output.readline(_MOST_LOG):
            line = foreign.shown(data.decode("utf-8", "replace").removesuffix("\n"), None)
            with suppress(OSError, ValueError):
                sys.stderr.buffer.write(f"  | {line}\n".encode())
                sys.stderr.buffer.flush()


def _end(process: subprocess.Popen[bytes], channel: RoomChannel) -> None:
    channel.close()
    process.send_signal(signal.SIGTERM)  # the guard then kills its whole group
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


_MOST_BYTES = 2**36


@contextmanager
def keeper_of(identity: Identity, spec: RunSpec, owner: OwnerPolicy | None) -> Iterator[ModelKeeper]:
    """Yield the keeper of a run's model, as the trainer of ``identity`` built it, but on the CPU. The run's code runs
    in a room where the ``owner``'s rules confine training. `ConfigError` if the model cannot be built here.
    """
    identity = replace(identity, device="cpu")  # the device of the training may be gone
    if owner is None or not owner.confines:
        from fedsync.silo.session.silo_setup import local_keeper  # imports torch, which takes seconds

        yield local_keeper(spec, identity)
        return
    with room_folder() as folder:
        keeper = _RoomKeeper(identity, spec, owner, folder / HOME)
        try:
            yield keeper
        finally:
            keeper.end()


@contextmanager
def room_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="fedsync-"))
    try:
        yield folder
    finally:
        remove_tree(folder)


class _RoomKeeper:
    def __init__(self, identity: Identity, spec: RunSpec, owner: OwnerPolicy, home: Path) -> None:
        self._process = StartedProcess(home, owner)
        told, _ = self._ask(messages.BuildKeeper(identity.dump(), spec.dump()))
        if not isinstance(told, Layout):
            raise RunError("the training process builds no model")
        self.layout = checked_layout(told)

    def save_model(self, path: Path, model: Vector, private: bytes = b"") -> None:
        from fedsync.train.weights import save_values

        told, parts = self._ask(messages.FillModel(), model, private)
        if not isinstance(told, messages.ModelFilled) or len(parts) != 1:
            raise RunError("the training process fills no model")
        save_values(path, told.tensors, parts[0], OWNER_FILE)

    def end(self) -> None:
        self._process.end()

    def _ask(self, asked: RoomRequest, *parts: Vector | bytes) -> tuple[RoomReply, list[Part]]:
        channel = self._process.channel
        try:
            channel.send(asked, *parts)
            told, beside = channel.receive((_MOST_BYTES,))
        except (EOFError, OSError) as error:
            self.end()
            raise RunError(f"the training process ended before it answered: {error}") from error
        if isinstance(told, messages.RoomFailure):
            self.end()
            raise_failure(told)
        return told, beside  # type: ignore[return-value]  # the channel receives nothing else
