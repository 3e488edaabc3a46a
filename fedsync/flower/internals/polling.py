"""Shorter pauses than Flower's own, for the versions in `fedsync.flower.internals.versions.TESTED` only.

They are constants in internal modules of flwr. Each function changes the process that it is called in.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

FIRST_S = 0.03
"""Pause before a part of a message that has not arrived is asked for again [s]; it doubles each time."""


def poll_often(poll_s: float) -> None:
    """Cut the pauses of the SuperNode in this process, 3 s between two looks for messages, to ``poll_s`` seconds."""
    import flwr.supernode.start_client_internal as internal

    # A stand-in for the module's `time`: the pauses are literals in the middle of its loop.
    vars(internal)["time"] = SimpleNamespace(
        sleep=lambda seconds: time.sleep(min(seconds, poll_s)), time=time.time, monotonic=time.monotonic
    )


def pull_soon() -> None:
    """Have this process ask again soon for parts of a message, instead of after 1 s.

    Flower announces a message before its parts are there, so whoever looks often finds some of them missing.
    """
    from flwr.supercore.inflatable import inflatable_utils

    for function in (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree):
        defaults = function.__kwdefaults__
        assert defaults is not None and "initial_backoff" in defaults
        defaults["initial_backoff"] = FIRST_S
