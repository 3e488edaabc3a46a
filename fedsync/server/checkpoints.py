"""What a server has to know to go on after its death, on disk before any silo hears of it.

A checkpoint is written after every commit and before the messages that follow from it go out, so no silo ever knows
a version of the model that the newest checkpoint does not. It says up to which byte the journal belongs to it. Going
on cuts the journal there, which is then continued: the silos that were here come to it as lost and joined again, so
the whole journal still replays.

Where the journal holds a commit that no whole checkpoint knows (one is torn, or could not be written), silos may know
a version that will be made anew with other updates. Then they must not go on with what they keep: the run gets
another identity, under which every silo's trainer begins anew. An encrypted run ends where a checkpoint cannot be
written. So unless one is torn, its server died before anybody heard of that commit, and silos go on.

A file is a SHA-256 of the rest, one line of JSON with the number of the format, and a mapping of names to values. What
changes while a run goes on says itself which names it has (`fedsync.core.checkpoint_state`); frozen values, such as a policy's
state, are written as their class and their fields by name. So the order of fields and private attributes are no part of
the format. Models, updates and sums are files of their own beside it (`fedsync.server.array_files`), which the line of
JSON names, and only what is new is written.

When `Checkpoints.save` returns, what it wrote outlives this process. In the clear it comes to outlive the machine
beside training: journal, arrays and file are handed to the disk meanwhile, in this order, by a thread that then removes
older checkpoints, which stay until then. A machine that dies may leave a newer checkpoint than its journal: that one
counts as damaged.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from fedsync import __version__
from fedsync.common import foreign
from fedsync.common.errors import ConfigError, RunError
from fedsync.common.files import (
    OWNER_FILE,
    private_folder,
    read_private,
    remove_unfinished,
    settle_file,
    write_atomically,
)
from fedsync.common.run_claim import CHECKPOINTS
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit, Dispatch, Evaluate, Rollback
from fedsync.core.coordinator import Coordinator
from fedsync.core.events import OperatorAsked, SiloJoined, SiloLost
from fedsync.core.journal import JOURNAL, JournalEntry
from fedsync.model.layout import Layout
from fedsync.server.array_files import LASTING_BYTES, ArrayFiles, ArrayName, Damaged, read
from fedsync.server.named_pickle import dump, load

logger = foreign.logger(__name__)

FOLDER = CHECKPOINTS
"""Name of the folder, in that of the run's files."""

_MOST_NAME = 40
KEPT = 3
"""Newest checkpoints that are kept."""

FORMAT = 17
"""Of the files; another one is refused. Also raised where a server optimizer goes on otherwise from the same state."""

_DIGEST_BYTES = 32
_SUFFIX, _TORN = ".ckpt", ".torn"


@dataclass(frozen=True, slots=True)
class Origin:
    """What stays the same for all of a run.

    Args:
        config: what `digest` says of its configuration.
        spec: the run's specification as JSON, as silos get it; with an identity, by which silos keep what they know.
        layout: of what travels of the model.
        kept: names of its tensors that do not travel.
        frozen: digest of those that nobody trains, as in `ModelForm`; None as long as it is not known.
    """

    config: str
    spec: str
    layout: Layout
    kept: tuple[str, ...] = ()
    frozen: str | None = None


