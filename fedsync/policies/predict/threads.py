"""Small matrices are trained on one thread."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any


@cache
def _controller() -> Any:
    # Looking for the libraries that have threads takes milliseconds, limiting them microseconds.
    import numpy as np
    from threadpoolctl import ThreadpoolController

    assert np  # its BLAS must be there to be found
    return ThreadpoolController()


def one_thread() -> AbstractContextManager[object]:
    """NumPy's linear algebra on one thread.

    On several it is slower for matrices of this size, many times so where other programs use the processors, and
    what it adds up depends on their number, so that a replay elsewhere could differ.
    """
    limit: AbstractContextManager[object] = _controller().limit(limits=1, user_api="blas")
    return limit
