"""Timeouts of silos."""

from __future__ import annotations

from fedsync.config.sections.section import Section
from fedsync.policies.schema import Positive


class WaitingConfig(Section):
    """Timeouts of silos in real time. Virtual time has no timeouts."""

    silence_s: Positive = 3600.0
    """Time without progress after which an order has failed [s]. Every finished step is progress."""

    order_s: Positive | None = None
    """Time after which an order has failed, even if it makes progress [s]; left out, there is no limit."""

    idle_s: Positive | None = None
    """Time after which a run has failed if no silo had any work [s]. Left out, 180; ``fedsync server run`` waits
    without limit. A run that all silos refuse fails at once."""
