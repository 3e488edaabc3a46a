"""The best model of a run and the last, as files in its folder.

| file | what it has | written |
|---|---|---|
| ``best.pt`` | the version that is kept as the best; see `fedsync.evaluation.best_version` | in spare time, and at the end |
| ``best.json`` | which version that is: what is known of it, by the SHA-256 of the file | before that |
| ``last.pt``, ``model.pt`` | the last version, one file by two names | at the end |

A process may be killed at any instant. Each file is there as a whole, and ``best.json`` says of the old ``best.pt`` and
of the new one what it is before one takes the place of the other. A run that goes on begins from its checkpoint, which
has the best model too: the file, which may be newer or older, is then written anew.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedsync.common import foreign
from fedsync.common.checksums import file_digest
from fedsync.common.errors import ConfigError
from fedsync.common.files import write_atomically
from fedsync.core.actions import KeepBest
from fedsync.evaluation.best_version import stated
from fedsync.model.layout import Vector

logger = foreign.logger(__name__)

BEST, LAST, MODEL, STATED = "best.pt", "last.pt", "model.pt", "best.json"
_NEXT = "best.next.pt"

_SHARE = 20
"""A file is written anew after so many times as long as writing it takes, at the soonest: a large one costs little."""

Save = Callable[[Path, Vector], None]
"""Writes a model, float32 [layout.size], as a state dict."""


class KeptModels:
    """Writes the models of one run.

    Args:
        out: folder of the run's files.
        save: writes a file.
        resume: the run goes on: what is there stays until it is written anew.
    """

    def __init__(self, out: Path, save: Save, *, resume: bool = False) -> None:
        self._out = out
        self._save = save
        self._waiting: tuple[KeepBest, Vector] | None = None
        self._not_before_s = 0.0
        self._failed = False
        self._there = ""
        self.digests: dict[str, str] = {}
        """SHA-256 of each file that is as the run has it now, hexadecimal, by what it is: ``best`` or ``last``."""
        for name in (_NEXT, LAST, MODEL, *([] if resume else [BEST, STATED])):
            (out / name).unlink(missing_ok=True)
        if (out / BEST).exists():
            self._there = file_digest(out / BEST)

    def keep(self, best: KeepBest, model: Vector) -> None:
        """There is a better version; its model never changes."""
        self._waiting = best, model
        self.digests.pop("best", None)

    def write_if_due(self) -> None:
        """Write the best model, unless it is there, or the one before was written a short while ago.

        Where the disk takes none, the log says so once: the checkpoint has it too.
        """
        begin_s = time.monotonic()
        if self._waiting is None or begin_s < self._not_before_s:
            return
        try:
            self._write(*self._waiting)
            self._failed = False
        except (ConfigError, OSError) as error:
            if not self._failed:
                logger.warning("%s cannot be written now: %s", self._out / BEST, error)
            self._failed = True
        now_s = time.monotonic()
        self._not_before_s = now_s + _SHARE * (now_s - begin_s)

    def finish(self, last: Vector | None) -> None:
        """Write what is not there yet.

        Args:
            last: the model that the run ended with; None where it failed, or only silos have it.

        Raises:
            ConfigError: a file cannot be written, and the run did not fail anyway.
        """
        if last is None:
            self._not_before_s = 0.0
            self.write_if_due()
            return
        if self._waiting is not None:
            self._write(*self._waiting)
        self._save(self._out / LAST, last)
        self.digests["last"] = file_digest(self._out / LAST)
        (self._out / MODEL).unlink(missing_ok=True)
        try:
            os.link(self._out / LAST, self._out / MODEL)
        except OSError:  # not on this disk
            shutil.copyfile(self._out / LAST, self._out / MODEL)

    def _write(self, best: KeepBest, model: Vector) -> None:
        following = self._out / _NEXT
        self._save(following, model)
        digest = file_digest(following)
        about = stated(best.score, best.value)
        before = {known: said for known, said in _stated(self._out).items() if known == self._there}
        write_atomically(self._out / STATED, (json.dumps({**before, digest: about}, indent=2) + "\n").encode())
        following.replace(self._out / BEST)
        self._waiting = None
        self._there = self.digests["best"] = digest


def best_of(out: Path) -> Mapping[str, Any] | None:
    """What is known of the ``best.pt`` in a run's folder: ``version``, ``value`` and ``metrics``.

    None where there is no such file, or it is not one that the run wrote.
    """
    path = out / BEST
    found: Mapping[str, Any] | None = _stated(out).get(file_digest(path)) if path.is_file() else None
    return found


def _stated(out: Path) -> dict[str, Any]:
    try:
        stated: dict[str, Any] = json.loads((out / STATED).read_bytes())
        return stated
    except (OSError, ValueError):
        return {}
