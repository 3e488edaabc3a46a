"""Factory of sealers: the sealer of an encryption scheme (suite) encrypts and decrypts at a silo."""

from __future__ import annotations

from fedsync.cipher.keys.material import GroupKey, Purpose
from fedsync.cipher.suites.pad import Pad
from fedsync.cipher.suites.suite import BFV, MASKED, PAD, Sealer, form_of


def open_suite(kind: str, group: GroupKey) -> Sealer:
    """Make the sealer of a suite with a group's secret; ``masked`` gives the encryption inside the masks. `ConfigError`
    if the suite is unknown, or not that of the group's context; `RunError` if the library writes an unknown format.
    """
    form = form_of(kind)
    if form is PAD:
        return Pad(group.derive(Purpose.PAD))
    # Imported late: the library loads slowly, and the pad does not need it.
    from fedsync.cipher.suites.bfv import Bfv

    return Bfv(group.context, MASKED if form is MASKED else BFV)
