"""Flower ServerApp: wiring only."""

from fedsync.flower.server_app import app

__all__ = ["app"]
