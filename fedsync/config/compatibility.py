"""Checks that the sections of a strategy fit together, where each section alone is valid."""

from __future__ import annotations

from typing import TypeVar

from fedsync.common.errors import ConfigError
from fedsync.config.cipher import MaskedConfig, PlainConfig, least_silos, sealed_metrics, sealing
from fedsync.config.private_runs import check_private
from fedsync.config.sections.evaluation import needs_single_silos
from fedsync.config.sections.strategy_sections import StrategySections
from fedsync.config.tasks.sampled_tasks import StatisticsSection
from fedsync.config.tasks.task_kinds import CsvConfig, SurveyConfig

AnyStrategy = TypeVar("AnyStrategy", bound=StrategySections)


def check_together(config: StrategySections) -> None:
    """Check that the sections of a strategy do not contradict each other.

    Raises:
        ValueError: sections contradict each other; one line for each contradiction, with its remedy.
    """
    found = []
    for check in (
        _fits_together,
        _trains_in_processes,
        _normalises,
        _discounts,
        _compares,
        _begins_with_versions,
        _statistics_add_up,
        _survives,
        _travels_in_the_clear,
        _can_be_added,
        _steps,
        _controls,
        _rounds,
        _lists_once,
        _masks_come_off,
        _opens_versions,
        _goes_without_single_figures,
        check_private,
    ):
        try:
            check(config)
        except ValueError as error:
            found.append(str(error))
    if found:
        raise ValueError("\n".join(found))


def too_few(config: StrategySections, silos: int, file: str) -> tuple[str, str, str] | None:
    """Key, problem and remedy if ``file`` lists fewer silos than the strategy needs; None if there are enough."""
    cipher = config.cipher
    sealed = sealing(cipher)
    named = {"min_silos": config.min_silos or 0}
    named |= {f"barrier.{key}": number for key, number in config.barrier.named_silos.items()}
    if sealed is not None:
        inner = "cipher.inner" if isinstance(cipher, MaskedConfig) else "cipher"
        named[f"{inner}.members"] = sealed.members or 1
        if isinstance(cipher, MaskedConfig) and silos < least_silos(cipher):
            problem = f"needs {least_silos(cipher)} silos as configured, and {file} has {silos}"
            return "cipher.kind", problem, "Add silos, or choose cipher.kind: bfv"
        if sealed.colluding > 1 and silos <= 2 * sealed.colluding:
            problem = f"{sealed.colluding} of {silos} silos in {file} would be no minority"
            return f"{inner}.colluding", problem, f"Write at most {max((silos - 1) // 2, 1)}, or add silos"
    if config.aggregation.least_updates > silos:
        problem = f"needs {config.aggregation.least_updates} updates as configured, and {file} has {silos} silos"
        return "aggregation", problem, "Lower malicious and keep, choose median, or add silos"
    for key, number in named.items():
        if number > silos:
            return key, f"{number}, and {file} has {silos} silos", f"Write at most {silos}, or add silos"
    return None


def simulated(config: AnyStrategy) -> AnyStrategy:
    """Return the strategy if Flower's simulation engine can run it.

    Raises:
        ConfigError: the barrier queues orders at silos, which the simulation engine cannot do.
    """
    if queues(config):
        raise ConfigError(
            "barrier",
            "it queues orders at silos, and Flower's simulation engine hands each silo one message at a time",
            "Add --runtime local or --runtime virtual, or write the barrier inside overlap by itself",
        )
    return config


def adds_regions(config: StrategySections) -> bool:
    """Whether relays may add up updates before a commit.

    The weight of each update must be known before the sum. A commit must take all pending updates, as a sum cannot be
    split.
    """
    weighed = config.aggregation.is_shipped() and config.aggregation.weigher(config.solver).weighting is not None
    return weighed and config.barrier.innermost.most_updates is None


def queues(config: StrategySections) -> bool:
    """Whether a silo may receive an order while another order is in progress."""
    return config.barrier.queues


def _fits_together(config: StrategySections) -> None:
    balancer, barrier = config.balancer, config.barrier.innermost
    balancer.check(config.local.batch_size)
    if balancer.scales_steps and barrier.sets_steps:
        raise ValueError(f"balancer.scale 'steps' has no effect: barrier.kind {barrier.kind} sets the steps")
    if balancer.needs_lockstep and not barrier.lockstep:
        raise ValueError(
            f"balancer.kind {balancer.kind} compares the times of rounds, and barrier.kind {barrier.kind} has no "
            "rounds in which all silos do the same steps; write balancer: {kind: equalise}, or barrier: {kind: bsp}"
        )


