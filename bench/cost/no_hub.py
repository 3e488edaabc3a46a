"""FedSync's ServerApp without a hub: it asks silos in Flower's own messages. For `round_trip.py` and `slow_line.py`."""

from __future__ import annotations

import os

from fedsync.flower.server_app import app
from fedsync.server.run_folder import HUB

os.environ.pop(HUB, None)

__all__ = ["app"]
