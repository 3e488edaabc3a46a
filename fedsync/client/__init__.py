"""API for a silo's own training code: a `SiloApp` with functions that set up, train and evaluate.

A Flower ClientApp needs at most `steps` and `untimed`.
"""

from fedsync.client.app import SiloApp
from fedsync.client.silo_facts import Silo
from fedsync.client.steps import steps, untimed
from fedsync.client.work import Work

__all__ = ["Silo", "SiloApp", "Work", "steps", "untimed"]
