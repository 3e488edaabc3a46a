"""How long a run waits for silos."""

from __future__ import annotations

from fedsync.config.sections.section import Section
from fedsync.policies.schema import Positive


class WaitingConfig(Section):
    """How long a run in real time waits for silos. In virtual time nobody is waited for in vain."""

    silence_s: Positive = 3600.0
    """An order of which the server has heard nothing new for so long has failed [s]. A step that was done is news."""

    order_s: Positive | None = None
    """An order has failed after so long, however far it is [s]; left out, as long as steps are done it may go on."""

    idle_s: Positive | None = None
    """A run in which no silo had anything to do for so long has failed [s]; left out, 180, and with ``fedsync server
    run`` it waits without end. One that all silos refuse does not wait."""
