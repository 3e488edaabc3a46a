"""FedSync's ServerApp, but that answers are pulled in Flower's own way, for `bench/cost/slow_line.py`."""

from __future__ import annotations

from unittest.mock import patch

from fedsync.flower.internals import pull
from fedsync.flower.server_app import app

patch.object(pull, "_has_superlink", lambda grid: False).start()

__all__ = ["app"]
