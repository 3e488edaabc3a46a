"""Builder of a silo's trainer in this process, with the silo's facts and options for the training code."""

from __future__ import annotations

import json
from dataclasses import replace

from fedsync.client.app import Silo
from fedsync.config.run_spec import RunSpec
from fedsync.config.tasks.task_trainers import keeper_of, trainer_of
from fedsync.silo.protocol import Identity
from fedsync.train.guests.guest_code import guarded
from fedsync.train.local_trainer import GuardedTrainer, ModelKeeper
from fedsync.train.machine.device import resolve
from fedsync.train.options import LocalOptions


def local_trainer(spec: RunSpec, identity: Identity, *, many: bool = False) -> GuardedTrainer:
    """Build the silo's trainer in this process; no helper processes if ``many`` silos of the run share it.
    `ConfigError` if data or device are not usable here; `UserCodeError` for errors in the user's code.
    """
    site, slots, local = place_of(spec, identity)
    local = replace(local, workers=0) if many else local
    return GuardedTrainer(lambda: trainer_of(spec.task, site, slots, local, spec.model.build()))


def local_keeper(spec: RunSpec, identity: Identity) -> ModelKeeper:
    with guarded():
        return keeper_of(spec.task, *place_of(spec, identity), spec.model.build())


def place_of(spec: RunSpec, identity: Identity) -> tuple[Silo, int, LocalOptions]:
    machine = spec.emulate[identity.index] if spec.emulate else None
    options, private = spec.local.build(), spec.privacy is not None and spec.privacy.kind == "dp-sgd"
    if machine is not None:
        # Emulated silos share one machine, so each uses one thread by default.
        options = replace(options, threads=options.threads or 1)
    if identity.device is not None:
        # The device of the run's specification applies unless the owner names another device.
        resolve(identity.device, "node configuration, device")
        options = replace(options, device=identity.device)
    resources = options.resources and identity.resources
    options = replace(options, measured=spec.evaluation.wanted, private=private, resources=resources)
    silo = Silo(
        identity.index,
        machine.name if machine else identity.name,
        spec.seed,
        str(resolve(options.device)),
        machine.node_config if machine else json.loads(identity.node_config),
        json.loads(identity.run_config),
        train_config=spec.train_config,
        evaluate_config=spec.evaluate_config,
    )
    return silo, spec.silos, options
