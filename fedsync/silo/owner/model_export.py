"""The model of an encrypted run, from where it is: the silos."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fedsync.common.checksums import file_digest, undigested
from fedsync.common.errors import ConfigError, RunError
from fedsync.common.files import write_atomically
from fedsync.config.run_spec import RunSpec
from fedsync.config.silo_start import SiloStartConfig
from fedsync.evaluation.best_version import stated
from fedsync.silo.owner.owner_policy import act_for_owner
from fedsync.silo.protocol import COPY, STATE_FOLDER, Identity
from fedsync.silo.run_text import RunText

if TYPE_CHECKING:
    from fedsync.cipher.plan import EncryptionPlan
    from fedsync.cipher.silo.replica_state import ReplicaState
    from fedsync.model.layout import Layout
    from fedsync.train.local_trainer import ModelKeeper

MODEL, LAST, BEST, STATED = "model.pt", "last.pt", "best.pt", "best.json"

_SURVEY = "survey"
"""Kind of a task without a model."""


@dataclass(frozen=True, slots=True)
class KeptRun:
    """An encrypted run whose model this silo keeps.

    Args:
        name: the run's identity.
        at_s: when the model came [s since the epoch].
        copies: files with it, of a trainer each: there are several where the silo's owner decided anew meanwhile.
        text: all that the server said of it.
    """

    name: str
    at_s: float
    copies: tuple[Path, ...]
    text: RunText

    @property
    def spec(self) -> str:
        """The run's specification as JSON."""
        return self.text.spec

    def __str__(self) -> str:
        return f"{self.name} ({datetime.fromtimestamp(self.at_s, UTC):%Y-%m-%d %H:%M} UTC)"


@dataclass(frozen=True, slots=True)
class Exported:
    """What `export_kept` wrote.

    Args:
        file: the state dict.
        run: whose model it is.
        version: of the model.
        best: version in ``best.pt``; None where the silo keeps none.
        others: further runs whose models the silo keeps, newest first.
    """

    file: Path
    run: KeptRun
    version: int
    best: int | None
    others: Sequence[KeptRun]


def export_model(state: Path, out: Path) -> Mapping[str, str]:
    """Write ``model.pt``, ``last.pt`` and ``best.pt`` from the newest copy that silos of this machine keep.

    Args:
        state: folder of their resident trainers, which have served one run.
        out: folder of the run.

    Returns:
        SHA-256 of the files, hexadecimal, by what they are: ``best`` or ``last``.

    Raises:
        RunError: no silo keeps a copy there, or one is damaged.
    """
    kept = kept_runs(state)
    if not kept:
        raise RunError(f"no silo in {state} keeps the model")
    _, best = _write(out, kept[0].copies, RunSpec.parse(kept[0].spec))
    files = {"last": out / LAST, **({} if best is None else {"best": out / BEST})}
    return {name: file_digest(file) for name, file in files.items()}


def export_kept(config: SiloStartConfig, out: Path, run: str | None = None) -> Exported:
    """Write ``model.pt``, ``last.pt`` and ``best.pt`` from what a real silo keeps of an encrypted run.

    Args:
        config: of the silo.
        out: folder to write to; made if it is not there, for its owner alone.
        run: identity of the run; left out, the one whose model came last.

    Raises:
        ConfigError: no such run has left a model here, its task cannot be built here or is another one now, or nothing
            can be written to ``out``.
        RunError: the copy is damaged.
        ProtocolError: another version of FedSync left it.
    """
    kept = kept_runs(Path(config.state) / STATE_FOLDER)
    chosen = _choose(kept, run, config.state)
    owner = act_for_owner(config, Identity.load(chosen.copies[0].parent))
    spec = owner.checked(RunSpec.parse(chosen.spec), config.index)
    try:
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--out", f"{out} cannot be made: {error.strerror}", "Choose another folder") from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise ConfigError("--out", f"nothing can be written to {out}", "Choose another folder, or its permissions")
    version, best = _write(out, chosen.copies, spec, own=True)
    return Exported(out / MODEL, chosen, version, best, [other for other in kept if other != chosen])


