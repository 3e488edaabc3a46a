"""Export of an encrypted run's model to a file at a silo, because the server cannot read the model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fedsync.common.errors import ConfigError, RunError
from fedsync.common.files import file_digest, undigested, write_atomically
from fedsync.config.run_spec import RunSpec
from fedsync.config.silo_start import SiloStartConfig
from fedsync.evaluation.version_scores import stated
from fedsync.observe.quality.survey_report import write_statistics
from fedsync.silo.owner.owner_policy import OwnerPolicy, act_for_owner
from fedsync.silo.protocol import ANSWER, COPY, STATE_FOLDER, Identity
from fedsync.silo.room.process_start import keeper_of
from fedsync.silo.run_text import RunText

if TYPE_CHECKING:
    from fedsync.cipher.plan import EncryptionPlan
    from fedsync.cipher.silo.replica_state import ReplicaState
    from fedsync.model.layout import Layout

MODEL, LAST, BEST, STATED = "model.pt", "last.pt", "best.pt", "best.json"

_SURVEY = "survey"


@dataclass(frozen=True, slots=True)
class KeptRun:
    """Encrypted run whose model this silo keeps; ``at_s`` is the time of the model's arrival [s since the epoch].
    ``copies`` has several model files where the owner's rules changed during the run, one of each trainer.
    """

    name: str
    at_s: float
    copies: tuple[Path, ...]
    text: RunText

    @property
    def columns(self) -> bool:
        """Whether the run is a survey of columns, which leaves sums in the place of a model."""
        task = json.loads(self.text.spec)["task"]
        return task["kind"] == _SURVEY and not task.get("survival")

    def __str__(self) -> str:
        return f"{self.name} ({datetime.fromtimestamp(self.at_s, UTC):%Y-%m-%d %H:%M} UTC)"


@dataclass(frozen=True, slots=True)
class Exported:
    """Result of `export_kept`: file and version of the state dict, the version in ``best.pt``, and other kept runs."""

    file: Path
    run: KeptRun
    version: int
    best: int | None
    others: Sequence[KeptRun]


def export_model(state: Path, out: Path) -> Mapping[str, str]:
    """Write ``model.pt``, ``last.pt`` and ``best.pt`` from the newest copy that this machine's silos keep.

    The trainers below ``state`` must have served one run. Return the files' SHA-256, hexadecimal, by ``best`` or
    ``last``. Raise `RunError` if there is no copy, or a damaged copy.
    """
    kept = kept_runs(state)
    if not kept:
        raise RunError(f"no silo in {state} keeps the model")
    _, best = _write(out, kept[0].copies, RunSpec.parse(kept[0].text.spec), None)
    files = {"last": out / LAST, **({} if best is None else {"best": out / BEST})}
    return {name: file_digest(file) for name, file in files.items()}


def export_kept(config: SiloStartConfig, out: Path, run: str | None = None) -> Exported:
    """Write ``model.pt``, ``last.pt`` and ``best.pt`` of a run, by default the newest, from a real silo's copy.

    A survey of columns gives ``statistics.json`` as well. ``out`` is created if missing, for its owner alone.

    Raises:
        ConfigError: the silo keeps no such run, its task cannot be built or has changed, or ``out`` is not writable.
        RunError: the copy is damaged.
        ProtocolError: another version of FedSync wrote the copy.
    """
    kept = kept_runs(Path(config.state) / STATE_FOLDER)
    chosen = _choose(kept, run, config.state)
    owner = act_for_owner(config, Identity.load(chosen.copies[0].parent))
    spec = owner.checked(RunSpec.parse(chosen.text.spec), config.index)
    try:
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--out", f"{out} cannot be made: {error.strerror}", "Choose another folder") from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise ConfigError("--out", f"nothing can be written to {out}", "Choose another folder, or change permissions")
    version, best = _write(out, chosen.copies, spec, owner)
    return Exported(out / MODEL, chosen, version, best, [other for other in kept if other != chosen])


def kept_runs(trainers: Path) -> list[KeptRun]:
    """Return the newest run first, and surveys of columns after all other runs: most of them precede a training."""
    found: dict[RunText, list[tuple[float, Path]]] = {}
    try:
        folders = sorted(trainers.iterdir())
    except FileNotFoundError:
        folders = []
    except OSError as error:
        remedy = "Run this as the user that runs `fedsync silo start`"
        raise ConfigError(str(trainers), f"cannot be read: {error.strerror}", remedy) from error
    for folder in folders:
        copy = folder / COPY
        try:
            text, at_s = Identity.load(folder).text, copy.stat().st_mtime
            # Grouped by the whole text, because a server may give two runs the same name.
            found.setdefault(text, []).append((at_s, copy))
        except (OSError, ValueError, KeyError):  # no model yet, or from another version of FedSync
            continue
    runs = []
    for text, copies in found.items():
        name = str(json.loads(text.spec)["run"])
        runs.append(KeptRun(name, max(copies)[0], tuple(copy for _, copy in copies), text))
    return sorted(runs, key=lambda each: (not each.columns, each.at_s), reverse=True)


def _choose(kept: Sequence[KeptRun], run: str | None, state: str) -> KeptRun:
    if not kept:
        problem = f"no encrypted run has left a model in {state}"
        raise ConfigError("fedsync silo export", problem, "After a run in the clear, the server has model.pt")
    for each in kept:
        if run in (None, each.name):
            return each
    known = ", ".join(str(each) for each in kept)
    raise ConfigError("--run", f"there is no model of run {run!r}", f"Choose one of: {known}")


def _write(out: Path, copies: Sequence[Path], spec: RunSpec, owner: OwnerPolicy | None) -> tuple[int, int | None]:
    from fedsync.silo.session.current_order import LastOrder  # imports torch, which takes seconds

    with keeper_of(Identity.load(copies[0].parent), spec, owner) as keeper:
        path, newest, plan = kept_state(copies, spec, keeper.layout)
        last = None if owner is None else LastOrder.load(path.parent / ANSWER)
        private = b"" if last is None else last.cursor.private
        for name in (MODEL, LAST):
            keeper.save_model(out / name, newest.model, private)
        for name in (BEST, STATED):
            (out / name).unlink(missing_ok=True)
        write_statistics(spec.task, keeper.layout, newest.model, out)
        if newest.best is None:
            return newest.version, None
        keeper.save_model(out / BEST, newest.best.model, private)
    score, rule = newest.best.score, None if plan is None else plan.selection
    if score is not None:
        about = stated(score, None if rule is None else rule.value(score, {}, ()))
        write_atomically(out / STATED, (json.dumps({file_digest(out / BEST): about}, indent=2) + "\n").encode())
    return newest.version, newest.best.version


def kept_state(
    copies: Sequence[Path], spec: RunSpec, layout: Layout
) -> tuple[Path, ReplicaState, EncryptionPlan | None]:
    """Return the copy with the highest version, its state, and the run's encryption plan. `RunError` if a copy is
    damaged; `ConfigError` if the task has changed since the run.
    """
    from fedsync.cipher.encoding.tally import HeaderForm
    from fedsync.cipher.silo.figure_pool import FOLDER
    from fedsync.cipher.silo.replica_state import ReplicaState

    plan = spec.encryption_plan(layout)
    states = []
    for path in copies:
        body = undigested(path.read_bytes())
        if body is None:
            raise RunError(f"{path} is damaged: its checksum is wrong")
        try:
            header, optimizer = (HeaderForm(0), None) if plan is None else (plan.header, plan.optimizer)
            states.append(ReplicaState.from_bytes(body, layout.size, header, path.parent / FOLDER, optimizer))
        except ValueError as error:
            remedy = "Restore the task's file from the time of the run"
            raise ConfigError("task", f"{path} does not fit the task any more: {error}", remedy) from error
    path, state = max(zip(copies, states, strict=True), key=lambda pair: pair[1].version)
    return path, state, plan
