"""FedSync's ServerApp without a hub: it asks silos in Flower's own messages. For `round_trip.py` and `slow_line.py`."""

from __future__ import annotations

import os

from fedsync.flower.hub_place import HUB
from fedsync.flower.server_app import app

os.environ.pop(HUB, None)

__all__ = ["app"]
