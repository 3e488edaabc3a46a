"""Version 0 of the model where the server cannot build it: a silo is asked."""

from __future__ import annotations

import logging
import time

from flwr.serverapp import Grid

from fedsync.core.errors import ProtocolError, RunError
from fedsync.core.layout import Layout, Vector
from fedsync.flower import messages, payloads
from fedsync.flower.internals.pull import BESIDE, Arrivals
from fedsync.flower.nodes import Admission, Nodes
from fedsync.flower.timeouts import Timeouts

logger = logging.getLogger(__name__)

_AT_ONCE = 2
"""Models that are fetched at the same time: nobody knows yet how large one is, and one silo may hold up only one."""


def ask_for_model(grid: Grid, spec: str, timing: Timeouts, admission: Admission | None = None) -> tuple[Vector, Layout]:
    """The model before any training, float32 [layout.size], from the first silo that has it.

    An answer that is no model costs its silo its turn, and each time a longer pause.

    Raises:
        RunError: no silo sends one in time; says what the last one answered instead.
    """
    end_s = time.monotonic() + timing.join_timeout_s
    sent: dict[str, int] = {}
    nodes, arrivals = Nodes(grid, admission, timing.look_s), Arrivals(grid, _AT_ONCE)
    last = "nobody answered"
    while time.monotonic() < end_s:
        gone, fresh = nodes.look()
        for node in gone:
            nodes.forget(node)
        for node in fresh:
            for message in grid.push_messages([messages.query_model(node, spec, timing.answer_s)]):
                sent[message] = node
        for arrival in arrivals.pull(dict.fromkeys(sent, messages.MAX_SEALED_BYTES + BESIDE)):
            node = sent.pop(arrival.answers)
            try:
                if arrival.content is None:
                    raise ProtocolError(nodes.sender(node), "answer", arrival.problem)
                record = messages.read_initial_model(arrival.content, nodes.sender(node))
                return payloads.read_model(record, nodes.sender(node))
            except ProtocolError as error:
                logger.warning("%s", error)
                last = str(error)
                nodes.ask_again(node)
        time.sleep(timing.poll_s)
    raise RunError(f"no silo sent a model in {timing.join_timeout_s:g} s; {last}")
