"""Checkpoints: the server's state on disk, from which a run resumes after a crash.

A checkpoint is written after every commit, before the messages that follow from it are sent. So silos have a version
that no checkpoint has only if the disk is full or the machine dies. A resumption truncates the journal to the recorded
position and continues it: the former silos count as lost and joined again, so the whole journal still replays.

If the journal has a commit that no intact checkpoint has, the version will be made again from other updates. Silos that
may have the old version must not use their stored state. So the run gets a new identity, and every silo's trainer
begins anew. No silo has the version if only the process died, before the checkpoint was written: the file ``boot``
holds since which boot of the machine every version has a checkpoint. An encrypted run sends no version without one.

A file has three parts: the SHA-256 of the rest; one line of JSON with the format number; a mapping of names to values.
Objects that change during a run define their own names (`fedsync.core.state`); frozen values are written as class and
fields. Large arrays have their own files (`fedsync.server.array_files`), which the JSON line names.

When `Checkpoints.save` returns, its files survive a crash of the process. Without encryption, a thread makes them
survive a crash of the machine while training continues. It flushes journal, arrays and checkpoint to disk, in this
order, and then removes older checkpoints. A checkpoint that is newer than its journal counts as damaged.
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
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

from fedsync import __version__
from fedsync.common import foreign
from fedsync.common.errors import ConfigError, RunError
from fedsync.common.files import (
    DIGEST_BYTES,
    OWNER_FILE,
    digested,
    private_folder,
    read_private,
    remove_unfinished,
    settle_file,
    undigested,
    write_atomically,
)
from fedsync.common.run_claim import CHECKPOINTS as FOLDER
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit, Dispatch, Evaluate, Rollback
from fedsync.core.coordinator import Coordinator
from fedsync.core.events import OperatorAsked, SiloJoined, SiloLost
from fedsync.core.journal import JOURNAL, JournalEntry, read_journal
from fedsync.model.layout import Layout
from fedsync.server.array_files import LASTING_BYTES, ArrayFiles, ArrayName, Damaged, dump, load, read

logger = foreign.logger(__name__)

_MOST_NAME = 40
KEPT = 3

FORMAT = 28
"""Format of the files; others are refused. Raise it also if a server optimizer changes its steps for the same state."""

_SUFFIX, _TORN, _BOOT = ".ckpt", ".torn", "boot"


@dataclass(frozen=True, slots=True)
class Origin:
    """Properties of a run that never change.

    ``config`` is the `digest` of the configuration. ``spec`` is the specification that silos receive, as JSON.
    ``layout`` has the tensors that travel, ``ties`` their further names, and ``kept`` the names of all others.
    ``frozen`` is the digest of the frozen tensors, as in `ModelForm`; None while unknown.
    """

    config: str
    spec: str
    layout: Layout
    kept: tuple[str, ...] = ()
    frozen: str | None = None
    ties: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Moment:
    """State of a run between two batches of events.

    ``elapsed_s`` and ``timers`` (the coordinator's wake-up times) count from the run's begin [s]. ``position`` is the
    length of the journal [bytes]. While silos answer the final evaluation ``evaluating``, no silo has an order that
    matters.
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
    """Checkpoint of a run."""

    origin: Origin
    moment: Moment


class Checkpoints:
    """Writer of checkpoints in the folder of a run, ``out``; keeps the ``keep`` newest.

    With ``required``, the run ends if a checkpoint cannot be written. Encryption needs this: a silo follows one chain
    of sums, and a sum that was sent and then forgotten could never be replaced.
    """

    def __init__(
        self, out: Path, origin: Origin, keep: int = KEPT, resumed: Moment | None = None, *, required: bool = False
    ) -> None:
        self._folder, self._journal = out / FOLDER, out / JOURNAL
        self._origin, self._keep, self._required = origin, keep, required
        self._begun = resumed is not None
        self._evaluating = None if resumed is None else resumed.evaluating
        self._silos = {} if resumed is None else dict.fromkeys(resumed.silos)
        self._failed = False
        self._arrays = ArrayFiles(self._folder, LASTING_BYTES if required else inf)
        self._disk = None if required else ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._newest = self._settled = -1

    def agree(self, frozen: str | None) -> None:
        self._origin = replace(self._origin, frozen=frozen)

    def due(self, entry: JournalEntry | None) -> bool:
        """Whether silos may learn from an entry something that no checkpoint has; None is the beginning of the run.

        This holds for a new version of the model, for the first order (it makes the first payloads), and for the final
        evaluation: silos must not use the test split for a run that may still continue.
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
            if isinstance(action, Dispatch):
                # Silos have answered the last evaluation, and work again: after a restart they must join anew.
                self._begun, self._evaluating = True, None
            elif isinstance(action, Evaluate):
                self._evaluating = action
        if any(isinstance(event, OperatorAsked) for event in entry.events):
            return True  # an answer to an operator must still hold after a restart
        return self._begun > begun or any(isinstance(action, Commit | Rollback | Evaluate) for action in entry.actions)

    def save(
        self,
        coordinator: Coordinator,
        aggregator: Mapping[str, Any],
        elapsed_s: float,
        position: int,
        timers: tuple[float, ...],
    ) -> None:
        """Write a checkpoint, and remove old ones; for the arguments see `Moment`. If the disk fails, raise `RunError`
        if checkpoints are required; else the run continues, and the log says so once.
        """
        silos = tuple(self._silos)
        decided = coordinator.state()
        moment = Moment(coordinator.version, elapsed_s, position, timers, silos, self._evaluating, decided, aggregator)
        try:
            if self._required:
                self._settle_journal()
            names = _write(self._arrays, self._folder, Checkpoint(self._origin, moment), settle=self._required)
            if self._failed or self._newest < 0:
                write_atomically(self._folder / _BOOT, _boot(), OWNER_FILE, settle=False)
        except ConfigError as error:
            if self._required:
                raise RunError(f"no checkpoint can be written, and silos may have no later one: {error}") from error
            if not self._failed:
                logger.warning("the run continues without checkpoints, and cannot be resumed from here: %s", error)
            self._failed = True
            (self._folder / _BOOT).unlink(missing_ok=True)  # possible on a full disk
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
        """Wait until the newest checkpoint would survive a crash of the machine; call no `save` after it."""
        if self._disk is not None:
            self._disk.shutdown()
            self._prune()

    def _settle(self, version: int, names: Sequence[ArrayName]) -> None:
        """Flush a checkpoint to disk, and remove older ones; on a slow disk, some checkpoints are skipped."""
        if version < self._newest:
            return
        try:
            self._settle_journal()
            self._arrays.settle(names)
            settle_file(self._folder / f"{version}{_SUFFIX}")
            self._settled = version
        except ConfigError as error:
            logger.warning("the newest checkpoint may be lost if this machine fails: %s", error)
        self._prune()

    def _settle_journal(self) -> None:
        if self._journal.exists():
            settle_file(self._journal)

    def _prune(self) -> None:
        """Remove old checkpoints, if one of the kept checkpoints would survive a crash of the machine."""
        files = _newest_first(self._folder)
        kept = files[: self._keep]
        if len(files) > self._keep and self._settled >= int(kept[-1].stem):
            for old in files[self._keep :]:
                old.unlink(missing_ok=True)
            self._arrays.prune(lambda: [name for file in _newest_first(self._folder) for name in _named_in(file)])


def new_identity(name: str) -> str:
    return f"{re.sub(r'[^A-Za-z0-9_.]+', '-', name)[:_MOST_NAME]}-{secrets.token_hex(8)}"


def _settings(config: StrategyConfig, cluster: ClusterConfig | None) -> tuple[dict[str, Any], Any]:
    return config.model_dump(mode="json"), None if cluster is None else cluster.entries()


def digest(config: StrategyConfig, cluster: ClusterConfig | None) -> str:
    text = json.dumps(_settings(config, cluster), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def resumed(out: Path, config: StrategyConfig, cluster: ClusterConfig | None) -> Checkpoint:
    """Prepare as `prepare`; the error for another configuration names the first setting that differs."""
    try:
        return prepare(out, digest(config, cluster))
    except _OtherConfig as error:
        header = read_journal(out / JOURNAL)[0] if (out / JOURNAL).exists() else {}
        began, asked = {"": header.get("config"), "silos": header.get("silos")}, _settings(config, cluster)
        changes = [_change(old, now, key) for (key, old), now in zip(began.items(), asked, strict=True) if old != now]
        if not header or not changes:
            raise
        raise ConfigError(error.place, f"{error.problem}: {changes[0]}", error.remedy) from None


def _change(before: Any, now: Any, key: str) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        name = min(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        return _change(before.get(name), now.get(name), f"{key}.{name}".removeprefix("."))
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        at = next(at for at, each in enumerate(before) if each != now[at])
        return _change(before[at], now[at], f"{key}[{at}]")
    return f"{key}: {json.dumps(before):.80}, now {json.dumps(now):.80}"


class _OtherConfig(ConfigError):
    """Error: a checkpoint of another configuration."""


def prepare(out: Path, config: str) -> Checkpoint:
    """Return the checkpoint from which the run in ``out`` resumes, and truncate the journal to its position.

    A repeated call returns the same checkpoint, also after an interruption, but a new identity if a later one is
    damaged. `ConfigError` if none is intact, or of another FedSync, or another configuration than that of ``config``.
    """
    checkpoint = _newest_whole(out, config)
    remove_unfinished(out / FOLDER)
    journal, position = out / JOURNAL, checkpoint.moment.position
    if _may_be_known(out / FOLDER, checkpoint, _commits_after(journal, position)):
        logger.warning("silos begin anew: they may have versions of the model that are in no checkpoint")
        checkpoint = _renamed(checkpoint)
        _write(ArrayFiles(out / FOLDER), out / FOLDER, checkpoint, settle=True)
    os.truncate(journal, position)
    return checkpoint


def newest_version(out: Path) -> int | None:
    """Return the model version of a run's newest checkpoint, damaged or not; None if there was none."""
    newest = _newest_first(out / FOLDER, (_SUFFIX, _TORN))
    return int(newest[0].stem) if newest else None


def clear(out: Path) -> None:
    shutil.rmtree(out / FOLDER, ignore_errors=True)


def _may_be_known(folder: Path, checkpoint: Checkpoint, commits: int) -> bool:
    """Whether silos may have learned of ``commits`` after this checkpoint."""
    torn = any(int(file.stem) > checkpoint.moment.version for file in folder.glob(f"*{_TORN}"))
    if torn or json.loads(checkpoint.origin.spec)["cipher"]["kind"] != "plain":
        return torn
    # The journal has one commit more if the process dies while it writes the checkpoint.
    return commits > 1 or (commits == 1 and _boot() not in [file.read_bytes() for file in folder.glob(_BOOT)])


def _boot() -> bytes:
    return Path("/proc/sys/kernel/random/boot_id").read_bytes()


def _renamed(checkpoint: Checkpoint) -> Checkpoint:
    known = json.loads(checkpoint.origin.spec)
    name = str(known["run"]).rpartition("-")[0] or known["run"]
    names = {"run": new_identity(name), "began": known.get("began") or known["run"]}
    spec = json.dumps({**known, **names}, separators=(",", ":"))
    return replace(checkpoint, origin=replace(checkpoint.origin, spec=spec))


def _newest_whole(out: Path, config: str) -> Checkpoint:
    files = _newest_first(out / FOLDER)
    if newest_version(out) is None:
        remedy = "Name the folder of a run that was cut off; a run that ends normally removes its checkpoints"
        raise ConfigError(str(out), "there is no checkpoint to resume from", remedy)
    journal = out / JOURNAL
    length = journal.stat().st_size if journal.exists() else 0
    for file in files:
        try:
            checkpoint = _read(file, config)
            if length < checkpoint.moment.position:
                raise Damaged(f"{journal} is shorter than its {checkpoint.moment.position} bytes")
            return checkpoint
        except Damaged as error:
            logger.warning("%s: %s; resuming from the checkpoint before", file, error)
            file.rename(file.with_suffix(_TORN))
    remedy = "Start another run; initial_model may name best.pt of this one"
    raise ConfigError(str(out / FOLDER), "no checkpoint is whole", remedy)


def _write(arrays: ArrayFiles, folder: Path, checkpoint: Checkpoint, *, settle: bool) -> Sequence[ArrayName]:
    """Write a checkpoint and its new arrays; return the arrays' names. ``settle`` waits for the disk."""
    private_folder(folder)
    pickled, large = dump(checkpoint, arrays.least)
    names = arrays.write(large)
    if settle:
        arrays.settle(names)
    about = {"format": FORMAT, "fedsync": __version__, "config": checkpoint.origin.config}
    head = json.dumps({**about, "arrays": [[name.dtype, name.shape, name.sha256] for name in names]})
    body = head.encode() + b"\n" + pickled
    path = folder / f"{checkpoint.moment.version}{_SUFFIX}"
    write_atomically(path, digested(body), OWNER_FILE, settle=settle)
    return names


def _read(path: Path, config: str) -> Checkpoint:
    data = memoryview(read_private(path, path.stat().st_size))
    body = undigested(data)
    if body is None:
        raise Damaged("torn or corrupt")
    line, _, pickled = bytes(body).partition(b"\n")
    head = json.loads(line)
    if (head["format"], head["fedsync"]) != (FORMAT, __version__):
        found = f"written by FedSync {head['fedsync']}, format {head['format']}"
        raise ConfigError(str(path), found, f"Resume with that version; this is {__version__}, format {FORMAT}")
    if head["config"] != config:
        remedy = f"Resume with the settings that the run began with; {path.parents[1]} has them in config.yaml"
        raise _OtherConfig(str(path), "of another configuration", remedy)
    arrays = [read(path.parent, name) for name in _names(head)]
    # Loading a pickle executes code. This file was written by this program for itself: `read_private` has checked that
    # no other user could change it, and none of it was received over a network.
    checkpoint: Checkpoint = load(pickled, arrays)
    return checkpoint


def _named_in(file: Path) -> list[ArrayName]:
    with file.open("rb") as opened:
        opened.seek(DIGEST_BYTES)
        try:
            return _names(json.loads(opened.readline()))
        except (ValueError, KeyError):
            return []


def _names(head: Mapping[str, Any]) -> list[ArrayName]:
    return [ArrayName(dtype, tuple(shape), sha256) for dtype, shape, sha256 in head["arrays"]]


def _newest_first(folder: Path, suffixes: Sequence[str] = (_SUFFIX,)) -> list[Path]:
    found = [path for suffix in suffixes for path in folder.glob(f"*{suffix}") if path.stem.isdecimal()]
    return sorted(found, key=lambda path: int(path.stem), reverse=True)


def _commits_after(journal: Path, position: int) -> int:
    commits = 0
    with journal.open("rb") as file:
        file.seek(position)
        for line in file:
            try:
                actions = json.loads(line)["actions"]
            except ValueError:  # the process died while writing the line, so before it sent any message
                continue
            commits += any(action["type"] in ("Commit", "Rollback") for action in actions)
    return commits
