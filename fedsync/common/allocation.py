"""How a process that serves for weeks takes memory, and gives it back."""

from __future__ import annotations

import ctypes
import gc

MAPPED_BYTES = 2**17
"""Blocks from this size on are the system's again as soon as nobody has them; each buffer of a connection is larger."""

_M_MMAP_THRESHOLD = -3

_GARBAGE = 20_000, 20, 20
"""As of `gc.set_threshold`."""


def settle() -> None:
    """Have this process, which has imported all that it needs, hold what it uses, and seldom look for garbage.

    The C library takes blocks of 128 KiB and more from the system one by one, until the first of them is given back:
    from then on it keeps such blocks in its heap, where one that is in use holds all that lie below it. So a server has
    the memory of all connections that there were at once, long after they ended. Here it goes on as it began.

    Python looks at all objects for cycles again and again, a hundred thousand of which are modules and will never be
    garbage: a fifth of a busy server's time. They are left out, and it looks more seldom.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GARBAGE)
    tune = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none, and no such heap
    if tune is not None:
        tune(_M_MMAP_THRESHOLD, MAPPED_BYTES)
