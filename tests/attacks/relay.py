"""A lying ServerApp: it sends what another process of the adversary's tells it to, and says what comes back."""

import time
from multiprocessing.connection import Client
from pathlib import Path

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedsync.flower.hub_transport import way_to_silos
from fedsync.transport.port import SiloQuestion, Transport

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    socket = str(context.run_config["socket"])
    with Client(socket) as line, way_to_silos(grid, Path(f"{socket}.files")) as silos:
        while (asked := line.recv()) is not None:
            nodes = {peer.name: peer.node_id for peer in silos.peers()}
            if isinstance(asked, list):
                while not set(asked) <= nodes.keys():
                    time.sleep(0.2)
                    nodes = {peer.name: peer.node_id for peer in silos.peers()}
                line.send(sorted(nodes))
                continue
            name, spec, text, payload = asked
            packed = None if payload is None else np.frombuffer(payload, dtype=np.uint8)
            line.send(_ask(silos, nodes[name], SiloQuestion(text, packed, most=2**30, spec=spec, ttl_s=600.0)))


def _ask(silos: Transport, node: int, question: SiloQuestion) -> tuple[str, bytes | None, str]:
    (identifier,) = silos.send([(node, question)])
    if identifier is None:
        return "", None, "the silo is not here"
    while True:
        for answer in silos.receive():
            if answer.name == identifier:
                return answer.text, None if answer.payload is None else answer.payload.tobytes(), answer.problem
        silos.wait(1.0)
