"""FedSync's ServerApp, but that answers are pulled in Flower's own way, for `bench/slow_line.py`."""

from __future__ import annotations

from unittest.mock import patch

from fedsync.runtime import arrivals
from fedsync.runtime.server import app

patch.object(arrivals, "_has_superlink", lambda grid: False).start()

__all__ = ["app"]
