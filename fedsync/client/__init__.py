"""API for a silo's own training code: a `SiloApp` with functions that set up, train and evaluate.

A Flower ClientApp needs at most `steps` and `untimed`.
"""

from fedsync.client.app import Silo, SiloApp
from fedsync.client.steps import steps, untimed
from fedsync.client.work import Work

__all__ = ["Silo", "SiloApp", "Work", "steps", "untimed"]
