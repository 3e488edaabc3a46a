"""A silo's report is hostile input until it passes here."""

from __future__ import annotations

import math

from fedsync.core.errors import ProtocolError
from fedsync.core.orders import Evaluation, UpdateMeta, WorkOrder, WorkReport

MAX_SPEED = 1e9
"""Samples per second that no machine reaches; a faster report is a lie or a broken clock."""

MAX_WINDOWS = 64


def check_report(silo: str, order: WorkOrder, meta: UpdateMeta, report: WorkReport) -> None:
    """Check a report against the order it answers.

    Raises:
        ProtocolError: names the silo and the first check that fails.
    """

    def require(holds: bool, check: str, detail: str) -> None:
        if not holds:
            raise ProtocolError(silo, check, detail)

    require(report.base_version == order.base_version, "version", f"started from version {report.base_version}")
    require(1 <= report.steps <= order.max_steps, "steps", f"{report.steps} of {order.max_steps} steps")
    most = report.steps * order.batch_size
    require(1 <= report.samples <= most, "samples", f"{report.samples} samples in steps that hold {most}")
    require((meta.steps, meta.samples) == (report.steps, report.samples), "meta", "report and update disagree")
    require(meta.examples >= 1 and meta.nbytes >= 0, "meta", f"{meta.examples} examples, {meta.nbytes} bytes")
    require(math.isfinite(report.loss), "loss", f"training loss {report.loss}")
    require(
        math.isfinite(report.compute_s) and report.compute_s > 0, "compute time", f"{report.compute_s} s of training"
    )
    check_speed(silo, report.samples / report.compute_s)
    require(
        all(math.isfinite(seconds) and seconds >= 0 for seconds in report.overhead_s.values()),
        "overhead",
        f"{dict(report.overhead_s)}",
    )
    require(len(report.windows) <= MAX_WINDOWS, "windows", f"{len(report.windows)} windows, at most {MAX_WINDOWS}")
    for window in report.windows:
        check_speed(silo, window.speed)
        shares = (window.cpu, window.memory)
        # A mean of shares may exceed 1 by rounding.
        require(all(0 <= share <= 1.001 for share in shares), "resources", f"{window}")
    require(report.batch_cap is None or report.batch_cap >= 1, "batch cap", f"{report.batch_cap}")
    if report.evaluation is not None:
        check_evaluation(silo, report.evaluation)


def check_speed(silo: str, speed: float) -> None:
    """Check that a speed [samples/s] is one that a machine can have."""
    if not (math.isfinite(speed) and 0 < speed <= MAX_SPEED):
        raise ProtocolError(silo, "speed", f"{speed:g} samples/s lies outside (0, {MAX_SPEED:g}]")


def check_evaluation(silo: str, evaluation: Evaluation) -> None:
    """Check the sums of an evaluation."""
    fine = math.isfinite(evaluation.loss) and math.isfinite(evaluation.correct) and evaluation.samples >= 0
    if not fine:
        raise ProtocolError(silo, "evaluation", f"{evaluation}")
