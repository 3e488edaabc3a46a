"""Checks of silo reports. A report is untrusted until it passes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import inf

import numpy as np

from fedsync.common.errors import ProtocolError
from fedsync.core.orders import (
    Evaluation,
    PooledFigures,
    Presence,
    Score,
    SiloFacts,
    Subject,
    UpdateMeta,
    WorkOrder,
    WorkReport,
)
from fedsync.evaluation.metrics.metric_types import Statistic

MAX_SPEED = 1e9
"""Speed [samples/s] that no machine reaches; a faster report is a lie or a broken clock."""

MIN_SPEED = 1e-9
"""Speed [samples/s] of 30 years a sample; slower machines count as standing still."""

MAX_EXAMPLES = 10**9

MAX_COUNT = 10**15
"""Largest integer, of samples or bytes, in a value that limits only the reporting silo."""

MAX_WINDOWS = 64

MAX_OVERHEADS = 64

MAX_NAME = 128
"""Characters of a name from a silo: its own, its device's, a kind of overhead."""

MAX_SECONDS = 1e9
"""Seconds of overhead that no order takes: 30 years."""

MAX_METRICS = 32

METRIC_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
"""Name of a metric; it becomes a column, a tag and a label in other programs."""

MAX_METRIC = 1e30
"""Bound of a metric, so that sums stay finite."""

MAX_TEST_SAMPLES = 10**9
"""Larger than any test split. A silo that claims more would dominate a pooled score."""

MAX_SCORE = 1e6
"""Score of one sample that no task exceeds."""

MAX_LOSS = 1e30
"""Bound of one sample's loss and of a negative score: squared errors are unbounded, but their sums must stay finite."""

MAX_STATISTICS = 16

MAX_SUMS = 16_384
"""Entries of all statistics of an evaluation together."""

MAX_ENTRY = 1e45
"""Bound of a sum over samples, so that sums over silos stay finite."""

_SUBJECTS = frozenset(Subject)


def check_report(silo: str, order: WorkOrder, meta: UpdateMeta, report: WorkReport) -> None:
    """Check a report against its order; raise `ProtocolError` for the first failed check. `usable` checks the
    evaluation separately: an update may be good although its evaluation is not.
    """
    # Runs for every update: messages are formatted only for a failed check.
    problem = _problem(order, meta, report)
    if problem is not None:
        raise ProtocolError(silo, *problem)
    check_speed(silo, report.samples / report.compute_s)
    for window in report.windows:
        check_speed(silo, window.speed)
        # A mean of shares may exceed 1 by rounding.
        if not all(share is None or 0 <= share <= 1.001 for share in (window.cpu, window.memory)):
            raise ProtocolError(silo, "resources", f"{window}")
    if report.batch_cap is not None and not 1 <= report.batch_cap <= MAX_COUNT:
        raise ProtocolError(silo, "batch cap", f"{report.batch_cap}")
    _check_presence(silo, report.presence)


def _problem(order: WorkOrder, meta: UpdateMeta, report: WorkReport) -> tuple[str, str] | None:
    if report.base_version != order.base_version:
        return "version", f"started from version {report.base_version}"
    if not 1 <= report.steps <= order.max_steps:
        return "steps", f"{report.steps} of {order.max_steps} steps"
    most = report.steps * order.batch_size
    if not 1 <= report.samples <= most:
        return "samples", f"{report.samples} samples in steps that hold {most}"
    if meta.steps != report.steps or meta.samples != report.samples:
        return "meta", "report and update disagree"
    if not (report.precision is None or 1 <= report.precision <= MAX_COUNT) or meta.precision != report.precision:
        return "precision", f"{report.precision}"
    if not (1 <= meta.examples <= MAX_EXAMPLES and meta.nbytes >= 0):
        return "meta", f"{meta.examples} examples, {meta.nbytes} bytes"
    # A comparison with NaN is false; `math.isfinite` costs twice as much.
    if report.loss is not None and not -MAX_LOSS <= report.loss <= MAX_LOSS:
        return "loss", f"training loss {report.loss}"
    if not 0 < report.compute_s < inf:
        return "compute time", f"{report.compute_s} s of training"
    if len(report.overhead_s) > MAX_OVERHEADS:
        return "overhead", f"{len(report.overhead_s)} kinds, at most {MAX_OVERHEADS}"
    for kind, seconds in report.overhead_s.items():
        if not (0 <= seconds <= MAX_SECONDS and len(kind) <= MAX_NAME):
            return "overhead", f"{seconds} s of {kind[:MAX_NAME]!r}"
    if len(report.windows) > MAX_WINDOWS:
        return "windows", f"{len(report.windows)} windows, at most {MAX_WINDOWS}"
    if len(report.metrics) > MAX_METRICS:
        return "metrics", f"{len(report.metrics)} metrics, at most {MAX_METRICS}"
    for name, value in report.metrics.items():
        if not (METRIC_NAME.fullmatch(name) and -MAX_METRIC <= value <= MAX_METRIC):
            return "metrics", f"{name[:MAX_NAME]!r} = {value}"
    return None


def sound(order: WorkOrder, meta: UpdateMeta, report: WorkReport) -> bool:
    try:
        check_report(meta.silo, order, meta, report)
    except ProtocolError:
        return False
    return True


def check_sealed(silo: str, report: WorkReport) -> None:
    """Raise ProtocolError for plain figures in a sealed run; the message omits them, because errors are logged."""
    if report.loss is not None or report.evaluation is not None or report.metrics:
        raise ProtocolError(silo, "metrics", "it sends unencrypted metrics, which this run encrypts")


