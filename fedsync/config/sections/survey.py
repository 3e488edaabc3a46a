"""Survey: a separate run before training, in which silos compute joint statistics of their columns.

The survey uses the silos, cipher and timeouts of the run, and the barrier `bsp`. Its model is a vector of sums
(`fedsync.evaluation.survey.table_sums`). So the rules for model versions also protect statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedsync.common.errors import SERVER, ProtocolError
from fedsync.config.cipher import MaskedConfig, PlainConfig
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.config.tasks.survival_task import SurveyConfig
from fedsync.config.tasks.task_kinds import CsvConfig
from fedsync.evaluation.survey.findings import ColumnScale

_MEMBERS = 2
"""Minimum number of silos in a decrypted sum: a sum of one silo would disclose that silo's statistics."""


def survey_of(config: StrategyConfig, silos: int | None = None) -> StrategyConfig | None:
    """Return the survey before a run, or None; ``silos`` are those of the silo file that are present at the start."""
    task = config.task
    if not isinstance(task, CsvConfig) or (asked := task.survey()) is None:
        return None
    return StrategyConfig.model_validate(
        {
            "name": f"{config.name}-survey",
            "seed": config.seed,
            "min_silos": config.quorum(silos),
            "silos": config.silos,
            "most_examples": config.most_examples,
            "stop": {"rounds": rounds_of(asked.bins)},
            "local": {"steps": config.local.steps, "batch_size": config.local.batch_size},
            "balancer": {"kind": "fixed"},
            "barrier": {"kind": "bsp", "complete": True},
            "aggregation": {"kind": "fedavg", "weight": "silo"},
            "cipher": _cipher(config),
            "task": SurveyConfig(of=task),
            "evaluation": {"metrics": []},
            "fraction_evaluate": 0.0 if isinstance(config.cipher, PlainConfig) else 1.0,
            "waiting": config.waiting.model_dump(),
        }
    )


def rounds_of(bins: int) -> int:
    return 2 if bins else 1


def _cipher(config: StrategyConfig) -> dict[str, Any]:
    cipher = config.cipher.model_dump()
    sealed = cipher["inner"] if isinstance(config.cipher, MaskedConfig) else cipher
    if not isinstance(config.cipher, PlainConfig):
        members = sealed["members"] and max(sealed["members"], _MEMBERS)
        sealed |= {"bits": 16, "only": [], "members": members}
    return cipher


def standardised(spec: RunSpec, scales: Mapping[str, ColumnScale]) -> RunSpec:
    task = spec.task
    if not isinstance(task, CsvConfig) or task.standardise != "federated":
        return spec
    known = {name: [scale.mean, scale.deviation] for name, scale in scales.items()}
    return spec.model_copy(update={"task": replace(task, standardise=known)})


def surveyed_task(spec: RunSpec) -> SurveyConfig:
    if not isinstance(spec.task, SurveyConfig):
        raise ProtocolError(SERVER, "survey", f"it is a run of the task {spec.task.kind!r}")
    return spec.task
