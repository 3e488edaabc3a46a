"""Exclusive claim of a run's folder: one run at a time, and no unintended loss of an earlier run.

| the folder | `Existing.REFUSE` | `Existing.NUMBER` | `Existing.OVERWRITE` |
|---|---|---|---|
| is new, empty, or of a run that never began | claimed | claimed | claimed |
| has a run in progress | error | the next number | error |
| has an earlier run | error | the next number | the run's files are removed |
| belongs to no run, but has files that a run would replace | error | the next number | error |

`Existing.RESUME` takes an existing run. The lock ends with the process that holds it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from shlex import quote

from fedsync.common.errors import ConfigError
from fedsync.common.files import OWNER_FOLDER
from fedsync.common.locks import held, taken

RUN_LOCK = "run.lock"
"""Lock file in a run's folder while the run is in progress."""

CHANGE_LOCK = "change.lock"
"""Lock in a run's folder, held while a process submits, resumes or stops the run."""

RUN_FILE, DONE_FILE, ERROR_FILE = "run.json", "done", "error.json"
"""Files of a run on a server: its settings; a mark of its regular end; the reason of its failure or stop."""

CHECKPOINTS = "checkpoints"

EVIDENCE = "evidence"

_RESULTS = ("journal.jsonl", "summary.json", "compare.json", RUN_FILE, CHECKPOINTS)
"""Files that each prove that a run has begun here."""

_FILES = (
    *("config.yaml", "silos.yaml", "strategy.yaml", "rounds.jsonl", "metrics.url", "evaluation.json", "evaluated.json"),
    *("rounds.csv", "rounds-silos.csv", "rounds-metrics.csv", "cross_site.json", "statistics.json", "model-card.md"),
    *("best.pt", "best.json", "best.next.pt", "last.pt", "model.pt", "report.html", "results.tex", "results.md"),
    *("results.csv", "seeds.tex", "seeds.md", "seeds.csv", "server.pid", "run.log", "run.log.1", DONE_FILE, ERROR_FILE),
    *("app", "arrays", EVIDENCE, "hub", "logs", "operator", "state", "sums", "survey"),
)
"""Other files that a run, or a command on it, writes into its folder."""


class Existing(Enum):
    """Treatment of a folder that already has a run; see the module."""

    REFUSE = auto()
    NUMBER = auto()
    OVERWRITE = auto()
    RESUME = auto()


@dataclass(frozen=True, slots=True)
class Claim:
    """Folder of a run, locked for this process until `release`; ``made`` if it was made for the run."""

    path: Path
    made: bool
    _held: ExitStack

    def release(self) -> None:
        """Unlock the folder; remove it if it was made for this run and the run left nothing."""
        began, left = (any((self.path / name).exists() for name in names) for names in (_RESULTS, _FILES))
        if began or not left:  # otherwise the lock file marks the leftover files as a run's
            (self.path / RUN_LOCK).unlink(missing_ok=True)
        if self.made and not began and not left:
            with contextlib.suppress(OSError):  # the folder has other content
                self.path.rmdir()
        self._held.close()


def claim(
    folder: Path, existing: Existing = Existing.REFUSE, runs: Sequence[str] = (), models: Sequence[str | None] = ()
) -> Claim:
    """Claim a folder for a run; make it if necessary. ``runs`` are subfolders with the runs of a comparison. Raises
    `ConfigError` if a run is in progress there, the folder is not free, or one has one of the initial ``models``.
    """
    removed = {folder.resolve() / run / name for run in ("", *runs) for name in _FILES}
    for model in map(Path, filter(None, models)):
        if existing is Existing.OVERWRITE and not removed.isdisjoint((model.absolute(), model.resolve())):
            remedy = "Copy the model to another folder first, or choose another folder for the run"
            raise ConfigError(str(folder), f"a run here would remove {model}, with which it begins", remedy)
    if existing is not Existing.NUMBER:
        return _claim(folder, existing, runs)
    for path in itertools.chain([folder], (folder.with_name(f"{folder.name}-{n}") for n in itertools.count(2))):
        with contextlib.suppress(ConfigError):
            return _claim(path, Existing.REFUSE, runs)
    raise AssertionError("numbers do not end")


@contextmanager
def claimed(out: Path | Claim, existing: Existing = Existing.REFUSE, model: str | None = None) -> Iterator[Path]:
    if isinstance(out, Claim):
        yield out.path
        return
    mine = claim(out, existing, models=[model])
    try:
        yield mine.path
    finally:
        mine.release()


def _claim(folder: Path, existing: Existing, runs: Sequence[str]) -> Claim:
    if held(folder / RUN_LOCK):
        raise _at_work(folder)
    _check_free(folder, existing, runs)  # checked before any write, and again under the lock
    made = not folder.exists()
    folder.mkdir(mode=OWNER_FOLDER, parents=True, exist_ok=True)
    with ExitStack() as stack:
        if not stack.enter_context(taken(folder / RUN_LOCK)) or held(folder / CHANGE_LOCK):
            raise _at_work(folder)
        _check_free(folder, existing, runs)
        if existing is not Existing.RESUME:
            _remove(folder)
        return Claim(folder, made, stack.pop_all())


def _check_free(folder: Path, existing: Existing, runs: Sequence[str]) -> None:
    if existing is Existing.RESUME:
        return
    has_run = any((folder / name).exists() for name in _RESULTS)
    has_run = has_run or any((folder / run / name).exists() for run in runs for name in _RESULTS)
    if not has_run:
        foreign = [] if (folder / RUN_LOCK).exists() else [name for name in _FILES if (folder / name).exists()]
        if foreign:
            problem = f"a run here would replace {foreign[0]!r}, which is not of a run"
            raise ConfigError(str(folder), problem, "Choose another folder with --out")
        return
    ended = (folder / DONE_FILE).exists() or (folder / ERROR_FILE).exists()
    if existing is Existing.OVERWRITE:
        if (folder / RUN_FILE).exists() and not ended:
            remedy = f"End it with `fedsync server stop {quote(str(folder))}`"
            raise ConfigError(str(folder), "a run on a server that has not ended", remedy)
        return
    other = "choose another folder, or replace it with --overwrite (in Python overwrite=True)"
    if any(folder.glob(f"{CHECKPOINTS}/*.ckpt")) and not _has_ended(folder / "summary.json"):
        remedy = f"Resume it with --resume {quote(str(folder))} (in Python resume=True); or {other}"
        raise ConfigError(str(folder), "a run was interrupted here, and can be resumed", remedy)
    raise ConfigError(str(folder), "the folder has the files of a run", f"C{other[1:]}")


def _has_ended(summary: Path) -> bool:
    """Whether the run ended regularly; a run in Python may still leave checkpoints."""
    try:
        return bool(json.loads(summary.read_bytes())["stopped_by"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _remove(folder: Path) -> None:
    for name in (*_RESULTS, *_FILES):
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _at_work(folder: Path) -> ConfigError:
    return ConfigError(str(folder), "a run is at work here", "Wait for its end, stop it, or choose another folder")
