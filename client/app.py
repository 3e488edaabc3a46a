"""Flower ClientApp: wiring only."""

from fedsync.runtime.silo import app

__all__ = ["app"]
