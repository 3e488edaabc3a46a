"""FedSync: federated learning on Flower for silos of unequal speed.

The public names load on first use, so that ``import fedsync`` stays cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedsync.common.errors import ConfigError, FedSyncError, PolicyError, ProtocolError, RunError
    from fedsync.config.cluster import ClusterConfig
    from fedsync.config.strategy import StrategyConfig
    from fedsync.flower.flower_strategy import FedSync
    from fedsync.model.tensor_parts import PartPatterns
    from fedsync.observe.replay import replay
    from fedsync.policies.aggregate.weighers import AggregationPolicy
    from fedsync.policies.balance.balancer_base import BalancerPolicy
    from fedsync.policies.barrier.barrier_base import BarrierPolicy
    from fedsync.policies.extensions.feature_base import FeaturePolicy
    from fedsync.policies.optimize.optimizer_policies import ServerOptimizerPolicy
    from fedsync.policies.predict.predictor_base import PredictorPolicy
    from fedsync.policies.schema import register
    from fedsync.tasks.task_protocol import SiloData, SiloSlot, Task

__version__ = "0.1.0"

_HOMES = {
    "ClusterConfig": "fedsync.config.cluster",
    "StrategyConfig": "fedsync.config.strategy",
    "ConfigError": "fedsync.common.errors",
    "FedSyncError": "fedsync.common.errors",
    "PolicyError": "fedsync.common.errors",
    "PartPatterns": "fedsync.model.tensor_parts",
    "ProtocolError": "fedsync.common.errors",
    "RunError": "fedsync.common.errors",
    "replay": "fedsync.observe.replay",
    "AggregationPolicy": "fedsync.policies.aggregate.weighers",
    "BalancerPolicy": "fedsync.policies.balance.balancer_base",
    "BarrierPolicy": "fedsync.policies.barrier.barrier_base",
    "FeaturePolicy": "fedsync.policies.extensions.feature_base",
    "PredictorPolicy": "fedsync.policies.predict.predictor_base",
    "ServerOptimizerPolicy": "fedsync.policies.optimize.optimizer_policies",
    "register": "fedsync.policies.schema",
    "FedSync": "fedsync.flower.flower_strategy",
    "SiloData": "fedsync.tasks.task_protocol",
    "SiloSlot": "fedsync.tasks.task_protocol",
    "Task": "fedsync.tasks.task_protocol",
}

__all__ = [
    "AggregationPolicy",
    "BalancerPolicy",
    "BarrierPolicy",
    "ClusterConfig",
    "ConfigError",
    "FeaturePolicy",
    "FedSync",
    "FedSyncError",
    "PartPatterns",
    "PolicyError",
    "PredictorPolicy",
    "ProtocolError",
    "RunError",
    "ServerOptimizerPolicy",
    "SiloData",
    "SiloSlot",
    "StrategyConfig",
    "Task",
    "register",
    "replay",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedsync' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
