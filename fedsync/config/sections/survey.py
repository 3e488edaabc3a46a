"""The survey before a run: a run of its own, in which silos find out together what their columns hold.

It has the run's silos, cipher and patience, one barrier for all (`bsp`), and a model that is a vector of sums
(`fedsync.evaluation.survey.table_sums`). So what holds for versions holds for statistics: who must be in one, what is sealed, what
silos compare, what a silo that was killed does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedsync.common.errors import SERVER, ProtocolError
from fedsync.config.cipher import MaskedConfig, PlainConfig
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.config.tasks.task_kinds import CsvConfig, SurveyConfig
from fedsync.evaluation.survey.findings import ColumnScale

_MEMBERS = 2
"""Silos whose sums are opened together, at least: those of one would be its own."""


def survey_of(config: StrategyConfig, silos: int | None = None) -> StrategyConfig | None:
    """The survey that comes before a run; None if there is none. It fails if it ends with fewer silos than may begin.

    Args:
        config: of the run.
        silos: number of silos in the silo file that are there at the start, or None without one.
    """
    task = config.task
    asked = task.survey() if isinstance(task, CsvConfig) else None
    if asked is None:
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
            "task": {"kind": "survey", "of": task.model_dump()},
            "evaluation": {"metrics": []},
            "fraction_evaluate": 0.0 if isinstance(config.cipher, PlainConfig) else 1.0,
            "waiting": config.waiting.model_dump(),
        }
    )


def rounds_of(bins: int) -> int:
    """Of a survey whose histograms have so many bins."""
    return 2 if bins else 1


def _cipher(config: StrategyConfig) -> dict[str, Any]:
    """As in the run, but that everything is sealed, in 16 bits, and more than one silo is in a sum."""
    cipher = config.cipher.model_dump()
    sealed = cipher["inner"] if isinstance(config.cipher, MaskedConfig) else cipher
    if not isinstance(config.cipher, PlainConfig):
        members = sealed["members"] and max(sealed["members"], _MEMBERS)
        sealed |= {"bits": 16, "only": [], "members": members}
    return cipher


def standardised(spec: RunSpec, scales: Mapping[str, ColumnScale]) -> RunSpec:
    """The run once it is known what its columns are standardised by."""
    task = spec.task
    if not isinstance(task, CsvConfig) or task.standardise != "federated":
        return spec
    known = {name: [scale.mean, scale.deviation] for name, scale in scales.items()}
    return spec.model_copy(update={"task": task.model_copy(update={"standardise": known})})


def surveyed_task(spec: RunSpec) -> SurveyConfig:
    """The task of a run that is a survey.

    Raises:
        ProtocolError: it is none.
    """
    if not isinstance(spec.task, SurveyConfig):
        raise ProtocolError(SERVER, "survey", f"it is a run of the task {spec.task.kind!r}")
    return spec.task
