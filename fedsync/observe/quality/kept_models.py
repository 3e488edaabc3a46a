"""Files of a run's best model and last model, in the run's folder.

| file | content | written |
|---|---|---|
| ``best.pt`` | the best version (`fedsync.evaluation.version_scores`) | now and then during the run, and at the end |
| ``best.json`` | version, value and metrics of ``best.pt``, by the SHA-256 of that file | before ``best.pt`` |
| ``last.pt``, ``model.pt`` | the last version, one file under two names | at the end |

The process may be killed at any instant, so each file is replaced atomically, and ``best.json`` describes the old and
the new ``best.pt`` in between. A resumed run rewrites ``best.pt``: the file may be newer or older than its checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedsync.common import foreign
from fedsync.common.errors import ConfigError
from fedsync.common.files import file_digest, write_atomically
from fedsync.core.actions import KeepBest
from fedsync.evaluation.version_scores import stated
from fedsync.model.layout import Vector

logger = foreign.logger(__name__)

BEST, LAST, MODEL, STATED = "best.pt", "last.pt", "model.pt", "best.json"
_NEXT = "best.next.pt"

_SHARE = 20
"""Minimum pause between two writes, in multiples of the write's duration: large models then cost little time."""

Save = Callable[[Path, Vector], None]
"""Writes a model, float32 [layout.size], to a file as a state dict."""


class KeptModels:
    """Writer of the model files of one run."""

    def __init__(self, out: Path, save: Save, *, resume: bool = False) -> None:
        self._out = out
        self._save = save
        self._waiting: tuple[KeepBest, Vector] | None = None
        self._not_before_s = 0.0
        self._failed = False
        self._there = ""
        self.digests: dict[str, str] = {}
        for name in (_NEXT, LAST, MODEL, *([] if resume else [BEST, STATED])):
            (out / name).unlink(missing_ok=True)
        if (out / BEST).exists():
            self._there = file_digest(out / BEST)

    def keep(self, best: KeepBest, model: Vector) -> None:
        """Schedule a new best version for writing; nobody may change ``model`` afterwards."""
        self._waiting = best, model
        self.digests.pop("best", None)

    def write_if_due(self) -> None:
        """Write a pending best model, unless the previous write was too recent. A failed write is logged once and
        retried: the checkpoint contains the best model too.
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
        """Write the pending best model and the last model, float32 [layout.size]. ``last`` is None if the run failed
        without a version, or only silos hold the model; otherwise `ConfigError` if a file cannot be written.
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
        except OSError:  # this file system has no hard links
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


def _stated(out: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((out / STATED).read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}
