"""Every registered kind, and an example configuration of each.

What is registered is found by itself. `EXAMPLES` has settings that make laws bite in short runs.
"""

from functools import cache
from typing import Any

import yaml

from fedsync.config.locate import shipped_folder
from fedsync.config.strategy import StrategyConfig
from fedsync.core.state import Policies
from fedsync.policies.schema import kinds

EXAMPLES: dict[str, dict[str, dict[str, Any]]] = {
    "predictor": {
        "memoryless": {},
        "ema": {"alpha": 0.3},
        "arima": {"p": 1, "d": 1, "samples": 10, "renew": 20},
        "rnn": {"hidden": 4, "samples": 20},
        "lstm": {"hidden": 4, "samples": 20},
        "narx": {"hidden": 3, "samples": 22},
        "kalman": {"drift": 0.1},
        "mixture": {"experts": [{"kind": "ema"}, {"kind": "kalman"}, {"kind": "narx", "samples": 22}]},
    },
    "balancer": {
        "fixed": {},
        "proportional": {"floor": 2},
        "equalise": {"floor": 2, "multiple": 2},
        "leader-straggler": {"fast": {"step": 2, "window": 2}, "fine": {"step": 1, "window": 4}},
        "spend-evenly": {"budgets": {"silo-3": 4.0, "silo-4": 0.5}},
    },
    "barrier": {
        "bsp": {},
        "asp": {},
        "ssp": {"staleness": 1},
        "sampled": {"sample_size": 2, "staleness": 1},
        "fsp": {"interval": {"kind": "fixed", "interval_s": 0.5}},
        "a-bsp": {"sync_ratio": 0.6, "report_s": 0.3},
        "on-time": {"slack": 0.05, "report_s": 0.3},
        "elastic": {},
        "buffered": {"size": 3},
        "fedcompass": {"min_steps": 2, "max_steps": 8},
        "capped": {"cap_s": 0.7, "inner": {"kind": "bsp"}},
        "quorum": {"share": 0.5, "inner": {"kind": "bsp"}},
        "deadline": {"spread": 1.0, "inner": {"kind": "bsp"}},
        "fraction": {"share": 0.5, "inner": {"kind": "bsp"}},
    },
    "aggregation": {
        "fedavg": {"weight": "examples"},
        "fednova": {"weight": "silo"},
        "fedbuff": {"server_rate": 0.7},
        "fedasync": {"staleness": {"kind": "hinge", "slope": 2.0, "grace": 1}},
    },
}

VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    ("balancer", "proportional", {"scale": "steps"}),
    ("balancer", "proportional", {"scale": "learning_rate"}),
    ("balancer", "proportional", {"speeds": "declared", "cap": 12}),
    ("balancer", "proportional", {"curve": {"kind": "affine"}, "multiple": 5}),
    ("balancer", "equalise", {"speeds": "declared", "cap": 12}),
    ("aggregation", "fedavg", {"weight": "samples"}),
    ("aggregation", "fednova", {"server_rate": 0.5, "staleness": {"kind": "polynomial", "exponent": 1.0}}),
    ("barrier", "bsp", {"complete": True}),
    ("barrier", "sampled", {"sample_size": 1, "sampling": "basic"}),
    ("barrier", "sampled", {"sample_size": 3, "sampling": "grouped"}),
    ("barrier", "sampled", {"sample_size": 2, "redraw": False}),
    ("barrier", "fsp", {"interval": {"kind": "binary", "interval_s": 1.0}, "late": "drop", "passes": 0.01}),
    ("barrier", "fsp", {"interval": {"kind": "linear", "interval_s": 0.5, "stage_s": 3.0}, "grace": 0.1}),
    ("barrier", "fsp", {"interval": {"kind": "climb", "floor_s": 0.3, "rest": 1, "trials": 2}}),
    ("barrier", "fsp", {"interval": {"kind": "fixed", "interval_s": 0.4}, "wait_for": {"sample_size": 1}}),
    ("barrier", "buffered", {"size": 9}),
    ("barrier", "capped", {"cap_s": 0.7, "late": "drop", "inner": {"kind": "bsp"}}),
    ("barrier", "capped", {"cap_s": 0.01, "late": "drop", "inner": {"kind": "bsp"}}),
    ("barrier", "quorum", {"count": 2, "late": "drop", "inner": {"kind": "bsp"}}),
    ("barrier", "deadline", {"spread": 0.0, "late": "drop", "inner": {"kind": "bsp"}}),
    ("barrier", "elastic", {"lookahead": 3, "floor": 1, "method": "grid_scan"}),
]
"""Further settings of kinds in `EXAMPLES` that change what the coordinator does."""

