"""Version 0 of the model where the server cannot build it: a silo is asked."""

from __future__ import annotations

import time

from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from fedsync.core.errors import RunError
from fedsync.runtime import messages
from fedsync.runtime.arrivals import Arrivals
from fedsync.runtime.nodes import Admission, Nodes
from fedsync.runtime.timing import Timing


def ask_for_model(grid: Grid, spec: str, timing: Timing, admission: Admission | None = None) -> tuple[str, ArrayRecord]:
    """The model before any training, from the first silo that has it, and who that is.

    Raises:
        RunError: no silo sends one in time; says what the last one answered instead.
    """
    end_s = time.monotonic() + timing.join_timeout_s
    sent: dict[str, int] = {}
    nodes, arrivals = Nodes(grid, admission), Arrivals(grid)
    last = "nobody answered"
    while time.monotonic() < end_s:
        for node in nodes.look()[1]:
            for message in grid.push_messages([messages.query_model(node, spec, timing.join_timeout_s)]):
                sent[message] = node
        for arrival in arrivals.pull(sent):
            sender = f"node {sent.pop(arrival.answers)}"
            if arrival.content is not None:
                return sender, messages.read_initial_model(arrival.content, sender)
            last = f"{sender}: {arrival.problem}"
        time.sleep(timing.poll_s)
    raise RunError(f"no silo sent a model in {timing.join_timeout_s:g} s; {last}")
