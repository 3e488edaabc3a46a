"""A silo with a privacy budget as a lying server reaches it, and what the judge of an attack reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fedsync.config.run_spec import RunSpec
from fedsync.config.silo_start import SiloStartConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import WorkOrder, WorkReport
from fedsync.model.layout import Vector
from fedsync.privacy.accounting import epsilon
from fedsync.privacy.release import Release
from fedsync.silo.protocol import Identity, Refusal, Refused, Train
from tests.attacks.adversary import Heard, Victim

ROWS, BATCH = 24, 6
BUDGET = {"epsilon": 8.0, "delta": 1e-3, "least_noise": 1.0, "largest_clip": 1.0}
DP = {"kind": "dp-sgd", "clip": 1.0, "noise_multiplier": 1.0}
SCALES = {"age": [50.0, 10.0], "dose": [0.0, 1.0]}
TASK = {"kind": "csv", "file": "data:patients", "target": "ill", "standardise": SCALES}
HUGE = np.float32(3e38)


def table(path: Path, **changes: str) -> Path:
    """A table of patients; ``changes`` replaces lines by their number, as in ``row3="50,1.5,1"``."""
    rng = np.random.default_rng(1)
    lines = [f"{50 + rng.integers(-9, 9)},{rng.normal():.3f},{index % 2}" for index in range(ROWS)]
    for place, line in changes.items():
        lines[int(place.removeprefix("row"))] = line
    path.write_text("\n".join(["age,dose,ill", *lines]) + "\n")
    return path


class Silo:
    """A silo of an owner with a silo.yaml, as a server reaches it."""

    def __init__(self, folder: Path, owner: Any = None, **rows: str) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        folder.chmod(0o700)
        (folder / "data").mkdir()
        (folder / "state").mkdir(mode=0o700)  # as `fedsync silo start` makes it
        said = {
            "name": "silo-a", "server": "localhost:1", "insecure": True, "state": "state",
            "limits": {"batch_size": 1, "samples": 1},
            "data": {"patients": str(table(folder / "data" / "patients.csv", **rows))}, "privacy": BUDGET,
            **(owner or {}),
        }  # fmt: skip
        (folder / "silo.yaml").write_text(yaml.safe_dump(said))
        self.owner = SiloStartConfig.load(folder / "silo.yaml")
        self.number = 0

    def begin(self, folder: Path | None = None, **changes: Any) -> Victim:
        identity = Identity(spec(**changes).dump(), 0, "silo-a")
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            identity.save(folder)
        return Victim(identity, self.owner, folder)

    def order(self, **changes: Any) -> WorkOrder:
        self.number += 1
        made = WorkOrder(f"silo-a/{self.number}", 0, self.number, BATCH, 1, 0.1, seed=7, evaluate=False)
        return replace(made, **changes)

    def train(self, victim: Victim, model: Vector | None = None, **changes: Any) -> Heard:
        return victim.ask(Train(self.order(**changes)), sent(zeros() if model is None else model))

    @property
    def entries(self) -> list[dict[str, Any]]:
        found = [line for file in sorted(self.ledgers.glob("*.jsonl")) for line in file.read_text().splitlines()]
        return [json.loads(line) for line in found]

    @property
    def ledgers(self) -> Path:
        return self.folder / "state" / "privacy"

    def spent(self) -> float:
        """Epsilon by the ledger, added up by the judge."""
        releases: dict[Release, int] = {}
        for line in self.entries:
            release = Release(line["rate"], line["noise"])
            releases[release] = releases.get(release, 0) + counted(line)
        return epsilon(releases, BUDGET["delta"])

    @property
    def steps(self) -> int:
        return sum(map(counted, self.entries))


def neighbours(place: Path, **rows: str) -> tuple[Silo, Silo]:
    """Two silos whose tables differ in these rows."""
    return Silo(place / "with", **rows), Silo(place / "without")


def counted(line: Mapping[str, Any]) -> int:
    """Releases that a line of a ledger adds; below zero for a line that gives some back."""
    return int(line["times"]) * {"spent": 1, "returned": -1}[line["kind"]]


def spec(**changes: Any) -> RunSpec:
    plain = RunSpec.of(StrategyConfig.load("fedavg", [f"local={{steps: 1, batch_size: {BATCH}}}"]), None, 1)
    told = {"task": TASK, "run": "run-1", "quorum": 1, "privacy": DP, "silos": 1, **changes}
    local = {**plain.model_dump()["local"], "threads": 1, **told.pop("local", {})}
    return RunSpec.model_validate({**plain.model_dump(), **told, "local": local})


def zeros() -> Vector:
    return np.zeros(6, np.float32)


def sent(model: Vector) -> Any:
    return np.asarray(model, np.float32).view(np.uint8)


def answers(heard: Heard) -> Vector:
    assert isinstance(heard.reply, WorkReport), heard.words
    assert heard.payload is not None
    return np.asarray(heard.payload).view(np.float32)


def code(heard: Heard) -> Refusal:
    assert isinstance(heard.reply, Refused), heard.words
    return heard.reply.code
