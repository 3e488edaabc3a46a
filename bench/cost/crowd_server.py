"""The ServerApp of `bench/cost/crowd.py`: a real one with its hub, whose nodes are registered without a SuperLink.

Flower would carry a join. Here the join is a file, which the silos' process reads.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from flwr.app import Context, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from fedsync.common.files import OWNER_FILE, write_atomically
from fedsync.common.processes import exit_with_owner, raise_file_limit
from fedsync.flower import flower_messages as messages
from fedsync.flower.server_app import app
from tests.flower.grid import run_identity


def joins(folder: Path) -> Path:
    """Joins, one a node, by its name."""
    return folder / "joins"


class InvitingGrid(Grid):
    """Nodes that are always there.

    Args:
        names: of them.
        folder: for their joins.
    """

    def __init__(self, names: list[str], folder: Path) -> None:
        self._names, self._folder, self._sent = names, folder, 0

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=number, name=name) for number, name in enumerate(self._names, 1)]

    def push_messages(self, sent: Iterable[Message]) -> Iterable[str]:
        named = []
        for message in sent:
            join = messages.read_join(message)
            assert join is not None
            self._sent += 1
            named.append(f"join-{self._sent}")
            write_atomically(self._folder / self._names[message.metadata.dst_node_id - 1], join.encode(), OWNER_FILE)
        return named

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return []

    def get_node_ids(self) -> Iterable[int]:
        raise NotImplementedError

    set_run = create_message = send_and_receive = run = get_node_ids  # type: ignore[assignment]


def main() -> None:
    """Be the app of the run in a folder, and end with the process that started this one."""
    folder = Path(sys.argv[1])
    exit_with_owner()
    raise_file_limit()
    told: dict[str, Any] = yaml.safe_load((folder / "told.yaml").read_text())
    joins(folder).mkdir()
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=told["settings"])
    with run_identity():
        app(InvitingGrid(told["nodes"], joins(folder)), context)
