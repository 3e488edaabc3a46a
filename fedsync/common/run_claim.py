"""The one rule for a run's folder, in every runtime: one run at a time, and nothing of an earlier run is lost.

| the folder | `Existing.REFUSE` | `Existing.NUMBER` | `Existing.OVERWRITE` |
|---|---|---|---|
| new, empty, or of a run that never began | taken | taken | taken |
| a run is at work in it | error | the next number | error |
| has an earlier run | error | the next number | the run's files are removed |
| not a run's, has files that a run would replace | error | the next number | error |

`Existing.RESUME` takes what is there. The lock ends with the process that holds it.
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

from fedsync.common.errors import ConfigError
from fedsync.common.files import OWNER_FOLDER
from fedsync.common.locks import held, taken

RUN_LOCK = "run.lock"
"""File in a run's folder that is locked while the run is at work."""

RUN_FILE, DONE_FILE, ERROR_FILE = "run.json", "done", "error.json"
"""Of a run on a server: its settings; that it came to its end; why it failed or who stopped it."""

CHECKPOINTS = "checkpoints"

_RESULTS = ("journal.jsonl", "summary.json", "compare.json", RUN_FILE, CHECKPOINTS)
"""Each of them shows that a run has been here."""

_FILES = (
    *("config.yaml", "silos.yaml", "strategy.yaml", "rounds.jsonl", "metrics.url", "evaluation.json", "evaluated.json"),
    *("rounds.csv", "rounds-silos.csv", "rounds-metrics.csv", "cross_site.json", "statistics.json", "model-card.md"),
    *("best.pt", "best.json", "best.next.pt", "last.pt", "model.pt", "report.html", "results.tex", "results.md"),
    *("results.csv", "seeds.tex", "seeds.md", "seeds.csv", "server.pid", "run.log", "run.log.1", DONE_FILE, ERROR_FILE),
    *("app", "arrays", "evidence", "logs", "operator", "state", "sums", "survey"),
)
"""Other files that a run, or a command on it, writes into its folder."""


class Existing(Enum):
    """The treatment of a folder that has a run already; see the module."""

    REFUSE = auto()
    NUMBER = auto()
    OVERWRITE = auto()
    RESUME = auto()


@dataclass(frozen=True, slots=True)
class Claim:
    """A run's folder, locked for this process until `release`.

    Args:
        path: of the folder.
        made: whether it was made for the run.
    """

    path: Path
    made: bool
    _held: ExitStack

    def release(self) -> None:
        """Let others have it; of a run that left nothing, nothing stays."""
        began, left = (any((self.path / name).exists() for name in names) for names in (_RESULTS, _FILES))
        if began or not left:  # else the lock's file says that what is left is a run's
            (self.path / RUN_LOCK).unlink(missing_ok=True)
        if self.made and not began and not left:
            with contextlib.suppress(OSError):  # there is something else in it
                self.path.rmdir()
        self._held.close()


def claim(folder: Path, existing: Existing = Existing.REFUSE, runs: Sequence[str] = ()) -> Claim:
    """Make a folder if need be, and take it for a run.

    Args:
        folder: of the run's files.
        existing: what to do if there is a run.
        runs: folders of runs in it, of a comparison; they count too.

    Raises:
        ConfigError: a run is at work there, or the folder is not free; names the ways on.
    """
    if existing is not Existing.NUMBER:
        return _claim(folder, existing, runs)
    for path in itertools.chain([folder], (folder.with_name(f"{folder.name}-{n}") for n in itertools.count(2))):
        with contextlib.suppress(ConfigError):
            return _claim(path, Existing.REFUSE, runs)
    raise AssertionError("numbers do not end")


@contextmanager
def claimed(out: Path | Claim, existing: Existing = Existing.REFUSE) -> Iterator[Path]:
    """A run's folder while the run goes on: one that its caller has claimed, or that is claimed now."""
    if isinstance(out, Claim):
        yield out.path
        return
    mine = claim(out, existing)
    try:
        yield mine.path
    finally:
        mine.release()


def _claim(folder: Path, existing: Existing, runs: Sequence[str]) -> Claim:
    if held(folder / RUN_LOCK):
        raise _at_work(folder)
    _check_free(folder, existing, runs)  # before anything is written, and once more when nobody else can write
    made = not folder.exists()
    folder.mkdir(mode=OWNER_FOLDER, parents=True, exist_ok=True)
    with ExitStack() as stack:
        if not stack.enter_context(taken(folder / RUN_LOCK)):
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
            raise ConfigError(str(folder), "a run on a server that has not ended", f"`fedsync server stop {folder}`")
        return
    other = "choose another folder, or replace it with --overwrite (in Python overwrite=True)"
    if any(folder.glob(f"{CHECKPOINTS}/*.ckpt")) and not _has_ended(folder / "summary.json"):
        remedy = f"Go on with it: --resume {folder}; or {other}"
        raise ConfigError(str(folder), "a run was cut off here, and can go on", remedy)
    raise ConfigError(str(folder), "the folder has the files of a run", f"C{other[1:]}")


def _has_ended(summary: Path) -> bool:
    """Whether the run came to an end of its own; one in Python may leave checkpoints all the same."""
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
