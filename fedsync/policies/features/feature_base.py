"""Base of optional features that a strategy file lists under ``extensions``."""

from __future__ import annotations

from typing import Any

from fedsync.core.extension import Extension
from fedsync.policies.features.own import OwnExtension, OwnListener, told_as
from fedsync.policies.schema import Policy


class FeaturePolicy(Policy):
    """An optional feature of a run: its settings, and what it makes of them.

    A feature has a say in the run (`build`), or acts on what was decided (`listener`), or both.
    """

    __slots__ = ()
    section = "extension"

    def build(self) -> Extension | None:
        """What follows the run and has a say in it, a new one for each run; None where the feature decides nothing."""
        return None

    def followed(self) -> Extension | None:
        """What `build` makes, with errors of a user's code told as such."""
        with told_as(self.kind, "build", self):
            built = self.build()
        return built if built is None or self.is_shipped() else OwnExtension(built, self.kind)

    def listened(self) -> Any:
        """What `listener` makes, likewise."""
        with told_as(self.kind, "listener", self):
            made = self.listener()
        return made if made is None or self.is_shipped() else OwnListener(made, self.kind)

    def listener(self) -> Any:
        """A `fedsync.observe.recorder.Listener`: its ``follow`` is called with the run's books after every entry.

        None where the feature does nothing outside the run.
        """
        return None
