"""Real processes over TLS: a server whose ServerApp lies, and silos started by `fedsync silo start`.

One federation for all attacks, for each process takes seconds to start.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from copy import copy
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsync.cipher.encoding.catch_up import Start
from fedsync.config.run_spec import RunSpec
from fedsync.config.server_start import ServerStartConfig
from fedsync.core.orders import WorkReport
from fedsync.flower.process_environment import flower_environment
from fedsync.model.transfer import Payload
from fedsync.ops.programs import CONNECTION
from fedsync.ops.runs import connect, submit, write_bundle
from fedsync.silo.protocol import Describe, Request, Train, read_reply, write_request
from fedsync.silo.run_text import run_config_text
from tests.attacks.adversary import FEATURES, Federation, Heard, Victim, _issued
from tests.attacks.forgery import (
    STRANGE,
    add,
    aggregate,
    bits_known,
    give,
    key_from_refusals,
    key_from_slots,
    onward,
    true_key,
)
from tests.attacks.test_server_and_silo import FRIEND, MASKED, agreement, isolated, upload
from tests.e2e.deployed import deployed, write_files


class _RealSilo(Victim):
    """A silo that only the lying ServerApp reaches; see relay.py."""

    def __init__(self, line: Connection, name: str, spec: str) -> None:
        self.name = name
        self._line, self._spec = line, spec

    def ask(self, request: Request, payload: Payload | None = None) -> Heard:
        self._line.send((self.name, self._spec, write_request(request), None if payload is None else payload.tobytes()))
        words, answer, problem = self._line.recv()
        assert not problem, f"Flower tells the server an error's words: {problem[:200]}"
        return Heard(
            read_reply(words, self.name, 2**20),
            None if answer is None else np.frombuffer(answer, dtype=np.uint8),
            words,
        )


class RealFederation(Federation):
    """The same in real processes, but for one silo where that is the adversary's own; it has a copy of its keys."""

    line: Connection
    own = ""

    def silo(self, name: str, spec: RunSpec | None = None, folder: Path | None = None, **owner: Any) -> Victim:
        if name == self.own:
            keys = self.folder / "own" / name
            if not keys.exists():
                shutil.copytree(self.rings[name], keys)
            return super().silo(name, spec, keys=str(keys))
        return _RealSilo(self.line, name, (spec or self.spec()).dump())

    def colluding(self, run: str, own: str) -> "RealFederation":
        """Another run of the same silos, under masks; ``own`` is on the server's side."""
        made = copy(self)
        made.own, made.cipher = own, MASKED
        settings = {own: run_config_text({"socket": str(self.folder / "line")})}  # as Flower gives them to the others
        made.__init__(self.root, self.folder, cipher=MASKED, run=run, settings=settings)  # type: ignore[misc]
        return made


def _submit(config: ServerStartConfig, folder: Path) -> Connection:
    """Hand in the lying app, and wait for it to call."""
    socket = str(folder / "line")
    bundle = write_bundle(folder / "app", {"socket": socket})
    project = bundle / "pyproject.toml"
    project.write_text(project.read_text().replace("fedsync.flower.server_app:app", "relay:app"))
    shutil.copy(Path(__file__).with_name("relay.py"), bundle)
    connect(config)
    with Listener(socket) as listener:
        submit(bundle, CONNECTION, flower_environment(Path(config.state)))
        return listener.accept()


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFederation]:
    root = tmp_path_factory.mktemp("r")
    folder = root / "f"
    for each in (root, folder):
        each.mkdir(mode=0o700, exist_ok=True)
        each.chmod(0o700)
    made = RealFederation.__new__(RealFederation)
    names = [f"silo-{letter}" for letter in "abc"]
    (root / "data").mkdir()
    issued = _issued(tuple(names), root)
    for name in names:
        shutil.copytree(issued.silos[name], folder / "keys" / name)
    write_files(folder, names, own=lambda name: f"keys: keys/{name}, data: [../data],")
    with deployed(folder, names):
        made.line = _submit(ServerStartConfig.load(folder / "server.yaml"), folder)
        made.line.send(names)
        assert made.line.recv() == names
        made.__init__(root, folder)  # type: ignore[misc]
        made.round()
        yield made
        made.line.send(None)


@pytest.mark.full
def test_no_training_row_and_no_file_by_orders(federation: RealFederation) -> None:
    """A model of the server's choice is refused, and batches of one, and a task that reads the key file."""
    before = np.zeros(FEATURES + 1, dtype="<f4").tobytes()
    order = federation.order("silo-c", base_version=0, batch_size=1, max_steps=1, learning_rate=1e-30)
    heard = federation.silos["silo-c"].ask(Train(order), onward(-1, start=Start.CLEAR, version=0, model=before))
    assert not isinstance(heard.reply, WorkReport)
    key = federation.folder / "keys" / "silo-c" / "group.key"
    data = {"kind": "table", "file": str(key), "target": "zzz", "classes": 0}
    task = {"kind": "linear", "loss": "squared", "data": data, "partition": {"kind": "iid"}}
    heard = federation.silo("silo-c", federation.spec("files", task=task)).ask(Describe())
    secret = json.loads(key.read_text())["key"]
    assert heard.refused and secret[:8] not in heard.words
    files = [file for file in (federation.folder / "server").rglob("*") if file.is_file()]
    assert [os.fspath(file) for file in files if secret.encode() in file.read_bytes()] == []


@pytest.mark.full
def test_other_work_for_others_isolates_nobody(federation: RealFederation) -> None:
    """The server and silo-a are after silo-b: all others are to train at a rate that moves nothing."""
    honest, lying = (federation.colluding(run, FRIEND) for run in ("the same work", "other work"))
    honest.commit(upload(honest, honest.names))
    give(honest.silos[FRIEND], honest.aggregator.outgoing(FRIEND), 1)
    moved = honest.silos[FRIEND].model - honest.first_model
    truth = sum(honest.own_update(name, honest.first_model) for name in honest.names)
    assert agreement(moved, truth) > 0.9, "the control: so much would be seen"
    ids = upload(lying, lying.names, learning_rate=1e-30)
    assert len(ids) == 3, "nobody refuses, so all hangs on the masks"
    lying.commit(ids)
    gained = isolated(lying)
    assert gained < 0.5, f"{gained:.2f} of one silo's update"


@pytest.mark.full
def test_no_bit_of_the_key_by_refusals(federation: RealFederation) -> None:
    honest = federation.envelope("silo-a/1")
    answers: list[str] = []

    def heard(name: str, words: np.ndarray, **changes: Any) -> Heard:
        said = give(
            federation.silos[name], onward(0, add(1, aggregate(federation, honest, 1, words=words, **changes))), 1
        )
        answers.append(said.words)
        return said

    def slot0(words: np.ndarray) -> int:
        found = re.search(r"(-?\d+) silos are in the sum", heard("silo-a", words, members=(STRANGE,)).words)
        return int(found[1]) if found else 1

    gained = bits_known(key_from_slots(slot0, range(64)), true_key(federation, range(64)))
    accepts = lambda words: not heard("silo-b", words).refused  # noqa: E731
    gained += bits_known(key_from_refusals(accepts, honest.words, 4), true_key(federation, range(4)))
    assert gained == 0, f"{gained:.0f} bits by {len(answers)} questions"
    assert answers.count(answers[0]) == 6 and len(set(answers)) == 2, "three times one word at each silo, then locked"
