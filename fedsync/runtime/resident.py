"""The resident trainer: one process a silo that keeps model, data and device hot between messages.

It listens on a Unix socket in a folder that only its owner can enter. Requests and answers are a JSON
header and, where there is one, a vector as raw bytes. It ends when told to, when its owner process is
gone, or after a time without requests; what has to survive is in its folder.

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
from fedsync.core.journal import decode, encode
from fedsync.core.layout import Vector
from fedsync.core.orders import WorkOrder
from fedsync.runtime.answers import ERROR, IDENTITY, SOCKET, Answer, Finished, Identity
from fedsync.runtime.child import exit_with_owner
from fedsync.runtime.desk import Desk

_IDLE_S = 900.0


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
        self._asked_at_s = time.monotonic()
        with connection:
            try:
                request = json.loads(connection.recv_bytes())
                vector = _receive_vector(connection) if request.get("vector") else None
                answer, update = self._answer(request, vector)
            except EOFError:
                return
            except Exception as error:  # the one who asks is to know
                answer, update = {"error": _described(error)}, None
            connection.send_bytes(json.dumps({**answer, "vector": update is not None}).encode())
            if update is not None:
                connection.send_bytes(update.tobytes())

    def _answer(self, request: dict[str, Any], vector: Vector | None) -> tuple[dict[str, Any], Vector | None]:
        desk = self._desk
        match request["do"]:
            case "describe":
                layout = {"names": desk.layout.names, "shapes": desk.layout.shapes}
                return {"name": desk.name, "facts": encode(desk.facts), "layout": layout}, None
            case "model":
                return {}, desk.initial_model()
            case "train" if vector is not None:
                order = decode(WorkOrder, request["order"])
                return _outgoing(desk.train(order, vector, request["wait_s"]))
            case "collect":
                return _outgoing(desk.collect(request["update_id"], request["wait_s"], halt=request["halt"]))
            case "evaluate" if vector is not None:
                return {"evaluation": encode(desk.evaluate(vector))}, None
            case "stop":
                os._exit(0)
            case other:
                raise ConfigError("trainer", f"request {other!r} is unknown or incomplete", "Update FedSync")

    def _watch(self) -> None:
        while self._desk.busy or time.monotonic() - self._asked_at_s < _IDLE_S:
            time.sleep(1.0)
        os._exit(0)


def _outgoing(answer: Answer) -> tuple[dict[str, Any], Vector | None]:
    if isinstance(answer, Finished):
        return {"report": encode(answer.report)}, answer.update
    return {"steps": answer.steps, "samples": answer.samples}, None


def _receive_vector(connection: Connection) -> Vector:
    return np.frombuffer(connection.recv_bytes(), dtype=np.float32)


def _described(error: Exception) -> dict[str, str]:
    if isinstance(error, ConfigError):
        return {"place": error.place, "problem": error.problem, "remedy": error.remedy}
    return {"message": f"{type(error).__name__}: {error}"}


def main(folder: Path) -> None:
    """Build the trainer and serve; what prevents it is left in ``error.json``."""
    exit_with_owner()
    identity = Identity(**json.loads((folder / IDENTITY).read_text(encoding="utf-8")))
    try:
        desk = Desk(identity, folder)
    except Exception as error:
        (folder / ERROR).write_text(json.dumps(_described(error)), encoding="utf-8")
        raise
    (folder / SOCKET).unlink(missing_ok=True)
    _Server(folder, desk).serve()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
