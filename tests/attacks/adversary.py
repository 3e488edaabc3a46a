"""What adversaries have in these tests: real silos with real keys in this process, and a server that may say anything.

`Federation` is the server's place: its file of keys, every message that silos ever sent it, the machinery of an honest
server, and the way to ask silos. What is the silos' alone (`Victim.session`) only judges look at, to see what an attack
gained. An attack asserts that gain, not that something was raised.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from fedsync.cipher.encoding import sealed_wire as wire
from fedsync.cipher.keys.authority import EmulatedKeys, emulated_keys
from fedsync.cipher.keys.keyring import open_ring
from fedsync.cipher.keys.material import GroupKey
from fedsync.cipher.server.sealed_aggregator import EncryptedAggregator
from fedsync.cipher.silo.replica import EncryptedReplica
from fedsync.common.run_claim import EVIDENCE
from fedsync.config.run_spec import RunSpec
from fedsync.config.silo_start import SiloStartConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit
from fedsync.core.orders import Cursor, WorkOrder
from fedsync.extras.tracing.evidence import Evidence
from fedsync.model.layout import Vector
from fedsync.model.transfer import Payload
from fedsync.silo.owner.owner_policy import owner_environment
from fedsync.silo.owner.refusals import refuse
from fedsync.silo.protocol import (
    STATE_FOLDER,
    AskModel,
    Describe,
    EvaluateModel,
    Hello,
    Identity,
    InitialModel,
    Question,
    Refusal,
    Refused,
    Reply,
    Request,
    Train,
    read_reply,
    write_reply,
    write_request,
)
from fedsync.silo.session.service import TrainerService
from fedsync.silo.session.session import SiloSession

FEATURES = 12
BATCH, STEPS, RATE = 4, 2, 0.01


@dataclass(frozen=True)
class Heard:
    """What reaches the server: a reply, bytes beside it, and its words as they travel."""

    reply: Reply
    payload: Payload | None
    words: str

    @property
    def refused(self) -> bool:
        return isinstance(self.reply, Refused)


class Victim:
    """A silo: its trainer in this process, with the environment that `fedsync silo start` gives it."""

    def __init__(self, identity: Identity, owner: SiloStartConfig, folder: Path | None = None) -> None:
        self.name = identity.name
        self._environment = owner_environment(owner)
        self.folder = folder
        self._failure = ""
        with patch.dict(os.environ, self._environment):
            try:
                self.service = TrainerService(identity, folder)
            except Exception as error:  # what its process answers from then on, until it ends
                self._failure = write_reply(refuse(error))

    def ask(self, request: Request, payload: Payload | None = None) -> Heard:
        if self._failure:
            return Heard(read_reply(self._failure, self.name), None, self._failure)
        with patch.dict(os.environ, self._environment):
            words, answer = self.service.ask(write_request(request), payload)
        return Heard(read_reply(words, self.name, 2**20), answer, words)

    def refusal(self) -> Refusal | None:
        """The word by which it refuses to begin its run."""
        reply = self.ask(Describe()).reply
        return reply.code if isinstance(reply, Refused) else None

    # For the judge.

    @property
    def session(self) -> SiloSession:
        return self.service._session

    @property
    def replica(self) -> EncryptedReplica:
        replica = self.session.replica
        assert isinstance(replica, EncryptedReplica)
        return replica

    @property
    def model(self) -> Vector:
        return self.replica.model.copy()

    @property
    def exponents(self) -> tuple[int, ...]:
        """Of the grid on which it would seal now."""
        return self.replica._state.scales.exponents[-1]


@cache
def patients(folder: Path, rows: int = 60) -> tuple[Path, NDArray[np.float64]]:
    """A table of patients, and its cells, float64 [rows, FEATURES + 1], the last the target."""
    rng = np.random.default_rng(5)
    cells = np.round(rng.normal(size=(rows, FEATURES)), 3)
    whole = np.column_stack([cells, np.round(cells @ rng.normal(size=FEATURES), 3)])
    folder.mkdir(exist_ok=True)
    header = ",".join([*(f"x{index:02}" for index in range(FEATURES)), "y"])  # features are in the order of names
    (folder / "patients.csv").write_text("\n".join([header, *(",".join(map(str, row)) for row in whole)]) + "\n")
    return folder / "patients.csv", whole


@cache
def _issued(names: tuple[str, ...], folder: Path) -> EmulatedKeys:
    """Keys of such silos, made once: contexts take a while."""
    return emulated_keys(list(names), folder / f"keys-{len(names)}", seed=1)


@dataclass
class Federation:
    """A run in the hands of an adversary.

    Args:
        root: folder that all tests share: keys, and the silos' data.
        folder: of this one: copies of the silos' keys, for silos count in them.
        count: silos.
        cipher: of the strategy.
        run: name of the run.
        owner: what else the silos' owners say in silo.yaml.
        changes: to the run's specification.
        on_disk: silos keep their state in their folders, and the server single updates in ``out``.
        settings: run configuration, as JSON, by silo; where a silo is left out, it is empty.
    """

    root: Path
    folder: Path
    count: int = 3
    cipher: str = "{kind: bfv, members: 2}"
    run: str = "run-1"
    owner: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    on_disk: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = [f"silo-{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"[: self.count]]
        issued = _issued(tuple(self.names), self.root)
        self.keys = issued.server
        self.rings = {name: self.folder / "keys" / name for name in self.names}
        for name, ring in self.rings.items():
            if not ring.exists():
                shutil.copytree(issued.silos[name], ring)
        self.table, self.rows = patients(self.root / "data")
        self.silos: dict[str, Victim] = {}
        self.updates: dict[str, bytes] = {}
        self.ids: list[str] = []
        self.bases: dict[str, tuple[int, int]] = {}
        self.serials = dict.fromkeys(self.names, 0)
        self.begin()

    # What the server is.

    def task(self) -> dict[str, Any]:
        data = {"kind": "table", "file": str(self.table), "target": "y", "classes": 0}
        return {"kind": "linear", "loss": "squared", "data": data, "partition": {"kind": "iid"}}

    def spec(self, run: str | None = None, **changes: Any) -> RunSpec:
        overrides = [f"cipher={self.cipher}", f"local={{steps: {STEPS}, batch_size: {BATCH}, learning_rate: {RATE}}}"]
        spec = RunSpec.of(StrategyConfig.load("fedavg", overrides), None, self.count).model_dump()
        more = {"task": self.task(), "run": run or self.run, "quorum": self.count, **self.changes, **changes}
        more["local"] = {**spec["local"], "threads": 1, **more.get("local", {})}
        return RunSpec.model_validate({**spec, **more})

    def config(self, name: str, **more: Any) -> SiloStartConfig:
        """The silo's own file."""
        state = self.folder / "state" / name
        state.mkdir(parents=True, exist_ok=True)
        said = {"data": [str(self.root / "data")], "keys": str(self.rings[name]), **self.owner, **more}
        return SiloStartConfig(name=name, server="localhost:1", insecure=True, state=str(state), **said)

    def silo(self, name: str, spec: RunSpec | None = None, folder: Path | None = None, **owner: Any) -> Victim:
        """A trainer that knows nothing yet: of a silo that joins, or the first one for another run."""
        settings = self.settings.get(name, "{}")
        identity = Identity((spec or self.spec()).dump(), self.names.index(name), name, run_config=settings)
        if folder is not None:
            identity.save(folder)
        return Victim(identity, self.config(name, **owner), folder)

    def begin(self, run: str | None = None) -> None:
        """Greet all silos of a run, as an honest server does."""
        self.run = run or self.run
        spec = self.spec()
        self.silos = {name: self.silo(name, spec, self._home(name)) for name in self.names}
        described = self.silos[self.names[0]].ask(AskModel()).reply
        assert isinstance(described, InitialModel), described
        plan = spec.encryption_plan(described.layout)
        assert plan is not None
        self.plan = plan
        kept = Evidence(self.out / EVIDENCE, self.run, 8, 2**30) if self.on_disk else None
        self.aggregator = EncryptedAggregator(plan, self.keys, evidence=kept)
        self.version = 0
        for name, silo in self.silos.items():
            self.greet(name, silo)

    @property
    def out(self) -> Path:
        """The server's folder of the run."""
        return self.folder / "run"

    def _home(self, name: str) -> Path | None:
        if not self.on_disk:
            return None
        home = Path(self.config(name).state) / STATE_FOLDER / self.run
        home.mkdir(parents=True, exist_ok=True)
        return home

    def greet(self, name: str, silo: Victim) -> Heard:
        heard = silo.ask(Describe())
        assert isinstance(heard.reply, Hello), heard.words
        self.aggregator.greet(name, heard.reply.holds, heard.payload)
        return heard

    def order(self, name: str, **changes: Any) -> WorkOrder:
        self.serials[name] += 1
        number = self.serials[name]
        order = WorkOrder(f"{name}/{number}", self.version, number, BATCH, STEPS, RATE, seed=number, evaluate=False)
        return replace(order, **changes)

    def train(self, name: str, order: WorkOrder | None = None, payload: Payload | None = None) -> Heard:
        """Have a silo train; what an honest server sends goes with the order, unless ``payload`` does."""
        order = order or self.order(name)
        self.aggregator.begin(order.update_id)
        heard = self.silos[name].ask(Train(order), self.aggregator.outgoing(name) if payload is None else payload)
        if heard.payload is not None:
            self.updates[order.update_id] = heard.payload.tobytes()
            self.bases[order.update_id] = order.base_version, self.aggregator._inbox.attempt(name, self.version)
            self.last = order.update_id
            self.ids.append(order.update_id)
        return heard

    def upload(self, orders: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Updates of the silos that do not refuse such orders, in the inbox; returns their ids."""
        ids = []
        for name, work in orders.items():
            heard = self.train(name, self.order(name, **work))
            if heard.payload is not None:
                ids.append(self._hold(name, heard.payload))
        return ids

    def collect(self, name: str, **changes: Any) -> str:
        """An update of a silo, in the inbox; returns its id."""
        heard = self.train(name, self.order(name, **changes))
        assert heard.payload is not None, heard.words
        return self._hold(name, heard.payload)

    def _hold(self, name: str, update: Payload) -> str:
        self.aggregator.put(name, self.last, update)
        self.aggregator.holds(name, self.version)
        return self.last

    def commit(self, update_ids: Sequence[str], lost: Sequence[str] = ()) -> None:
        self.version += 1
        self.aggregator.commit(Commit(self.version, dict.fromkeys(sorted(update_ids), 1 / len(update_ids))))
        self.unmask(lost)

    def unmask(self, lost: Sequence[str] = ()) -> None:
        """Carry questions about masks to all silos but those that are lost."""
        while self.aggregator.blocked and (questions := self.aggregator.questions()):
            for name, question in questions.items():
                heard = None if name in lost else self.silos[name].ask(Question(), question)
                if heard is None or heard.payload is None:
                    self.aggregator.give_up(name)
                else:
                    self.aggregator.answer(name, heard.payload)

    def round(self, names: Sequence[str] | None = None) -> None:
        """One honest round, after which the server has its sums."""
        self.commit([self.collect(name) for name in names or self.names])

    def follow(self, names: Sequence[str] | None = None) -> None:
        """Bring silos to the newest version."""
        for name in names or self.names:
            heard = self.train(name)
            assert not heard.refused, heard.words
            self.aggregator.holds(name, self.version)

    def bring(self, names: Sequence[str] | None = None) -> None:
        """Send silos the newest version, whether they take it or not, and have nothing trained."""
        for name in names or self.names:
            self.silos[name].ask(EvaluateModel(self.version), self.aggregator.outgoing(name))

    # What it has, and what it makes of it.

    def envelope(self, update_id: str) -> wire.Envelope:
        data, plan = self.updates[update_id], self.plan
        expected = wire.Expected(
            wire.Kind.UPDATE, plan.form, plan.packing, update_id.rpartition("/")[0], *self.bases[update_id],
            self.keys.epoch, self.keys.fingerprint, None, plan.chunks, update_id,
        )  # fmt: skip
        return wire.decode(data[: len(data) - 4 * plan.clear_values], expected)

    # For the judge.

    @property
    def group(self) -> GroupKey:
        return open_ring(self.rings[self.names[0]]).group

    @property
    def first_model(self) -> Vector:
        return self.silos[self.names[0]].session.initial_model()

    def honest_step(self, name: str | None = None) -> float:
        """Length of what one honest silo's update moves its model by, before any training."""
        return float(np.linalg.norm(self.own_update(name or self.names[0], self.first_model)))

    def own_update(self, name: str, base: Vector, **changes: Any) -> Vector:
        """What this silo's training from ``base`` comes to, in the clear."""
        order = replace(WorkOrder(f"{name}/1", 0, 1, BATCH, STEPS, RATE, seed=1, evaluate=False), **changes)
        return Federation.silo(self, name).session._trainer.run(order, base, Cursor()).update
