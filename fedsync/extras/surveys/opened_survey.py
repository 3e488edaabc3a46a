"""Decryption of a survey's sums, at a silo. A survey computes joint statistics of all silos before the training run."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedsync.common.errors import SERVER, ConfigError, ProtocolError
from fedsync.common.files import OWNER_FILE, write_atomically
from fedsync.config.run_spec import RunSpec, SealedSurvey
from fedsync.config.sections.survey import standardised, surveyed_task
from fedsync.evaluation.survey.findings import STATISTICS, scales_of, told
from fedsync.evaluation.survey.table_sums import SurveyForm, SurveySums, read_sums
from fedsync.model.transfer import Payload
from fedsync.silo.owner.owner_policy import OwnerPolicy
from fedsync.silo.protocol import Identity

if TYPE_CHECKING:
    from fedsync.cipher.keys.keyring import Ring


def surveyed(spec: RunSpec, sums: SurveySums | None, folder: Path | None) -> RunSpec:
    """Return the run with the findings of its sealed survey; write their public part to ``folder`` if it is given.

    Raises `ConfigError` if the findings are missing or would disclose single people, or if the disk rejects the file.
    """
    if sums is None or spec.survey is None:
        raise ConfigError("task", "the survey before the run came to nothing", "Begin another run")
    asked = surveyed_task(RunSpec.parse(spec.survey.spec)).statistics
    scales = scales_of(sums, asked.least)
    if folder is not None:
        found = told(sums, asked.least, asked.ranges, asked.bins)
        write_atomically(folder / STATISTICS, json.dumps(found, indent=2).encode(), OWNER_FILE)
    return standardised(spec, scales)


def open_survey(survey: SealedSurvey, identity: Identity, ring: Ring, owner: OwnerPolicy) -> SurveySums | None:
    """Open a sealed survey, part of the run's specification as the server sent it; None if it holds no silo's sums.

    Raises `ProtocolError` if the survey is invalid, or differs from the sums that silos sealed. Raises `SpoiledSum` if
    silos sealed for another survey, and `OwnerRefusal` if it seals less than the owner demands.
    """
    from fedsync.cipher.silo.opening import model_of
    from fedsync.cipher.suites import open_suite

    spec = RunSpec.parse(survey.spec)
    task = surveyed_task(spec)
    if json.loads(survey.spec)["task"]["of"] != json.loads(identity.spec)["task"]:
        raise ProtocolError(SERVER, "survey", "it is of another task than the run's")
    form = SurveyForm(spec.silos, task.of.classes, tuple(survey.columns.items()), task.statistics.bins)
    plan = spec.encryption_plan(form.layout)
    if plan is None:
        raise ProtocolError(SERVER, "survey", "it is not sealed")
    owner.check_seal(plan)
    sealer, specification = open_suite(plan.kind, ring.group), replace(identity, spec=survey.spec).text.lasting
    first = np.zeros(form.layout.size, dtype=np.float32)
    return read_sums(form, model_of(plan, ring, sealer, spec.origin, specification, _sums(survey), first))


def _sums(survey: SealedSurvey) -> Payload:
    try:
        return np.frombuffer(base64.b64decode(survey.sums, validate=True), dtype=np.uint8)
    except binascii.Error as error:
        raise ProtocolError(SERVER, "survey", "its sums are not in base64") from error
