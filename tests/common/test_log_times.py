"""Log files on a full disk."""

import logging
from pathlib import Path

from fedsync.common.log_times import QuietFile


def test_a_log_on_a_full_disk_loses_lines_and_raises_nothing() -> None:
    handler = QuietFile(Path("/dev/full"), 10_000, 1, level=False)
    handler.emit(logging.makeLogRecord({"msg": "lost"}))
    handler.close()
    assert handler.stream is None
