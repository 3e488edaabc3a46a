"""Checks of a strategy with differential privacy against its other sections."""

from __future__ import annotations

from fedsync.config.cipher import sealed_metrics
from fedsync.config.sections.privacy import PrivacyConfig
from fedsync.config.sections.strategy_sections import StrategySections
from fedsync.config.tasks.sampled_tasks import StatisticsSection
from fedsync.config.tasks.task_kinds import CsvConfig, SurveyConfig


def check_private(config: StrategySections) -> None:
    """Raise ValueError if a section of a private run needs what privacy withholds; the message has the remedy."""
    privacy = config.privacy
    if privacy is None:
        return
    for problem, found in {**_training(config, privacy), **_figures(config, privacy)}.items():
        if found:
            raise ValueError(f"privacy.kind {privacy.kind!r}: {problem}")


def _training(config: StrategySections, privacy: PrivacyConfig) -> dict[str, bool]:
    """Problems of what is trained, each with whether the run has it."""
    task, local, aims = config.task, config.local, privacy.target_epsilon is not None
    standardise = task.standardise if isinstance(task, CsvConfig) else None
    return {
        "target_epsilon is that of a whole run, whose length is open; write stop.rounds": (
            aims and config.stop.rounds is None
        ),
        f"target_epsilon goes by equal numbers of steps, and barrier.kind {config.barrier.innermost.kind!r} varies "
        "them; write noise_multiplier": (aims and config.barrier.innermost.sets_steps),
        f"task.standardise {standardise!r} scales a row by other rows, which no noise hides; give mean and deviation "
        "of each column, as in standardise: {age: [54, 9]}, from what is generally known": isinstance(standardise, str),
        "task.statistics tells what columns hold; leave it out": (
            isinstance(task, SurveyConfig) or (isinstance(task, CsvConfig) and task.statistics is not None)
        ),
        f"task.kind {task.kind!r} sends sums over rows and no gradients; choose another task": (
            isinstance(task, StatisticsSection)
        ),
        "task.kind 'linear' has terms of the whole model in its loss, which belong to no row; choose csv with model: "
        "logistic": task.kind == "linear",
        "evaluation.cross_site trains models without noise; leave it out": config.evaluation.cross_site is not None,
        f"local.processes {local.processes}; leave it out": local.processes > 1,
        f"local.workers {local.workers}; leave it out": local.workers > 0,
        "local.compile hides the gradients of single rows; leave it out": local.compile,
        "local.precision 'fp16' scales gradients by their size; write bf16 or fp32": local.precision == "fp16",
    }


def _figures(config: StrategySections, privacy: PrivacyConfig) -> dict[str, bool]:
    """Problems of figures that a rule needs, each with whether the run has it."""
    stop, best = config.stop, config.evaluation.best
    silent = privacy.score_noise is None or config.task.scores != "share"
    metrics = {best.metric, *([] if stop.target is None else [stop.target.metric])}
    patience = getattr(stop.patience, "metric", "accuracy")
    return {
        "cipher.metrics 'sealed' adds up exact figures, which are withheld; write metrics: plain": (
            sealed_metrics(config.cipher) is not None
        ),
        f"barrier.kind {config.barrier.innermost.kind!r} as configured goes by training losses, which are withheld; "
        "where it has an interval write interval: {kind: fixed}": config.barrier.innermost.needs_losses,
        "stop.relative_change goes by training losses, which are withheld; leave it out": (
            stop.relative_change is not None
        ),
        "stop goes by scores, which are withheld; write privacy.score_noise, for a task whose score is a share": (
            silent and stop.by_score
        ),
        "metrics other than accuracy are withheld; go by accuracy": bool({*metrics, patience} - {"accuracy"}),
    }