def kept_runs(trainers: Path) -> list[KeptRun]:
    """The runs whose models are in the folders of resident trainers in ``trainers``, newest first.

    Raises:
        ConfigError: the folder is somebody else's.
    """
    found: dict[RunText, list[tuple[float, Path]]] = {}
    for folder in _folders(trainers):
        copy = folder / COPY
        try:
            text, at_s = Identity.load(folder).text, copy.stat().st_mtime
            if json.loads(text.spec)["task"]["kind"] == _SURVEY:
                continue  # it left sums, and no model
            # By all of it: what a server calls two runs by one name are two.
            found.setdefault(text, []).append((at_s, copy))
        except (OSError, ValueError, KeyError):  # nothing came yet, or it is of another version of FedSync
            continue
    runs = []
    for text, copies in found.items():
        name = str(json.loads(text.spec)["run"])
        runs.append(KeptRun(name, max(copies)[0], tuple(copy for _, copy in copies), text))
    return sorted(runs, key=lambda each: each.at_s, reverse=True)


def _folders(trainers: Path) -> list[Path]:
    try:
        return sorted(trainers.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        remedy = "Run this as the user that runs `fedsync silo start`"
        raise ConfigError(str(trainers), f"cannot be read: {error.strerror}", remedy) from error


def _choose(kept: Sequence[KeptRun], run: str | None, state: str) -> KeptRun:
    if not kept:
        problem = f"no encrypted run has left a model in {state}"
        raise ConfigError("fedsync silo export", problem, "Of a run in the clear, the server has model.pt")
    for each in kept:
        if run in (None, each.name):
            return each
    known = ", ".join(str(each) for each in kept)
    raise ConfigError("--run", f"of run {run!r} there is no model here", f"There is one of: {known}")


def _write(out: Path, copies: Sequence[Path], spec: RunSpec, *, own: bool = False) -> tuple[int, int | None]:
    """Write the copy with the highest version of those of one run; returns that, and the best version if there is one.

    Args:
        out: folder to write to.
        copies: of the run.
        spec: of the run.
        own: private parts are as the trainer that left the copy has trained them, not as they were built.
    """
    from fedsync.silo.session.last_order import (
        LastOrders,  # with torch, whose import takes seconds: in vain before a run
    )

    keeper = keeper_of(copies, spec)
    path, newest, plan = kept_state(copies, spec, keeper.layout)
    last = LastOrders(path.parent).last if own else None
    private = b"" if last is None else last.cursor.private
    for name in (MODEL, LAST):
        keeper.save_model(out / name, newest.model, private)
    for name in (BEST, STATED):
        (out / name).unlink(missing_ok=True)
    if newest.best is None:
        return newest.version, None
    keeper.save_model(out / BEST, newest.best.model, private)
    score, rule = newest.best.score, None if plan is None else plan.selection
    if score is not None:
        about = stated(score, None if rule is None else rule.value(score, {}, ()))
        write_atomically(out / STATED, (json.dumps({file_digest(out / BEST): about}, indent=2) + "\n").encode())
    return newest.version, newest.best.version


def keeper_of(copies: Sequence[Path], spec: RunSpec) -> ModelKeeper:
    """What knows the model of which these are copies, as the trainer that left the first did.

    Raises:
        ConfigError: its task cannot be built here.
    """
    from fedsync.silo.session.silo_setup import place_of

    # On the processor, for the device that trained may be gone.
    return spec.task.keeper(*place_of(spec, replace(Identity.load(copies[0].parent), device="cpu")), spec.model.build())


def kept_state(
    copies: Sequence[Path], spec: RunSpec, layout: Layout
) -> tuple[Path, ReplicaState, EncryptionPlan | None]:
    """Of copies of one run the one with the highest version, its state, and how updates of the run are sealed.

    Raises:
        RunError: a copy is damaged.
        ConfigError: the task is another one now.
    """
    from fedsync.cipher.encoding.tally import HeaderForm
    from fedsync.cipher.silo.kept_model import FOLDER
    from fedsync.cipher.silo.replica_state import ReplicaState

    plan = spec.encryption_plan(layout)
    states = []
    for path in copies:
        body = undigested(path.read_bytes())
        if body is None:
            raise RunError(f"{path} is damaged: its checksum does not fit")
        try:
            header, optimizer = (HeaderForm(0), None) if plan is None else (plan.header, plan.optimizer)
            states.append(ReplicaState.from_bytes(body, layout.size, header, path.parent / FOLDER, optimizer))
        except ValueError as error:
            remedy = "Put the task's file back as it was in the run"
            raise ConfigError("task", f"{path} does not fit the task any more: {error}", remedy) from error
    path, state = max(zip(copies, states, strict=True), key=lambda pair: pair[1].version)
    return path, state, plan
