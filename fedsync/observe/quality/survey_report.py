"""Result of a survey (joint statistics before a run) at the server: a file for users, and data for the run's silos."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from fedsync.common import foreign
from fedsync.common.errors import PolicyError, RunError
from fedsync.common.files import write_result
from fedsync.config.run_spec import RunSpec, SealedSurvey
from fedsync.config.sections.survey import rounds_of, standardised, surveyed_task
from fedsync.evaluation.survey.findings import STATISTICS, scales_of, told
from fedsync.evaluation.survey.table_sums import SurveyForm, read_sums
from fedsync.model.layout import Layout
from fedsync.model.plain_aggregator import PlainAggregator
from fedsync.model.transfer import Aggregator

logger = foreign.logger(__name__)

FOLDER = "survey"
"""Folder of the survey's files, inside the folder of the subsequent run."""


def after_survey(spec: RunSpec, survey: str, layout: Layout, aggregator: Aggregator, out: Path) -> RunSpec:
    """Return the run's specification with the survey's result; write `STATISTICS` if sums are not encrypted. Raises
    `RunError` if no silo sent statistics, `ProtocolError` for invalid sums, and `ConfigError` if a column has so few
    cells that its mean would disclose individuals.
    """
    asked = surveyed_task(RunSpec.parse(survey)).statistics
    form = SurveyForm.of(layout, asked.bins)
    if not isinstance(aggregator, PlainAggregator):
        return spec.model_copy(update={"survey": _sealed(survey, form, rounds_of(asked.bins), aggregator)})
    sums = read_sums(form, aggregator.model)
    if sums is None:
        raise RunError("the survey before the run has no result: no silo sent the statistics of its columns")
    scales = scales_of(sums, asked.least)
    found = told(sums, asked.least, asked.ranges, asked.bins)
    write_result(out / STATISTICS, (json.dumps(found, indent=2) + "\n").encode())
    logger.info("statistics of %d silos: %s", sums.silos, out / STATISTICS)
    return standardised(spec, scales)


def _sealed(survey: str, form: SurveyForm, rounds: int, aggregator: Aggregator) -> SealedSurvey:
    from fedsync.cipher.server.sealed_aggregator import EncryptedAggregator

    if not isinstance(aggregator, EncryptedAggregator):
        raise PolicyError(f"{type(aggregator).__name__} adds up no survey")
    sums = aggregator.from_the_beginning(rounds)
    return SealedSurvey(spec=survey, columns=dict(form.columns), sums=base64.b64encode(sums.tobytes()).decode("ascii"))
