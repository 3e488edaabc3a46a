"""Flower ClientApp of a silo: passes a run's invitation (*join*) to the silo's agent process, and confirms it.

Without a hub (the server's own port), as in Flower's simulation engine, the app answers requests itself. It imports
little: Flower starts a process for every message. It raises no exceptions: Flower would send their text to the server.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedsync.flower import flower_messages as messages
from fedsync.silo.agent.answers import Place, refusal
from fedsync.silo.agent.joins import INBOX, JOINED, JoinedRun, drop, hand_over, trusted
from fedsync.silo.owner.app_files import announced
from fedsync.silo.session.trainer_client import app_folder, state_folder
from fedsync.transport.join import Join

app = ClientApp()


@app.query()
@app.train()
@app.evaluate()
def _forward(message: Message, context: Context) -> Message:
    try:
        place = Place(context.node_config, context.run_config, f"{context.run_id} {context.node_id}")
        # The folder of the run's own Flower app, as unpacked by Flower; empty for none.
        bundle = announced(sys.path, Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "apps")
        join = messages.read_join(message)
        if join is not None:
            joined, inbox = JoinedRun(join, dict(place.node), dict(place.run), place.ids, bundle), os.environ.get(INBOX)
            if inbox is not None:  # the agent makes the same check as below, and logs a refusal
                drop(Path(inbox), joined)
            trusted(Join.parse(join), context.node_config)
            if inbox is None:
                hand_over(state_folder(), joined)
            return messages.answer(message, JOINED)
        app_folder.set(bundle)
        spec, text, payload = messages.read_request(message)
        nbytes = 0 if payload is None else payload.nbytes
        reply, answer = place.answer(spec, text, nbytes, lambda folder: payload)
        return messages.answer(message, reply, answer, relay=place.relay is not None)
    except Exception as error:
        return messages.answer(message, refusal(error))
