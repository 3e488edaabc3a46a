"""Logging with UTC times, to the terminal and to rotating files."""

from __future__ import annotations

import logging
import logging.handlers
import time
from contextlib import suppress
from pathlib import Path

from fedsync.common.foreign import SHOWN


class TimedFormatter(logging.Formatter):
    """Formatter of ``2026-05-01T12:00:00Z message``, optionally with a level before the message."""

    default_time_format, default_msec_format = "%Y-%m-%dT%H:%M:%SZ", ""

    def __init__(self, *, level: bool = True) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s" if level else "%(asctime)s %(message)s")
        self.converter = time.gmtime


class QuietFile(logging.handlers.RotatingFileHandler):
    """Log file that loses lines on a full disk, but never stops the process."""

    def __init__(self, path: Path, most_bytes: int, keep: int, *, level: bool) -> None:
        super().__init__(path, maxBytes=most_bytes, backupCount=keep, encoding="utf-8", delay=True)
        self.setFormatter(TimedFormatter(level=level))

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore the error: there is no other place to log it."""

    def close(self) -> None:
        with suppress(OSError):  # the disk is full, and the last lines are lost
            super().close()


def log_with_times() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(TimedFormatter())
    handler.addFilter(SHOWN)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("fedsync").setLevel(logging.INFO)
