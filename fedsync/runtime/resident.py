"""The resident trainer: one process a silo that keeps model, data and device hot between messages.

It listens on a Unix socket in a folder that only its owner can enter. Requests and answers are a JSON
header, which names the type of the payload that follows, if one does, and the payload as raw bytes. The
trainer ends when told to, when its owner process is gone, or after a time without requests, which is short once the
silo has a trainer for another run; what has to survive is in its folder.

Usage: ``python -m fedsync.runtime.resident FOLDER``
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np

from fedsync.core.errors import ConfigError
from fedsync.core.exchange import Payload
from fedsync.core.journal import decode, encode
from fedsync.core.orders import WorkOrder
from fedsync.runtime.answers import ERROR, SOCKET, Answer, Finished, Identity, Lacking, Working
from fedsync.runtime.child import exit_with_owner
from fedsync.runtime.desk import Desk

_IDLE_S = 900.0
_ROOM_S = 30.0
"""A trainer that was not asked for so long [s] makes room for that of another run."""


class _Server:
    """Answers requests on the socket, a thread each."""

    def __init__(self, folder: Path, desk: Desk) -> None:
        self._desk = desk
        self._folder = folder
        self._asked_at_s = time.monotonic()

    def serve(self) -> None:
        """Accept connections for ever."""
        address = str(self._folder / SOCKET)
        with Listener(address, family="AF_UNIX", backlog=16) as listener:
            Path(address).chmod(0o600)
            threading.Thread(target=self._watch, daemon=True).start()
            while True:
                connection = listener.accept()
                threading.Thread(target=self._serve_one, args=(connection,), daemon=True).start()

    def _serve_one(self, connection: Connection) -> None:
        with connection:
            try:
                request = json.loads(connection.recv_bytes())
                brought = (
                    np.frombuffer(connection.recv_bytes(), dtype=request["payload"]) if request["payload"] else None
                )
                if request["do"] != "make room":
                    self._asked_at_s = time.monotonic()
                answer, update = self._answer(request, brought)
            except EOFError:
                return
            except Exception as error:  # the one who asks is to know
                answer, update = {"error": _described(error)}, None
            kind = None if update is None else update.dtype.name
            connection.send_bytes(json.dumps({**answer, "payload": kind}).encode())
            if update is not None:
                connection.send_bytes(update.tobytes())

    def _answer(self, request: dict[str, Any], brought: Payload | None) -> tuple[dict[str, Any], Payload | None]:
        desk = self._desk
        match request["do"]:
            case "describe":
                layout = {"names": desk.layout.names, "shapes": desk.layout.shapes}
                described = {"name": desk.name, "facts": encode(desk.facts), "layout": layout}
                return {**described, "sealed": desk.sealed, "holds": desk.holds}, None
            case "model":
                return {}, desk.initial_model()
            case "train" if brought is not None:
                order = decode(WorkOrder, request["order"])
                return _outgoing(desk.train(order, brought, request["wait_s"]))
            case "collect":
                return _outgoing(desk.collect(request["update_id"], request["wait_s"], halt=request["halt"]))
            case "evaluate" if brought is not None:
                found = desk.evaluate(brought, request["version"])
                return ({"holds": found.holds} if isinstance(found, Lacking) else {"evaluation": encode(found)}), None
            case "greeting":
                return {}, desk.greeting()
            case "question" if brought is not None:
                return {}, desk.answer(brought)
            case "snapshot":
                version, snapshot = desk.snapshot()
                return {"holds": version}, snapshot
            case "make room":
                if not desk.busy and time.monotonic() - self._asked_at_s > _ROOM_S:
                    os._exit(0)
                return {}, None
            case "stop":
                os._exit(0)
            case other:
                raise ConfigError("trainer", f"request {other!r} is unknown or incomplete", "Update FedSync")

    def _watch(self) -> None:
        while self._desk.busy or time.monotonic() - self._asked_at_s < _IDLE_S:
            time.sleep(1.0)
        os._exit(0)


def _outgoing(answer: Answer) -> tuple[dict[str, Any], Payload | None]:
    match answer:
        case Finished(report, update):
            return {"report": encode(report)}, update
        case Lacking(holds):
            return {"holds": holds}, None
        case Working(steps, samples):
            return {"steps": steps, "samples": samples}, None


def _described(error: Exception) -> dict[str, str]:
    if isinstance(error, ConfigError):
        return {"place": error.place, "problem": error.problem, "remedy": error.remedy}
    return {"message": f"{type(error).__name__}: {error}"}


def main(folder: Path) -> None:
    """Build the trainer and serve; what prevents it is left in ``error.json``."""
    exit_with_owner()
    identity = Identity.load(folder)
    try:
        desk = Desk(identity, folder)
    except Exception as error:
        (folder / ERROR).write_text(json.dumps(_described(error)), encoding="utf-8")
        raise
    (folder / SOCKET).unlink(missing_ok=True)
    _Server(folder, desk).serve()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