def _trains_in_processes(config: StrategySections) -> None:
    if config.local.processes > 1 and config.task.own_loop:
        raise ValueError(
            f"local.processes {config.local.processes}: task.kind {config.task.kind} has a training loop of its own, "
            "which runs in one process; leave it out"
        )


def _normalises(config: StrategySections) -> None:
    swings = config.local.learning_rate * config.local.proximal >= 1 or config.solver.pull > 1
    if config.aggregation.normalises and swings:
        raise ValueError(
            f"local.proximal {config.local.proximal:g} times local.learning_rate {config.local.learning_rate:g} is not "
            "below 1: silos would swing around the model they start from"
        )


def _discounts(config: StrategySections) -> None:
    if config.barrier.innermost.needs_discount and not config.aggregation.discounts:
        raise ValueError(
            "barrier.late 'stale' wants stale updates discounted, which aggregation does not do; "
            "give aggregation a staleness: {kind: polynomial}, or write late: next"
        )


def _compares(config: StrategySections) -> None:
    combiner, most = config.aggregation.combiner(), config.barrier.innermost.most_updates
    if combiner is not None and most is not None and most < combiner.least:
        raise ValueError(
            f"aggregation.kind {config.aggregation.kind!r} compares {combiner.least} updates or more, and barrier.kind "
            f"{config.barrier.innermost.kind!r} as configured commits {most} at a time; choose a barrier that commits "
            "many: bsp, a-bsp, fsp or elastic"
        )


def _lists_once(config: StrategySections) -> None:
    kinds = [each.kind for each in config.extensions or ()]
    if twice := next((kind for kind in kinds if kinds.count(kind) > 1), None):
        raise ValueError(f"extensions has {twice!r} twice; list each kind once")


def _begins_with_versions(config: StrategySections) -> None:
    if config.barrier.carries and config.aggregation.weigher(config.solver).toward:
        raise ValueError(
            f"aggregation.kind {config.aggregation.kind!r} goes towards a version and what was trained from it, and "
            "barrier.carry has training begin further on; write carry: 0"
        )


def _statistics_add_up(config: StrategySections) -> None:
    if isinstance(config.task, StatisticsSection):
        config.task.check(config.local)
        if config.server_optimizer is not None:
            raise ValueError(
                f"server_optimizer.kind {config.server_optimizer.kind!r} does not fit task.kind {config.task.kind}: "
                "its model is a mean of statistics; leave server_optimizer out"
            )
        if config.aggregation.combiner() is not None:
            raise ValueError(
                f"aggregation.kind {config.aggregation.kind!r} does not fit task.kind {config.task.kind}: its model "
                "is a mean of statistics; choose fedavg"
            )


def _survives(config: StrategySections) -> None:
    task = config.task
    if isinstance(task, CsvConfig) and task.time is not None and config.privacy is not None:
        raise ValueError(f"privacy.kind {config.privacy.kind!r}: a Cox loss compares rows, so no row has a gradient")
    if not isinstance(task, SurveyConfig) or task.survival is None:
        return
    sealed = sealing(config.cipher)
    problems = {
        f"takes {task.survival.rounds} rounds; write stop: {{rounds: {task.survival.rounds}}}": (
            config.stop.rounds != task.survival.rounds
        ),
        "adds up sums; write aggregation: {kind: fedavg, weight: silo}, without server_optimizer": (
            config.aggregation.kind != "fedavg"
            or getattr(config.aggregation, "weight", "") != "silo"
            or config.server_optimizer is not None
        ),
        "needs all silos in each round; write barrier: {kind: bsp, complete: true}": (
            config.barrier.kind != "bsp" or not getattr(config.barrier, "complete", False)
        ),
        "needs sealed sums of 16 bits, of two silos or more; leave bits and only out, and write members: 2": (
            sealed is not None and (sealed.bits != 16 or bool(sealed.only) or sealed.members == 1)
        ),
        "has no metrics; write evaluation: {metrics: []}": config.evaluation.metrics != [],
    }
    for problem, found in problems.items():
        if found:
            raise ValueError(f"task.survival {problem}")


