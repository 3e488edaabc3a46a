"""Checks that a strategy's differential privacy is compatible with its other sections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedsync.common.errors import ConfigError
from fedsync.config.cipher import sealed_metrics, sealing
from fedsync.config.sections.privacy import PrivacyConfig
from fedsync.config.sections.strategy_sections import StrategySections
from fedsync.config.tasks.survival_task import SurveyConfig
from fedsync.config.tasks.task_kinds import CsvConfig
from fedsync.privacy.accounting import noise_for
from fedsync.privacy.release import Release

if TYPE_CHECKING:
    from fedsync.cipher.encoding.silo_noise import SiloNoise


def private(config: StrategySections) -> dict[str, bool]:
    """Problems of sections of a private run that need what privacy withholds."""
    privacy = config.privacy
    if privacy is None:
        return {}
    training = _training if privacy.kind == "dp-sgd" else _updates
    problems = {
        "target_epsilon is that of a whole run, whose length is open; write stop.rounds": (
            privacy.target_epsilon is not None and config.stop.rounds is None
        ),
        **training(config, privacy),
        **_figures(config, privacy),
    }
    return {f"privacy.kind {privacy.kind!r}: {problem}": found for problem, found in problems.items()}


def _training(config: StrategySections, privacy: PrivacyConfig) -> dict[str, bool]:
    task, local, aims = config.task, config.local, privacy.target_epsilon is not None
    standardise = task.standardise if isinstance(task, CsvConfig) else None
    return {
        f"target_epsilon needs equal numbers of steps, and barrier.kind {config.barrier.innermost.kind!r} varies "
        "them; write noise_multiplier": (aims and config.barrier.innermost.sets_steps),
        f"balancer.kind {config.balancer.kind!r} changes nothing with target_epsilon, for which each silo fits its "
        "noise to its batches and its budget; write noise_multiplier": (aims and config.balancer.spends),
        f"task.standardise {standardise!r} scales a row by other rows, which no noise hides; give mean and deviation "
        "of each column, as in standardise: {age: [54, 9]}, from what is generally known": isinstance(standardise, str),
        "task.statistics sends statistics of columns, which no noise hides; leave it out": (
            isinstance(task, SurveyConfig) or (isinstance(task, CsvConfig) and task.statistics is not None)
        ),
        f"task.kind {task.kind!r} sends sums over rows and no gradients; choose another task": (task.additive),
        f"score_noise has no effect: scores of task.kind {task.kind!r} may be no shares of samples, and are withheld; "
        "leave it out": privacy.score_noise is not None and task.scores != "share",
        "evaluation.cross_site trains models without noise; leave it out": config.evaluation.cross_site is not None,
        f"local.workers {local.workers} is not supported; leave it out": local.workers > 0,
        "local.precision 'fp16' scales gradients by their size; write bf16 or fp32": local.precision == "fp16",
    }


def _updates(config: StrategySections, privacy: PrivacyConfig) -> dict[str, bool]:
    sealed, optimizer, task = sealing(config.cipher), config.server_optimizer, config.task
    barrier = config.barrier
    return {
        f"target_epsilon counts one update of a silo in a round, and with barrier.kind {barrier.kind!r} fast silos "
        "send more; write noise_multiplier": privacy.target_epsilon is not None
        and (barrier.innermost.most_updates or 1) > 1,
        "the server would see each update with only its own share of the noise; write cipher: {kind: bfv, metrics: "
        "plain}": sealed is None,
        "cipher.only leaves tensors without noise; leave it out": sealed is not None and bool(sealed.only),
        "cipher.kept_versions keeps single updates, each with only its share of the noise; write kept_versions: 0": (
            sealed is not None and sealed.kept_versions > 0
        ),
        "aggregation weighs silos by their numbers of examples, which no noise hides; write weight: silo": (
            (weighting := config.aggregation.weigher(config.solver).weighting) is None or weighting.by != "silo"
        ),
        "server_optimizer corrects steps by each silo's exact updates; choose another": (
            optimizer is not None and optimizer.controls
        ),
        "score_noise protects rows, not whole silos; leave it out, then scores are not sent": (
            privacy.score_noise is not None
        ),
        "task sends statistics of columns, which no noise hides; give mean and deviation of each column, or write "
        "standardise: own": isinstance(task, CsvConfig)
        and (task.standardise == "federated" or task.statistics is not None),
        f"task.kind {task.kind!r} sends sums over rows; choose another task": task.additive
        or isinstance(task, SurveyConfig),
        "evaluation.cross_site sends models without noise; leave it out": config.evaluation.cross_site is not None,
    }


def silo_noise(privacy: PrivacyConfig | None, rounds: int | None, members: int, colluding: int) -> SiloNoise | None:
    """Return the noise on whole updates, or None. A sum has ``members`` or more silos; shares of ``colluding`` do not
    count. Raises `ConfigError` if no share is left, or no noise reaches the target.
    """
    if privacy is None or privacy.kind != "silo-noise":
        return None
    from fedsync.cipher.encoding.silo_noise import SiloNoise

    if members <= colluding:
        problem = f"a sum of {members} silos, of which {colluding} may collude, has no noise of an honest silo"
        raise ConfigError(
            "cipher.members", problem, f"Write at least {colluding + 1}, and choose a barrier with as many"
        )
    noise = privacy.noise_multiplier
    if noise is None:
        assert privacy.target_epsilon is not None
        aim = privacy.target_epsilon, privacy.delta
        try:
            noise = noise_for(*aim, lambda each: {Release(1.0, each): rounds or 1}, kind="rdp")
        except ValueError as error:
            raise ConfigError("privacy.target_epsilon", str(error), "Raise it, or write fewer stop.rounds") from error
    return SiloNoise(privacy.clip, noise, members - colluding)


def _figures(config: StrategySections, privacy: PrivacyConfig) -> dict[str, bool]:
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
        "stop goes by scores, which are withheld; write privacy.score_noise, for a task whose score is a share": (
            silent and stop.by_score
        ),
        "metrics other than accuracy are withheld; go by accuracy": bool({*metrics, patience} - {"accuracy"}),
    }
