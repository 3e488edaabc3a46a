"""Restriction of NumPy to one thread, for training on small matrices."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any


@cache
def _controller() -> Any:
    # Finding the libraries with threads takes milliseconds, limiting them microseconds.
    import numpy as np
    from threadpoolctl import ThreadpoolController

    assert np  # NumPy's BLAS must be loaded to be found
    return ThreadpoolController()


def one_thread() -> AbstractContextManager[object]:
    """Context in which NumPy's linear algebra runs on one thread.

    Several threads are slower for small matrices, many times so on a busy machine. Their sums also depend on the number
    of threads, so that a replay on another machine could differ.
    """
    limit: AbstractContextManager[object] = _controller().limit(limits=1, user_api="blas")
    return limit
