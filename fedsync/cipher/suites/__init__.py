"""The silo's half of every suite, by name."""

from __future__ import annotations

from fedsync.cipher.keys.material import GroupKey, Purpose
from fedsync.cipher.suites.pad import Pad
from fedsync.cipher.suites.suite import BFV, MASKED, PAD, Sealer, form_of


def open_suite(kind: str, group: GroupKey) -> Sealer:
    """What seals and opens with a group's secret. ``masked`` gives what is inside the masks, see `Masked`.

    Args:
        kind: name of the suite.
        group: the epoch's group key.

    Raises:
        ConfigError: there is no such suite, or the group's context is of another.
        RunError: the library writes ciphertexts in an unknown way.
    """
    form = form_of(kind)
    if form is PAD:
        return Pad(group.derive(Purpose.PAD))
    # The library takes a while to load, and the pad does without.
    from fedsync.cipher.suites.bfv import Bfv

    return Bfv(group.context, MASKED if form is MASKED else BFV)
