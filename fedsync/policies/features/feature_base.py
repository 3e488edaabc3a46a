"""Base of the optional features that a strategy file lists under ``extensions``."""

from __future__ import annotations

from typing import Any

from fedsync.core.extension import Extension
from fedsync.policies.features.own import OwnExtension, OwnListener, told_as
from fedsync.policies.schema import Policy


class FeaturePolicy(Policy):
    """Optional feature of a run, with its settings.

    A feature influences the run (`build`), or reacts to its decisions (`listener`), or both.
    """

    __slots__ = ()
    section = "extension"

    def build(self) -> Extension | None:
        """Return a new extension per run, which may influence it; None if the feature decides nothing."""
        return None

    def followed(self) -> Extension | None:
        """Return the result of `build`; errors in user code become `ConfigError`."""
        with told_as(self.kind, "build", self):
            built = self.build()
        return built if built is None or self.is_shipped() else OwnExtension(built, self.kind)

    def listened(self) -> Any:
        """Return the result of `listener`; errors in user code become `ConfigError`."""
        with told_as(self.kind, "listener", self):
            made = self.listener()
        return made if made is None or self.is_shipped() else OwnListener(made, self.kind)

    def listener(self) -> Any:
        """Return a `fedsync.observe.recorder.Listener`, or None if the feature does nothing outside the run.

        Its ``follow`` is called with the run's ledger after every entry.
        """
        return None
