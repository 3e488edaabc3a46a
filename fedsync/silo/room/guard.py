"""The guard of a training process: ends its whole group when it ends, when it is to end, and with the session."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

_END_S = 5.0


def watch(inner: int, parent: int) -> None:
    """Be the guard of a training process: kill its group when it ends, when this one is told to, or is orphaned.

    Ends as that process did. No user's code runs in the guard.

    Args:
        inner: number of the training process, which leads a group that nobody can leave.
        parent: number of the process that started the guard.
    """
    signals = {signal.SIGCHLD, signal.SIGTERM}
    while os.waitid(os.P_PID, inner, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and os.getppid() == parent:
        came = signal.sigtimedwait(signals, 0.5)
        if came is not None and came.si_signo == signal.SIGTERM:
            break
    with suppress(ProcessLookupError):
        os.killpg(inner, signal.SIGKILL)
    _, status = os.waitpid(inner, 0)
    end_s = time.monotonic() + _END_S
    with suppress(ProcessLookupError):
        while time.monotonic() < end_s:
            os.killpg(inner, 0)
            time.sleep(0.01)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        os.kill(os.getpid(), -code)
    os._exit(max(code, 0))
