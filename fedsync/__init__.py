"""FedSync: federated learning on Flower for silos of unequal speed.

The public names load on first use, so that ``import fedsync`` stays cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedsync.config.cluster import ClusterConfig
    from fedsync.config.strategy import StrategyConfig
    from fedsync.core.errors import ConfigError, FedSyncError, PolicyError, ProtocolError, RunError
    from fedsync.core.parts import PartPatterns
    from fedsync.flower.strategy import FedSync
    from fedsync.observe.replay import replay
    from fedsync.policies.aggregate.base import AggregationPolicy
    from fedsync.policies.balance.base import BalancerPolicy
    from fedsync.policies.barrier.base import BarrierPolicy
    from fedsync.policies.features.base import FeaturePolicy
    from fedsync.policies.optimize.base import ServerOptimizerPolicy
    from fedsync.policies.predict.base import PredictorPolicy
    from fedsync.policies.schema import register
    from fedsync.tasks.protocol import SiloData, SiloSlot, Task

__version__ = "0.1.0"

_HOMES = {
    "ClusterConfig": "fedsync.config.cluster",
    "StrategyConfig": "fedsync.config.strategy",
    "ConfigError": "fedsync.core.errors",
    "FedSyncError": "fedsync.core.errors",
    "PolicyError": "fedsync.core.errors",
    "PartPatterns": "fedsync.core.parts",
    "ProtocolError": "fedsync.core.errors",
    "RunError": "fedsync.core.errors",
    "replay": "fedsync.observe.replay",
    "AggregationPolicy": "fedsync.policies.aggregate.base",
    "BalancerPolicy": "fedsync.policies.balance.base",
    "BarrierPolicy": "fedsync.policies.barrier.base",
    "FeaturePolicy": "fedsync.policies.features.base",
    "PredictorPolicy": "fedsync.policies.predict.base",
    "ServerOptimizerPolicy": "fedsync.policies.optimize.base",
    "register": "fedsync.policies.schema",
    "FedSync": "fedsync.flower.strategy",
    "SiloData": "fedsync.tasks.protocol",
    "SiloSlot": "fedsync.tasks.protocol",
    "Task": "fedsync.tasks.protocol",
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
