"""Models of a run as files, where the run's code builds them in a room: for what an owner's command reads or writes.

The code runs in a training process (`fedsync.silo.room.process_start`). It returns tensors; this process writes files.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedsync.common.errors import RunError
from fedsync.common.files import OWNER_FILE, remove_tree
from fedsync.config.run_spec import RunSpec
from fedsync.model.layout import Layout, Vector
from fedsync.silo.owner.owner_policy import OwnerPolicy
from fedsync.silo.protocol import Identity
from fedsync.silo.room.checked import checked_layout, raise_failure
from fedsync.silo.room.process_start import StartedProcess
from fedsync.silo.room.room_messages import (
    BuildKeeper,
    FillModel,
    KeeperBuilt,
    ModelFilled,
    Part,
    RoomFailure,
    RoomReply,
    RoomRequest,
)
from fedsync.silo.session.trainer_folder import HOME

if TYPE_CHECKING:
    from fedsync.train.local_trainer import ModelKeeper

_MOST_BYTES = 2**36


@contextmanager
def keeper_of(identity: Identity, spec: RunSpec, owner: OwnerPolicy | None) -> Iterator[ModelKeeper]:
    """Yield the keeper of a run's model, as the trainer of ``identity`` built it, but on the CPU.

    The run's code runs in a room where the ``owner``'s rules confine training. Raises `ConfigError` if the model cannot
    be built here.
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
        told, _ = self._ask(BuildKeeper(identity.dump(), spec.dump()))
        if not isinstance(told, KeeperBuilt):
            raise RunError("the training process builds no model")
        self.layout: Layout = checked_layout(told.layout)

    def save_model(self, path: Path, model: Vector, private: bytes = b"") -> None:
        from fedsync.train.weights import save_values

        told, parts = self._ask(FillModel(), model, private)
        if not isinstance(told, ModelFilled) or len(parts) != 1:
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
        if isinstance(told, RoomFailure):
            self.end()
            raise_failure(told)
        return told, beside  # type: ignore[return-value]  # the channel receives nothing else
