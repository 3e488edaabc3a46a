"""A silo's report is hostile input until it passes here."""

from __future__ import annotations

import math
from math import inf

from fedsync.core.errors import ProtocolError
from fedsync.core.orders import Evaluation, SiloFacts, UpdateMeta, WorkOrder, WorkReport

MAX_SPEED = 1e9
"""Samples per second that no machine reaches; a faster report is a lie or a broken clock."""

MAX_WINDOWS = 64

MAX_TEST_SAMPLES = 10**9
"""Larger than any test split; a silo that claims more would drown all others in a pooled score."""


MAX_SCORE = 1e6
"""Score of a sample that no task gives; sums of larger ones might overflow."""


def check_report(silo: str, order: WorkOrder, meta: UpdateMeta, report: WorkReport) -> None:
    """Check a report against the order it answers.

    Raises:
        ProtocolError: names the silo and the first check that fails.
    """

    # Nothing is put into words unless it is wrong: this runs for every update.
    problem = _problem(order, meta, report)
    if problem is not None:
        raise ProtocolError(silo, *problem)
    check_speed(silo, report.samples / report.compute_s)
    for window in report.windows:
        check_speed(silo, window.speed)
        # A mean of shares may exceed 1 by rounding.
        if not all(share is None or 0 <= share <= 1.001 for share in (window.cpu, window.memory)):
            raise ProtocolError(silo, "resources", f"{window}")
    if report.batch_cap is not None and report.batch_cap < 1:
        raise ProtocolError(silo, "batch cap", f"{report.batch_cap}")
    if report.evaluation is not None:
        check_evaluation(silo, report.evaluation)


def _problem(order: WorkOrder, meta: UpdateMeta, report: WorkReport) -> tuple[str, str] | None:
    """The first check that the report as a whole fails, and what was found."""
    if report.base_version != order.base_version:
        return "version", f"started from version {report.base_version}"
    if not 1 <= report.steps <= order.max_steps:
        return "steps", f"{report.steps} of {order.max_steps} steps"
    most = report.steps * order.batch_size
    if not 1 <= report.samples <= most:
        return "samples", f"{report.samples} samples in steps that hold {most}"
    if meta.steps != report.steps or meta.samples != report.samples:
        return "meta", "report and update disagree"
    if not (meta.examples >= 1 and meta.nbytes >= 0):
        return "meta", f"{meta.examples} examples, {meta.nbytes} bytes"
    # A comparison with NaN is false; `math.isfinite` costs twice as much.
    if not -inf < report.loss < inf:
        return "loss", f"training loss {report.loss}"
    if not 0 < report.compute_s < inf:
        return "compute time", f"{report.compute_s} s of training"
    for seconds in report.overhead_s.values():
        if not 0 <= seconds < inf:
            return "overhead", f"{dict(report.overhead_s)}"
    if len(report.windows) > MAX_WINDOWS:
        return "windows", f"{len(report.windows)} windows, at most {MAX_WINDOWS}"
    return None


def sound(order: WorkOrder, meta: UpdateMeta, report: WorkReport) -> bool:
    """Whether a report passes `check_report`; the figures of any other mean nothing."""
    try:
        check_report(meta.silo, order, meta, report)
    except ProtocolError:
        return False
    return True


def check_facts(silo: str, facts: SiloFacts) -> None:
    """Check what a silo says of itself when it joins.

    Raises:
        ProtocolError: names the silo and the first check that fails.
    """
    if facts.examples < 1:
        raise ProtocolError(silo, "examples", f"{facts.examples} training samples")
    if facts.memory_samples is not None and facts.memory_samples < 1:
        raise ProtocolError(silo, "memory", f"room for {facts.memory_samples} samples")
    if facts.declared_speed is not None:
        check_speed(silo, facts.declared_speed)


def check_speed(silo: str, speed: float) -> None:
    """Check that a speed [samples/s] is one that a machine can have."""
    if not 0 < speed <= MAX_SPEED:
        raise ProtocolError(silo, "speed", f"{speed:g} samples/s lies outside (0, {MAX_SPEED:g}]")


def check_evaluation(silo: str, evaluation: Evaluation) -> None:
    """Check the sums of an evaluation: finite, of a believable number of samples.

    What a task scores need not be a share: a log-likelihood has no range. Who wants to lie says that all is right, so a
    limit of 1 a sample would keep nobody from it.
    """
    fine = math.isfinite(evaluation.loss) and -inf < evaluation.correct <= MAX_SCORE * evaluation.samples
    if not (fine and 0 <= evaluation.samples <= MAX_TEST_SAMPLES):
        raise ProtocolError(silo, "evaluation", f"{evaluation}")


def usable(silo: str, evaluation: Evaluation | None) -> Evaluation | None:
    """An evaluation that passes `check_evaluation`; any other counts as none."""
    try:
        if evaluation is not None:
            check_evaluation(silo, evaluation)
    except ProtocolError:
        return None
    return evaluation
