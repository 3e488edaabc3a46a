"""Result of a survey (joint statistics of columns): a file for users, and data for the silos of a subsequent run."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path

from fedsync.common import foreign
from fedsync.common.errors import PolicyError, RunError
from fedsync.common.files import write_result
from fedsync.config.run_spec import RunSpec, SealedSurvey
from fedsync.config.sections.survey import rounds_of, standardised, surveyed_task
from fedsync.config.tasks.survival_task import SurveyConfig
from fedsync.evaluation.survey.findings import STATISTICS, ColumnScale, scales_of, told
from fedsync.evaluation.survey.table_sums import SurveyForm, read_sums
from fedsync.model.layout import Layout, Vector
from fedsync.model.plain_aggregator import PlainAggregator
from fedsync.model.transfer import Aggregator
from fedsync.tasks.task_section import TaskSection

logger = foreign.logger(__name__)

FOLDER = "survey"
"""Folder of the survey's files, inside the folder of the subsequent run."""


def after_survey(spec: RunSpec, survey: str, layout: Layout, aggregator: Aggregator, out: Path) -> RunSpec:
    """Return the run's specification with the survey's result; write `STATISTICS` if sums are not encrypted. Raises
    `RunError` if no silo sent statistics, `ProtocolError` for invalid sums, and `ConfigError` if a column has so few
    cells that its mean would disclose individuals.
    """
    task = surveyed_task(RunSpec.parse(survey))
    if not isinstance(aggregator, PlainAggregator):
        bins = task.statistics.bins
        sealed = _sealed(survey, SurveyForm.of(layout, bins), rounds_of(bins), aggregator)
        return spec.model_copy(update={"survey": sealed})
    return standardised(spec, write_statistics(task, layout, aggregator.model, out))


def write_statistics(task: TaskSection, layout: Layout, model: Vector, out: Path) -> Mapping[str, ColumnScale]:
    """Write `STATISTICS` from the sums of a survey of columns, and return the scales; raises as `after_survey`. For any
    other task, do nothing.
    """
    if not isinstance(task, SurveyConfig) or task.survival is not None:
        return {}
    asked = task.statistics
    sums = read_sums(SurveyForm.of(layout, asked.bins), model)
    if sums is None:
        raise RunError("the survey has no result: no silo sent the statistics of its columns")
    scales = scales_of(sums, asked.least)
    found = told(sums, asked.least, asked.ranges, asked.bins)
    write_result(out / STATISTICS, (json.dumps(found, indent=2) + "\n").encode())
    logger.info("statistics of %d silos: %s", sums.silos, out / STATISTICS)
    return scales


def _sealed(survey: str, form: SurveyForm, rounds: int, aggregator: Aggregator) -> SealedSurvey:
    from fedsync.cipher.server.sealed_aggregator import EncryptedAggregator

    if not isinstance(aggregator, EncryptedAggregator):
        raise PolicyError(f"{type(aggregator).__name__} adds up no survey")
    sums = aggregator.from_the_beginning(rounds)
    return SealedSurvey(spec=survey, columns=dict(form.columns), sums=base64.b64encode(sums.tobytes()).decode("ascii"))
