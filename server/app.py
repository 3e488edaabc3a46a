"""Flower ServerApp: wiring only."""

from fedsync.runtime.server import app

__all__ = ["app"]
