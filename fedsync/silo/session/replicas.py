"""Makes a silo's copy of the model, which receives and sends; see `fedsync.model.transfer.Replica`."""

from __future__ import annotations

import os
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from fedsync.config.run_spec import RunSpec
from fedsync.core.orders import WorkOrder
from fedsync.model.array_keeper import ArrayKeeper
from fedsync.model.layout import Vector
from fedsync.model.plain_replica import PlainReplica
from fedsync.model.transfer import Replica
from fedsync.silo.protocol import COPY, Identity
from fedsync.train.sample import likely_update
from fedsync.train.silo_trainer import SiloTrainer

if TYPE_CHECKING:
    from fedsync.cipher.keys.keyring import Ring
    from fedsync.cipher.keys.material import GroupKey
    from fedsync.cipher.plan import EncryptionPlan
    from fedsync.cipher.silo.sealing import Pipeline
    from fedsync.train.schedule import Schedule, TorchSchedule

HELD = "held"
"""Folder, in the trainer's, of the model of a silo that is sent differences."""

_SEALERS = 4
"""Most processes that seal for one silo."""

_LARGE = 256
"""Chunks from which on several processes are worth starting: two million parameters at 16 bits."""


class TrainerFailed(Exception):
    """The silo's trainer failed, for ``reason``, while something sealed was opened."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


def made_initial(trainer: SiloTrainer) -> Vector:
    """The model before any training, float32 [values]; raises `TrainerFailed`."""
    try:
        return trainer.initial_model()
    except Exception as error:
        raise TrainerFailed(error) from error


def plain_replica(spec: RunSpec, trainer: SiloTrainer, folder: Path | None) -> PlainReplica:
    """In the clear."""
    weighting = spec.aggregation.weigher(spec.task.solver(spec.local)).weighting
    keeper = ArrayKeeper(None if folder is None else folder / HELD, or_memory=True)
    return PlainReplica(
        trainer.layout.size, spec.wire.formats, weighting, trainer.examples, keeper, controlled=spec.controls
    )


def encrypted_replica(
    plan: EncryptionPlan,
    spec: RunSpec,
    identity: Identity,
    trainer: SiloTrainer,
    ring: Ring,
    folder: Path | None,
    first_model: str | None,
) -> Replica:
    """Under encryption; arguments as of `fedsync.cipher.silo.replica.EncryptedReplica`, with files in ``folder``."""
    from fedsync.cipher.silo.replica import EncryptedReplica
    from fedsync.cipher.suites import open_suite

    local = spec.local
    return EncryptedReplica(
        plan,
        ring,
        open_suite(plan.kind, ring.group),
        trainer.examples,
        partial(made_initial, trainer),
        lambda: likely_update(trainer, local.batch_size, local.steps, local.learning_rate, spec.seed),
        None if folder is None else folder / COPY,
        spec.run,
        _pipeline(spec, plan, ring.group),
        identity.text.lasting,
        first_model,
        spec.origin,
        partial(_way, local.build().schedule),
    )


def _way(schedule: Schedule | TorchSchedule | None, order: WorkOrder, steps: int) -> float:
    """Sum of the learning rates of an order's first steps, in units of the order's."""
    return float(steps) if schedule is None else sum(islice(schedule.rates(1.0, order.max_steps), steps))


def _pipeline(spec: RunSpec, plan: EncryptionPlan, group: GroupKey) -> Pipeline | None:
    """Several processes that seal and open, where the update is large and the machine has processors to spare."""
    processes = min((os.cpu_count() or 1) // 2, _SEALERS)
    if spec.emulate or plan.masked or processes < 2 or plan.chunks < _LARGE:
        return None
    from fedsync.cipher.silo.sealing import Pool

    return Pool(plan.kind, group, processes)
