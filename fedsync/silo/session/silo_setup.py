"""A silo's place in a run: what its training code is told, and how it is to train."""

from __future__ import annotations

import json
from dataclasses import replace

from fedsync.client.silo_facts import Silo
from fedsync.config.run_spec import RunSpec
from fedsync.silo.protocol import Identity
from fedsync.train.guarded_trainer import GuardedTrainer
from fedsync.train.machine.device import resolve
from fedsync.train.options import LocalOptions


def local_trainer(spec: RunSpec, identity: Identity, *, many: bool = False) -> GuardedTrainer:
    """The trainer of the silo, in this process.

    Args:
        spec: the run, with the paths of the silo's data.
        identity: which silo.
        many: other silos of the run share this process, so that it has no helpers.

    Raises:
        ConfigError: data or device are not usable here.
        UserCodeError: training code of the user's own raised.
    """
    site, slots, local = place_of(spec, identity)
    local = replace(local, workers=0, processes=1) if many else local
    return GuardedTrainer(lambda: spec.task.trainer(site, slots, local, spec.model.build()))


def place_of(spec: RunSpec, identity: Identity) -> tuple[Silo, int, LocalOptions]:
    """What a task's trainer is made of: the silo, the number of silos, and the options.

    Raises:
        ConfigError: there is no such device.
    """
    machine = spec.emulate[identity.index] if spec.emulate else None
    options = replace(spec.local.build(), measured=spec.evaluation.wanted)
    if machine is not None:
        # Emulated silos share one machine: a thread each.
        options = replace(options, threads=options.threads or 1)
    if identity.device is not None:
        # As the run says, where the silo's owner has not decided otherwise.
        resolve(identity.device, "node configuration, device")
        options = replace(options, device=identity.device)
    if identity.processes is not None and not spec.task.own_loop:
        options = replace(options, processes=identity.processes)
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
    return silo, spec.silos, replace(options, resources=options.resources and identity.resources)
