"""Which task an app is, by its token.

To ask the database costs more than what is looked for there, and an app has a request for each few of its silos. So a
task is kept as long as it takes to notice that an app died. The gate has seen before that the token is one; what a run
that is over may store, the database decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fedsync.flower.internals.one_transaction import CLEAN_UP_S
from fedsync.flower.internals.parcel_routes import NoParcel

if TYPE_CHECKING:
    from flwr.server.superlink.linkstate import LinkState


class AppTasks:
    """Knows the tasks; one thread at a time asks it.

    Args:
        state: of the SuperLink.
        clock: seconds, from anywhere.
    """

    def __init__(self, state: Callable[[], LinkState], clock: Callable[[], float] = time.monotonic) -> None:
        self._state = state
        self._clock = clock
        self._known: dict[bytes, tuple[Any, float]] = {}

    def of(self, token: bytes) -> Any:
        """The task of an app.

        Raises:
            NoParcel: it runs no more.
        """
        now_s = self._clock()
        self._known = {key: each for key, each in self._known.items() if now_s - each[1] < CLEAN_UP_S}
        if token not in self._known:
            task = self._state().get_task_by_token(token.decode())
            if task is None:
                raise NoParcel(401, "not an app that runs")
            self._known[token] = task, now_s
        return self._known[token][0]
