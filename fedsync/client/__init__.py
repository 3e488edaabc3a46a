"""What a silo's own training code uses: a `SiloApp` with functions that set up, train and evaluate.

A Flower ClientApp uses `steps` and `untimed`, if anything.
"""

from fedsync.client.app import SiloApp
from fedsync.client.silo_facts import Silo
from fedsync.client.steps import steps, untimed
from fedsync.client.work import Work

__all__ = ["Silo", "SiloApp", "Work", "steps", "untimed"]
