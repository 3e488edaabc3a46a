"""Encryption in virtual time: real keys, real ciphertexts, silos that are objects in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fedsync.config.strategy import StrategyConfig
from fedsync.core.transfer import Aggregator, Replica
from fedsync.train.loop import Trainer
from fedsync.train.sample import likely_update

if TYPE_CHECKING:
    from fedsync.cipher.plan import EncryptionPlan


def encrypted_aggregator(
    plan: EncryptionPlan, config: StrategyConfig, trainers: Mapping[str, Trainer]
) -> tuple[Aggregator, dict[str, Replica]]:
    """The server's store and each silo's port.

    Args:
        plan: how updates are sealed.
        config: the strategy.
        trainers: of the silos, by name.
    """
    from fedsync.cipher.keys.emulated import emulated_rings
    from fedsync.cipher.server.aggregator import EncryptedAggregator
    from fedsync.cipher.silo.replica import EncryptedReplica
    from fedsync.cipher.suites import open_suite

    local = config.local
    server, rings = emulated_rings(list(trainers), config.seed)

    def replica(name: str, trainer: Trainer) -> Replica:
        return EncryptedReplica(
            plan,
            rings[name],
            open_suite(plan.kind, rings[name].group),
            trainer.examples,
            trainer.initial_model,
            lambda: likely_update(trainer, local.batch_size, local.steps, local.learning_rate, config.seed),
        )

    return EncryptedAggregator(plan, server), {name: replica(name, trainer) for name, trainer in trainers.items()}
