"""Factories of a silo's copy of the model (`fedsync.model.transfer.Replica`), which decodes and encodes messages."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fedsync.config.run_spec import RunSpec
from fedsync.core.orders import WorkOrder
from fedsync.model.chunked_arrays import ArrayKeeper
from fedsync.model.layout import Vector
from fedsync.model.plain_replica import PlainReplica
from fedsync.model.running_statistics import fitted
from fedsync.model.transfer import Replica
from fedsync.silo.protocol import COPY, Identity
from fedsync.train.silo_trainer import SiloTrainer, TrainerFacts, likely_update

if TYPE_CHECKING:
    from fedsync.cipher.keys.keyring import Ring
    from fedsync.cipher.keys.material import GroupKey
    from fedsync.cipher.plan import EncryptionPlan
    from fedsync.cipher.silo.sealing import Pipeline

HELD = "held"  # subfolder with the held model, for a silo that receives differences

_SEALERS = 4  # sealing processes for one silo

_LARGE = 256  # chunks that justify several processes: two million parameters at 16 bits


class TrainerFailed(Exception):
    """Failure of the silo's trainer, for ``reason``, while sealed data was opened."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


def made_initial(trainer: SiloTrainer) -> Vector:
    try:
        return trainer.initial_model()
    except Exception as error:
        raise TrainerFailed(error) from error


def plain_replica(spec: RunSpec, facts: TrainerFacts, folder: Path | None) -> PlainReplica:
    weighting = spec.aggregation.weigher(spec.local.solver(spec.task)).weighting
    keeper = ArrayKeeper(None if folder is None else folder / HELD, or_memory=True)
    return PlainReplica(
        facts.layout.size,
        fitted(spec.wire.formats, facts.layout),
        weighting,
        facts.examples,
        keeper,
        controlled=spec.controls,
    )


def encrypted_replica(
    plan: EncryptionPlan,
    spec: RunSpec,
    identity: Identity,
    trainer: SiloTrainer,
    examples: int,
    estimated: Callable[[WorkOrder], int | None],
    ring: Ring,
    folder: Path | None,
    first_model: str | None,
    *,
    seeded: bool,
) -> Replica:
    from fedsync.cipher.silo.replica import EncryptedReplica
    from fedsync.cipher.suites import open_suite

    local, size = spec.local, min(spec.local.batch_size, examples)
    return EncryptedReplica(
        plan,
        ring,
        open_suite(plan.kind, ring.group),
        examples,
        partial(made_initial, trainer),
        lambda: likely_update(trainer, estimated, size, local.steps, local.learning_rate, spec.seed),
        None if folder is None else folder / COPY,
        spec.run,
        _pipeline(spec, plan, ring.group),
        identity.text.lasting,
        first_model,
        spec.origin,
        seeded=seeded,
    )


def _pipeline(spec: RunSpec, plan: EncryptionPlan, group: GroupKey) -> Pipeline | None:
    processes = min((os.cpu_count() or 1) // 2, _SEALERS)
    if spec.emulate or plan.masked or processes < 2 or plan.chunks < _LARGE:
        return None
    from fedsync.cipher.silo.sealing import Pool

    return Pool(plan.kind, group, processes)