def _travels_in_the_clear(config: StrategySections) -> None:
    if not isinstance(config.cipher, PlainConfig) and config.wire.set:
        place = "cipher.inner.bits" if isinstance(config.cipher, MaskedConfig) else "cipher.bits"
        raise ValueError(
            f"wire is for runs in the clear, and cipher.kind {config.cipher.kind!r} has bits of its own; leave wire "
            f"out, and write {place}: 8, 12 or 16"
        )


def _can_be_added(config: StrategySections) -> None:
    if not isinstance(config.cipher, PlainConfig) and config.aggregation.weigher(config.solver).weighting is None:
        remedy = "write staleness: {kind: constant}" if config.aggregation.additive else "choose fedbuff"
        if config.aggregation.combiner() is not None:
            remedy = "choose fedavg or fednova, or write cipher: {kind: plain}"
        raise ValueError(
            f"aggregation.kind {config.aggregation.kind!r} as configured needs a server that sees the updates, and "
            f"cipher.kind {config.cipher.kind!r} hides them; {remedy}"
        )
    if not isinstance(config.cipher, PlainConfig) and not config.aggregation.is_shipped():
        raise ValueError(
            f"aggregation.kind {config.aggregation.kind!r} is your own, and with cipher.kind {config.cipher.kind!r} "
            "silos, which do not have it, weigh updates themselves; choose one that is part of FedSync"
        )


def _steps(config: StrategySections) -> None:
    optimizer = config.server_optimizer
    if optimizer is not None and config.aggregation.weigher(config.solver).toward:
        raise ValueError(
            f"server_optimizer.kind {optimizer.kind!r} steps along updates, and aggregation.kind "
            f"{config.aggregation.kind!r} moves towards whole models; choose fedbuff, or leave server_optimizer out"
        )
    if optimizer is None or isinstance(config.cipher, PlainConfig):
        return
    if not optimizer.is_shipped():
        raise ValueError(
            f"server_optimizer.kind {optimizer.kind!r} is your own, and with cipher.kind {config.cipher.kind!r} silos, "
            "which do not have it, make the steps; choose one that is part of FedSync"
        )
    if config.barrier.innermost.rolls_back:
        raise ValueError(
            f"barrier.kind {config.barrier.innermost.kind!r} as configured goes back to earlier models, and with "
            f"cipher.kind {config.cipher.kind!r} silos do not know what server_optimizer remembered there; write "
            "interval: {kind: fixed}, or leave server_optimizer out"
        )


def _controls(config: StrategySections) -> None:
    """Check that the run's control variate stays the mean of the silos' variates; see `control_variates` in core."""
    optimizer, local, barrier, balancer = config.server_optimizer, config.local, config.barrier, config.balancer
    if optimizer is None or not optimizer.controls:
        return
    weighting = config.aggregation.weigher(config.solver).weighting
    aggregation = f"aggregation.kind {config.aggregation.kind!r} as configured"
    given = {"kind": local.optimizer} if isinstance(local.optimizer, str) else local.optimizer
    plain_sgd = given["kind"] == "sgd" and local.sgd_momentum == 0 and not given.get("maximize", False)
    problems = {
        f"task.kind {config.task.kind} has a loop of its own; leave server_optimizer out": config.task.own_loop,
        f"local.optimizer {given['kind']!r} as configured does not go along gradients; write optimizer: sgd, without "
        "momentum": not plain_sgd,
        "local.schedule changes the learning rate within an order; leave it out": local.schedule is not None,
        "local.proximal holds silos back, as control variates do; write proximal: 0": local.proximal > 0,
        f"balancer.kind {balancer.kind!r} as configured gives silos different learning rates; write scale: batch": (
            balancer.scales_rates
        ),
        f"{aggregation} does not say how many local steps a commit is worth; write aggregation: {{kind: fednova}}, "
        "which with equal steps is FedAvg": weighting is None or not weighting.normalised,
        f"{aggregation} weighs a silo otherwise in each commit; write weight: examples, or silo": (
            weighting is not None and weighting.by == "samples"
        ),
        f"barrier.kind {barrier.kind!r} as configured commits updates that began with different versions; choose bsp, "
        "a-bsp, fsp or elastic, or write late: drop": barrier.mixes_rounds or barrier.queues,
        f"barrier.kind {barrier.innermost.kind!r} as configured goes back to earlier models, and silos' variates do "
        "not; write interval: {kind: fixed}": barrier.innermost.rolls_back,
        "wire has less than 32 bits; leave it out": config.wire.set,
        "is your own, which silos do not have; choose scaffold": not optimizer.is_shipped(),
    }
    for problem, found in problems.items():
        if found:
            raise ValueError(f"server_optimizer.kind {optimizer.kind!r} corrects the steps of silos, and {problem}")


