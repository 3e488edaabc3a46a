"""Which versions of Flower the rest of this folder was tested with: all of it reaches into Flower's private parts."""

from __future__ import annotations

from importlib.metadata import version

TESTED = frozenset({"1.41.0", "1.42.0"})
"""Versions of flwr whose private parts are used. Any other is used in Flower's own way, which is slower."""


def supported() -> bool:
    """Whether the installed flwr is one of the tested versions."""
    return version("flwr") in TESTED
