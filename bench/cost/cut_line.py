"""Bytes of a large model, and of an update, that are sent again after their connection is cut in the middle.

Hub and silo use the real connection code, over a socket whose first connection ends after half of the bytes. The figure
counts all bytes through the socket, in both directions, with TLS and HTTP, beyond the bytes of the model.
"""

from __future__ import annotations

import argparse
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from bench.common import print_table, write_json
from fedsync.model.chunked_arrays import map_file
from fedsync.transport.hub_line import HubLine, ReceivedQuestion
from fedsync.transport.port import BASE, Blob, SiloQuestion
from tests.transport.hubs import Served, served

MIB = 2**20
COLUMNS = ("", "connections", "MiB carried", "beyond the model", "seconds")


class Cutting:
    """Passes connections on to a port of this machine, and ends the first one after so many bytes."""

    def __init__(self, target: int, after: int) -> None:
        self._target, self._after = target, after
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.lines = self.carried = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            ends = self._listener.accept()[0], socket.create_connection(("127.0.0.1", self._target))
            self.lines += 1
            for one, other in (ends, ends[::-1]):
                threading.Thread(target=self._pump, args=(one, other, self.lines == 1), daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket, cut: bool) -> None:
        with suppress(OSError):
            while (data := one.recv(65536)) and not (cut and self.carried > self._after):
                self.carried += len(data)
                other.sendall(data)
        for each in (one, other):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
                each.close()  # or who sends waits for a reader


def cut(up: Served, question: SiloQuestion, transfer: Callable[[HubLine, ReceivedQuestion], None]) -> list[float]:
    """One transfer over a line that is cut once: connections, bytes carried, seconds."""
    between = Cutting(up.port, question.most // 2)
    line = up.line(up.hub.invite("berlin", [f"https://127.0.0.1:{between.port}{BASE}"], up.authority))
    line.join()
    up.hub.send("berlin", question)
    asked = line.asked(0)
    assert asked is not None
    begin_s = time.perf_counter()
    transfer(line, asked)
    seconds = time.perf_counter() - begin_s
    up.hub.strike_off("berlin")
    return [between.lines, between.carried, seconds]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--out", type=Path, default=Path("bench/results/cut_line.json"))
    options = parser.parse_args()
    nbytes = 4 * options.parameters
    model = np.random.default_rng(7).integers(0, 256, nbytes, np.uint8)
    with tempfile.TemporaryDirectory(prefix="cut-line-") as name, served(Path(name)) as up:

        def down(line: HubLine, asked: ReceivedQuestion) -> None:
            assert isinstance(asked.payload, Blob)
            line.fetch(asked.payload, Path(name) / "model")
            assert np.array_equal(map_file(Path(name) / "model"), model), "what came is not what was sent"

        def back(line: HubLine, asked: ReceivedQuestion) -> None:
            line.answer(asked, "done", model)
            (answer,) = up.hub.receive(60)
            assert answer.payload is not None and np.array_equal(answer.payload, model), "another update came"

        found = {
            "model, to a silo": cut(up, SiloQuestion("train", up.hub.publish(model), most=nbytes), down),
            "update, from a silo": cut(up, SiloQuestion("train", most=nbytes), back),
        }
    rows = [
        [what, f"{lines:.0f}", f"{carried / MIB:.1f}", f"{carried / nbytes - 1:.2%}", f"{seconds:.1f}"]
        for what, (lines, carried, seconds) in found.items()
    ]
    print_table(f"{nbytes / MIB:.0f} MiB, a line that is cut after half of them", COLUMNS, rows)
    write_json(options.out, {"bytes": nbytes, **found})


if __name__ == "__main__":
    main()