COMPASS = {"kind": "fedcompass", "min_steps": 2, "max_steps": 8}
COMBINED: list[tuple[str, str, dict[str, Any]]] = [
    ("balancer", "equalise", {"scale": "steps"}),
    ("barrier", "capped", {"cap_s": 0.5, "inner": {"kind": "ssp", "staleness": 0}}),
    ("barrier", "capped", {"cap_s": 1.0, "inner": {"kind": "quorum", "count": 2, "inner": COMPASS}}),
    ("barrier", "fraction", {"share": 0.4, "least": 2, "inner": {"kind": "asp"}}),
    ("barrier", "fraction", {"share": 0.7, "inner": {"kind": "quorum", "share": 0.6, "inner": {"kind": "bsp"}}}),
    ("barrier", "fraction", {"share": 0.7, "inner": {"kind": "fsp", "interval": {"kind": "fixed", "interval_s": 0.5}}}),
    ("barrier", "fraction", {"share": 0.6, "inner": COMPASS}),
    ("barrier", "capped", {"cap_s": 0.7, "inner": {"kind": "fraction", "share": 0.5, "inner": {"kind": "bsp"}}}),
]
"""Combinations of what is above: they go through the laws with ``make full``."""

FURTHER = VARIANTS + COMBINED
"""Cases that are no examples of a kind."""

STEPS, BATCH_SIZE = 4, 10


@cache
def _shipped() -> list[dict[str, Any]]:
    """What every shipped strategy says."""
    return [yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(shipped_folder().glob("*.yaml"))]


def examples(section: str) -> dict[str, dict[str, Any]]:
    """Settings of every registered kind: those of `EXAMPLES`, else of the first shipped strategy that chooses it."""
    found: dict[str, dict[str, Any]] = {}
    for strategy in _shipped():
        if (chosen := strategy.get(section)) is not None:
            found.setdefault(chosen["kind"], {key: value for key, value in chosen.items() if key != "kind"})
    return {kind: EXAMPLES[section].get(kind, found.get(kind, {})) for kind in kinds(section)}


def cases() -> list[tuple[str, str, dict[str, Any]]]:
    """(section, kind, settings) of every example and variant."""
    every = [(section, kind, more) for section in EXAMPLES for kind, more in examples(section).items()]
    return every + VARIANTS + COMBINED


def name_of(case: tuple[str, str, dict[str, Any]]) -> str:
    """As tests name it."""
    return "-".join([case[1], *map(str, case[2].values())])


def configuration(case: tuple[str, str, dict[str, Any]], stop: dict[str, Any], min_silos: int = 1) -> StrategyConfig:
    """LB-BSP with one section replaced."""
    section, kind, more = case
    plain: dict[str, Any] = {
        "name": "law",
        "seed": 11,
        "min_silos": min_silos,
        "stop": stop,
        "local": {"steps": STEPS, "batch_size": BATCH_SIZE},
        "predictor": {"kind": "ema", "alpha": 0.2},
        "balancer": {"kind": "proportional"},
        "barrier": {"kind": "bsp"},
        "task": {"kind": "digits"},
    }
    return StrategyConfig.model_validate({**plain, section: {"kind": kind, **more}})


def policies_of(case: tuple[str, str, dict[str, Any]], stop: dict[str, Any]) -> Policies:
    """Everything that decides, for a case."""
    return configuration(case, stop).policies()