def usable_figures(figures: PooledFigures, version: int) -> bool:
    scores = [score for score in (figures.score, figures.best) if score is not None]
    return (
        1 <= figures.version <= version
        and (figures.loss is None or -MAX_LOSS <= figures.loss <= MAX_LOSS)
        and all(score.version < figures.version and _usable_score(score) for score in scores)
        and all(len(silo) <= MAX_NAME for silo in figures.spoiled)
    )


def _usable_score(score: Score) -> bool:
    return (
        score.version >= 0
        and (score.accuracy is None or -MAX_LOSS <= score.accuracy <= MAX_SCORE)
        and (score.loss is None or -MAX_LOSS <= score.loss <= MAX_LOSS)
        and len(score.metrics) <= MAX_METRICS
        and all(METRIC_NAME.fullmatch(name) for name in score.metrics)
        and all(-MAX_ENTRY <= value <= MAX_ENTRY for value in score.metrics.values())
    )


def check_facts(silo: str, facts: SiloFacts) -> None:
    if not 1 <= facts.examples <= MAX_EXAMPLES:
        raise ProtocolError(silo, "examples", f"{facts.examples} training samples, at most {MAX_EXAMPLES}")
    if facts.memory_samples is not None and not 1 <= facts.memory_samples <= MAX_COUNT:
        raise ProtocolError(silo, "memory", f"memory for {facts.memory_samples} samples")
    if facts.declared_speed is not None:
        check_speed(silo, facts.declared_speed)
    if len(facts.device) > MAX_NAME:
        raise ProtocolError(silo, "device", f"a name of {len(facts.device)} characters, at most {MAX_NAME}")
    for limit in (facts.least_batch, facts.least_samples):
        if not 1 <= limit <= MAX_COUNT:
            raise ProtocolError(silo, "limits", f"orders of {limit} samples at least")
    _check_presence(silo, facts.presence)


def _check_presence(silo: str, said: Presence | None) -> None:
    if said is not None and not said.sound:
        raise ProtocolError(silo, "presence", f"available for {said.left_s} s, and again in {said.back_s} s")


def check_speed(silo: str, speed: float) -> None:
    if not MIN_SPEED <= speed <= MAX_SPEED:
        raise ProtocolError(silo, "speed", f"{speed:g} samples/s lies outside [{MIN_SPEED:g}, {MAX_SPEED:g}]")


def check_evaluation(silo: str, evaluation: Evaluation, known: Mapping[str, Statistic] | None = None) -> None:
    """Check the sample counts and sums of an evaluation; raise ProtocolError for the first failed check.

    With ``known`` (the run's statistics by key), other statistics are refused, and `Statistic.problem` checks each.
    Scores are bounded loosely: a log-likelihood may be very low for an untrained model, and a lying silo can claim full
    accuracy anyway.
    """
    samples = evaluation.samples
    if not (
        0 <= samples <= MAX_TEST_SAMPLES
        and (evaluation.loss is None or -MAX_LOSS * samples <= evaluation.loss <= MAX_LOSS * samples)
        and (evaluation.correct is None or -MAX_LOSS * samples <= evaluation.correct <= MAX_SCORE * samples)
    ):
        sums = f"loss {evaluation.loss} and score {evaluation.correct} in sum"
        raise ProtocolError(silo, "evaluation", f"{sums} of {samples} samples")
    if len(evaluation.metrics) > MAX_METRICS:
        raise ProtocolError(silo, "evaluation", f"{len(evaluation.metrics)} metrics, at most {MAX_METRICS}")
    for name, (mean, count) in evaluation.metrics.items():
        if not (METRIC_NAME.fullmatch(name) and abs(mean) <= MAX_METRIC and 1 <= count <= MAX_TEST_SAMPLES):
            raise ProtocolError(silo, "evaluation", f"{name[:MAX_NAME]!r} = {mean} of {count} samples")
    _check_sums(silo, evaluation.sums, known)
    if not evaluation.gains.keys() <= _SUBJECTS:
        raise ProtocolError(silo, "evaluation", f"gains of {len(evaluation.gains)} models that do not exist")
    for found in evaluation.gains.values():
        if len(found) > MAX_METRICS or not all(
            METRIC_NAME.fullmatch(name) and -MAX_ENTRY <= low <= high <= MAX_ENTRY
            for name, (low, high) in found.items()
        ):
            raise ProtocolError(silo, "evaluation", "gains with invalid intervals")


def _check_sums(silo: str, sums: Mapping[str, tuple[float, ...]], known: Mapping[str, Statistic] | None) -> None:
    entries = sum(map(len, sums.values()))
    if len(sums) > MAX_STATISTICS or entries > MAX_SUMS:
        problem = f"{len(sums)} statistics of {entries} entries, at most {MAX_STATISTICS} of {MAX_SUMS}"
        raise ProtocolError(silo, "statistics", problem)
    for key, values in sums.items():
        array = np.array(values, np.float64)
        problem = "" if (np.abs(array) <= MAX_ENTRY).all() else "values of this metric are not finite, or too large"
        if known is not None and not problem:
            statistic = known.get(key)
            if statistic is None or len(values) != statistic.size:
                problem = f"{len(values)} entries that were not requested"
            elif statistic.whole and not ((array >= 0) & (array <= MAX_COUNT) & (array == np.floor(array))).all():
                problem = "invalid counts"
            else:
                problem = statistic.problem(array)
        if problem:
            raise ProtocolError(silo, "statistics", f"{key[:MAX_NAME]!r}: {problem}")


def usable(silo: str, evaluation: Evaluation | None, known: Mapping[str, Statistic] | None = None) -> Evaluation | None:
    try:
        if evaluation is not None:
            check_evaluation(silo, evaluation, known)
    except ProtocolError:
        return None
    return evaluation
