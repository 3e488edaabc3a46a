"""Flower ClientApp: wiring only."""

from fedsync.flower.client_app import app

__all__ = ["app"]