def _rounds(config: StrategySections) -> None:
    """Check that no section relies on a constant learning rate if ``on_round`` changes the rate."""
    if config.on_round is None or not config.on_round.changes_rate:
        return
    problems = {
        "server_optimizer.kind 'scaffold' works out gradients by one learning rate; leave server_optimizer out": (
            config.controlled
        ),
        f"aggregation.kind {config.aggregation.kind!r} counts on local.proximal times a rate that stays; write "
        "proximal: 0": config.aggregation.normalises and config.local.proximal > 0,
        f"task.kind {config.task.kind} has none that could change; leave on_round out": (
            isinstance(config.task, StatisticsSection)
        ),
    }
    for problem, found in problems.items():
        if found:
            raise ValueError(f"on_round changes the learning rate, and {problem}")


def _masks_come_off(config: StrategySections) -> None:
    if not isinstance(config.cipher, MaskedConfig):
        return
    if config.barrier.queues:
        raise ValueError(
            f"cipher.kind 'masked' opens sums of updates that began with the newest version, and barrier.kind "
            f"{config.barrier.kind!r} has them one version old; take it away, or write cipher.kind: bfv"
        )
    if config.barrier.mixes_rounds:
        raise ValueError(
            "cipher.kind 'masked' opens sums of one round only, and barrier as configured may commit an update "
            "alone or with later ones: choose bsp, a-bsp or elastic, or write late: drop"
        )
    if config.barrier.draws:
        raise ValueError(
            "cipher.kind 'masked' opens sums in which nearly all silos are, and barrier has a part of them in each "
            "round; leave the fraction out, or write cipher.kind: bfv"
        )
    if config.balancer.scales_rates:
        raise ValueError(
            "balancer.scale 'learning_rate' gives silos different learning rates, and masks (cipher.kind 'masked') "
            "come off only where all train at one; write balancer.scale: batch, or cipher.kind: bfv"
        )


def _opens_versions(config: StrategySections) -> None:
    sealed = sealing(config.cipher)
    most, members = config.barrier.innermost.most_updates, 1 if sealed is None else sealed.members or 1
    if most is not None and members > most:
        raise ValueError(
            f"cipher.members {members}: barrier.kind {config.barrier.innermost.kind!r} as configured commits {most} "
            f"at a time, so silos would open no version; write members: {most}, or choose a barrier that commits "
            "many: bsp, a-bsp, fsp or elastic"
        )
    silos = len(config.silos or ()) or config.min_silos
    if silos is not None and members > (part := config.barrier.sampled(silos)) and config.barrier.draws:
        raise ValueError(
            f"cipher.members {members}: barrier has {part} of {silos} silos in each round, so silos would open no "
            f"version; raise share, or write barrier.least: {members}"
        )


def _goes_without_single_figures(config: StrategySections) -> None:
    cipher, barrier = sealed_metrics(config.cipher), config.barrier.innermost
    if cipher is None:
        return
    plain = "or write cipher.metrics: plain, if the silos' owners allow it"
    if barrier.needs_losses:
        raise ValueError(
            f"barrier.kind {barrier.kind!r} as configured goes by the loss of each round, and with sealed metrics "
            f"the server learns it too late; where it has an interval write interval: {{kind: fixed}}, {plain}"
        )
    passes = f"barrier.kind {barrier.kind!r}" if barrier.needs_examples else "stop.relative_change"
    if cipher.examples is None and (barrier.needs_examples or config.stop.relative_change is not None):
        raise ValueError(
            f"{passes} goes by passes of silos over their data, and with sealed metrics the server does not learn "
            f"how much that is; write cipher.examples: how many samples count as a pass for all silos, {plain}"
        )
    if problem := needs_single_silos(config.evaluation.best):
        raise ValueError(f"{problem}, {plain}")
    weighting = config.aggregation.weigher(config.solver).weighting
    if cipher.only and weighting is not None and weighting.by in ("examples", "precision"):
        raise ValueError(
            "aggregation.weight 'examples' needs the number of each silo's samples for what cipher.only leaves in "
            f"the clear, and with sealed metrics the server does not learn it; write weight: silo, {plain}"
        )
