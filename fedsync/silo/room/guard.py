"""Guard of a training process: kills the whole process group at its end, on request, or when the session dies."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

_END_S = 5.0


def watch(inner: int, parent: int) -> None:
    """Guard the training process ``inner``, and kill its group at its end, on SIGTERM, or when ``parent`` is gone.

    The process leads a group that no process can leave. The guard exits with the same status as the training process.
    No user's code runs in the guard.
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