@dataclass(frozen=True, slots=True)
class Moment:
    """A run between two batches of events.

    Args:
        version: of the model.
        elapsed_s: since the run began.
        position: bytes of the journal up to here.
        timers: when the coordinator wants to be asked again [s since the run began].
        silos: names of those that are here.
        evaluating: what all silos are asked, where the run is about to end.
        coordinator: what `fedsync.core.coordinator.Coordinator.state` returned.
        aggregator: what `fedsync.model.transfer.Aggregator.state` returned.
    """

    version: int
    elapsed_s: float
    position: int
    timers: tuple[float, ...]
    silos: tuple[str, ...]
    evaluating: Evaluate | None
    coordinator: Mapping[str, Any]
    aggregator: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A run at a moment."""

    origin: Origin
    moment: Moment


class Checkpoints:
    """Writes checkpoints into the folder of a run.

    Args:
        out: folder of the run's files.
        origin: of the run.
        keep: how many of the newest are kept.
        resumed: the moment from which the run goes on, if it does.
        required: the run ends where one cannot be written. Under encryption a silo follows one chain of sums: what was
            sent and forgotten could never be made up for.
    """

    def __init__(
        self, out: Path, origin: Origin, keep: int = KEPT, resumed: Moment | None = None, *, required: bool = False
    ) -> None:
        self._folder, self._journal = out / FOLDER, out / JOURNAL
        self._origin = origin
        self._keep = keep
        self._begun = resumed is not None
        self._evaluating = None if resumed is None else resumed.evaluating
        self._silos = {} if resumed is None else dict.fromkeys(resumed.silos)
        self._failed = False
        self._required = required
        self._arrays = ArrayFiles(self._folder, LASTING_BYTES if required else inf)
        self._disk = None if required else ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._newest = self._settled = -1

    def agree(self, frozen: str | None) -> None:
        """Write from now on which frozen tensors silos have."""
        self._origin = replace(self._origin, frozen=frozen)

    def due(self, entry: JournalEntry | None) -> bool:
        """Whether silos may learn from an entry what no checkpoint has; None stands for the beginning of the run.

        That is a version of the model, and at first that there is one: what silos are sent with it is made then. And
        what they are asked at the end: nobody evaluates the test split for a run that may still decide otherwise.
        """
        if entry is None:
            return True
        begun = self._begun
        for event in entry.events:
            if isinstance(event, SiloJoined):
                self._silos[event.silo] = None
            elif isinstance(event, SiloLost):
                self._silos.pop(event.silo, None)
        for action in entry.actions:
            self._begun |= isinstance(action, Dispatch)
            if isinstance(action, Evaluate):
                self._evaluating = action
        if any(isinstance(event, OperatorAsked) for event in entry.events):
            return True  # what an operator is told would be done after a restart too
        return self._begun > begun or any(isinstance(action, Commit | Rollback | Evaluate) for action in entry.actions)

    def save(
        self,
        coordinator: Coordinator,
        aggregator: Mapping[str, Any],
        elapsed_s: float,
        position: int,
        timers: tuple[float, ...],
    ) -> None:
        """Write one, and remove what is older than those kept; arguments as `Moment`'s.

        A run goes on without checkpoints, unless they are required: where one cannot be written, the log says so once.

        Raises:
            RunError: it cannot be written, and is required.
        """
        silos = tuple(self._silos)
        decided = coordinator.state()
        moment = Moment(coordinator.version, elapsed_s, position, timers, silos, self._evaluating, decided, aggregator)
        try:
            if self._required:
                self._settle_journal()
            names = _write(self._arrays, self._folder, Checkpoint(self._origin, moment), settle=self._required)
        except ConfigError as error:
            if self._required:
                raise RunError(f"no checkpoint can be written, and silos may not know more than it: {error}") from error
            if not self._failed:
                logger.warning("the run goes on without checkpoints, and could not be resumed from here: %s", error)
            self._failed = True
            return
        if self._failed:
            logger.warning("checkpoints can be written again")
            self._failed = False
        self._newest = coordinator.version
        if self._disk is None:
            self._settled = self._newest
            self._prune()
        else:
            self._disk.submit(self._settle, self._newest, names)

    def close(self) -> None:
        """Wait until the newest checkpoint outlives this machine; nothing is saved after that."""
        if self._disk is not None:
            self._disk.shutdown()
            self._prune()

    def _settle(self, version: int, names: Sequence[ArrayName]) -> None:
        """Hand a checkpoint to the disk, and remove older ones; where the disk is slow, some are passed over."""
        if version < self._newest:
            return
        try:
            self._settle_journal()
            self._arrays.settle(names)
            settle_file(self._folder / f"{version}{_SUFFIX}")
            self._settled = version
        except ConfigError as error:
            logger.warning("the newest checkpoint may not outlive this machine: %s", error)
        self._prune()

    def _settle_journal(self) -> None:
        """What a checkpoint says of the journal has to be there if the checkpoint is."""
        if self._journal.exists():
            settle_file(self._journal)

    def _prune(self) -> None:
        """Remove what is older than the checkpoints that are kept, once one of these would outlive the machine."""
        files = _newest_first(self._folder)
        kept = files[: self._keep]
        if len(files) > self._keep and self._settled >= int(kept[-1].stem):
            for old in files[self._keep :]:
                old.unlink(missing_ok=True)
            self._arrays.prune([name for file in kept for name in _named_in(file)])


def new_identity(name: str) -> str:
    """A new run's name at the silos: the strategy's name, by which people know it, and a unique part."""
    return f"{re.sub(r'[^A-Za-z0-9_.]+', '-', name)[:_MOST_NAME]}-{secrets.token_hex(8)}"


def digest(config: StrategyConfig, cluster: ClusterConfig | None) -> str:
    """Hash of a strategy and of the machines that silos emulate."""
    silos = None if cluster is None else cluster.entries()
    text = json.dumps([config.model_dump(mode="json"), silos], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def prepare(out: Path, config: str) -> Checkpoint:
    """The moment from which the run in ``out`` goes on; the journal ends there when this returns.

    Asked twice it says the same, also where the first time was cut short.

    Args:
        out: folder of the run's files.
        config: what `digest` says of the configuration that is to go on.

    Raises:
        ConfigError: there is no whole checkpoint, or it is of another configuration or version of FedSync.
    """
    checkpoint = _newest_whole(out, config)
    remove_unfinished(out / FOLDER)
    journal, position = out / JOURNAL, checkpoint.moment.position
    if _commits_after(journal, position) and _may_be_known(out / FOLDER, checkpoint):
        logger.warning("silos begin anew: they may know versions of the model that no checkpoint does")
        checkpoint = _renamed(checkpoint)
        _write(ArrayFiles(out / FOLDER), out / FOLDER, checkpoint, settle=True)
    os.truncate(journal, position)
    return checkpoint


def newest_version(out: Path) -> int | None:
    """Version of the model in the newest checkpoint of a run, whole or not; None where there is none."""
    newest = _newest_first(out / FOLDER)
    return int(newest[0].stem) if newest else None


def clear(out: Path) -> None:
    """Remove the checkpoints of a run that has come to its end."""
    shutil.rmtree(out / FOLDER, ignore_errors=True)


def _may_be_known(folder: Path, checkpoint: Checkpoint) -> bool:
    """Whether silos may have heard of what was committed after this checkpoint."""
    torn = any(int(file.stem) > checkpoint.moment.version for file in folder.glob(f"*{_TORN}"))
    return torn or json.loads(checkpoint.origin.spec)["cipher"]["kind"] == "plain"


def _renamed(checkpoint: Checkpoint) -> Checkpoint:
    """The same run under another identity."""
    known = json.loads(checkpoint.origin.spec)
    name = str(known["run"]).rpartition("-")[0] or known["run"]
    names = {"run": new_identity(name), "began": known.get("began") or known["run"]}
    spec = json.dumps({**known, **names}, separators=(",", ":"))
    return replace(checkpoint, origin=replace(checkpoint.origin, spec=spec))


def _newest_whole(out: Path, config: str) -> Checkpoint:
    files = _newest_first(out / FOLDER)
    if not files:
        remedy = "Name the folder of a run that was cut off; its checkpoints go when it ends well"
        raise ConfigError(str(out), "there is no checkpoint to go on from", remedy)
    journal = out / JOURNAL
    length = journal.stat().st_size if journal.exists() else 0
    for file in files:
        try:
            checkpoint = _read(file, config)
            if length < checkpoint.moment.position:
                raise Damaged(f"{journal} is shorter than its {checkpoint.moment.position} bytes")
            return checkpoint
        except Damaged as error:
            logger.warning("%s: %s; going on from the one before", file, error)
            file.rename(file.with_suffix(_TORN))
    raise ConfigError(str(out / FOLDER), "no checkpoint is whole", "Start the run anew")


def _write(arrays: ArrayFiles, folder: Path, checkpoint: Checkpoint, *, settle: bool) -> Sequence[ArrayName]:
    """Write a checkpoint and what is new of its arrays, whose names it returns; ``settle`` waits for the disk."""
    private_folder(folder)
    pickled, large = dump(checkpoint, arrays.least)
    names = arrays.write(large)
    if settle:
        arrays.settle(names)
    about = {"format": FORMAT, "fedsync": __version__, "config": checkpoint.origin.config}
    head = json.dumps({**about, "arrays": [[name.dtype, name.shape, name.sha256] for name in names]})
    body = head.encode() + b"\n" + pickled
    path = folder / f"{checkpoint.moment.version}{_SUFFIX}"
    write_atomically(path, hashlib.sha256(body).digest() + body, OWNER_FILE, settle=settle)
    return names


def _read(path: Path, config: str) -> Checkpoint:
    data = memoryview(read_private(path, path.stat().st_size))
    body = data[_DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != data[:_DIGEST_BYTES]:
        raise Damaged("torn or corrupt")
    line, _, pickled = bytes(body).partition(b"\n")
    head = json.loads(line)
    if (head["format"], head["fedsync"]) != (FORMAT, __version__):
        found = f"written by FedSync {head['fedsync']}, format {head['format']}"
        raise ConfigError(str(path), found, f"Resume with that version; this is {__version__}, format {FORMAT}")
    if head["config"] != config:
        remedy = "Resume with the config.yaml and silos.yaml beside it, unchanged"
        raise ConfigError(str(path), "of another configuration", remedy)
    arrays = [read(path.parent, name) for name in _names(head)]
    # What a pickle says is done, whatever it is. This one was written by this program for itself: `read_private` saw
    # to it that nobody else could have changed the file, and nothing of it ever came over a network.
    checkpoint: Checkpoint = load(pickled, arrays)
    return checkpoint


def _named_in(file: Path) -> list[ArrayName]:
    """The arrays of a checkpoint; none, where it is torn."""
    with file.open("rb") as opened:
        opened.seek(_DIGEST_BYTES)
        try:
            return _names(json.loads(opened.readline()))
        except (ValueError, KeyError):
            return []


def _names(head: Mapping[str, Any]) -> list[ArrayName]:
    return [ArrayName(dtype, tuple(shape), sha256) for dtype, shape, sha256 in head["arrays"]]


def _newest_first(folder: Path) -> list[Path]:
    found = [path for path in folder.glob(f"*{_SUFFIX}") if path.stem.isdecimal()]
    return sorted(found, key=lambda path: int(path.stem), reverse=True)


def _commits_after(journal: Path, position: int) -> bool:
    """Whether a version of the model was made after this byte of the journal."""
    with journal.open("rb") as file:
        file.seek(position)
        for line in file:
            try:
                actions = json.loads(line)["actions"]
            except ValueError:  # its writer died in the middle of it, so before anything was sent
                continue
            if any(action["type"] in ("Commit", "Rollback") for action in actions):
                return True
    return False
