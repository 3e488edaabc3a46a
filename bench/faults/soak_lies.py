"""ClientApps whose first silo lies, for `bench/faults/soak.py`; all others are honest."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedsync.flower.client_app import app as honest

LIAR = 0
"""The silo that lies, by its share of the data."""

Lie = Callable[[list[bytes]], bytes]
"""From all updates of the silo so far, the last one the true answer, to what it says instead."""


def _lying(lie: Lie) -> ClientApp:
    app = ClientApp()
    made: list[bytes] = []

    @app.query()
    @app.evaluate()
    def _answer(message: Message, context: Context) -> Message:
        return honest(message, context)

    @app.train()
    def _train(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        record = reply.content.config_records["fedsync"]
        update = record.get("payload")  # of a small model
        if isinstance(update, bytes) and int(context.node_config.get("partition-id", -1)) == LIAR:
            made.append(update)
            record["payload"] = lie(made)
        return reply

    return app


garbage = _lying(lambda made: np.random.default_rng().bytes(len(made[-1])))
twice = _lying(lambda made: made[0])
other_round = _lying(lambda made: made[-2] if len(made) > 1 else made[-1])
flood = _lying(lambda made: made[-1] * 50)
