"""A lying ServerApp: it sends what another process of the adversary's tells it to, and says what comes back."""

import time
from multiprocessing.connection import Client

import numpy as np
from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from fedsync.flower.internals.polling import pull_soon
from fedsync.flower.messages import request
from fedsync.flower.payloads import pack, unpack
from fedsync.trainer.protocol import read_request

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    pull_soon()
    with Client(str(context.run_config["socket"])) as line:
        while (asked := line.recv()) is not None:
            nodes = {node.name: node.node_id for node in grid.get_nodes()}
            if isinstance(asked, list):
                while not set(asked) <= nodes.keys():
                    time.sleep(0.2)
                    nodes = {node.name: node.node_id for node in grid.get_nodes()}
                line.send(sorted(nodes))
                continue
            name, spec, text, payload = asked
            packed = None if payload is None else pack(np.frombuffer(payload, dtype=np.uint8))
            line.send(_ask(grid, request(nodes[name], spec, read_request(text), packed, 600.0)))


def _ask(grid: Grid, message: Message) -> tuple[str, bytes | None, str]:
    (identifier,) = grid.push_messages([message])
    while True:
        for reply in grid.pull_messages([identifier]):
            if reply.has_error():
                return "", None, str(reply.error.reason)
            record = reply.content.config_records["fedsync"]
            packed = record.get("payload")
            packed = packed if isinstance(packed, bytes) else reply.content.array_records.get("payload")
            return str(record["text"]), None if packed is None else unpack(packed, 2**30, "").tobytes(), ""
        time.sleep(0.01)
