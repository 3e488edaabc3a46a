"""Checks that a strategy file's sections, each valid alone, are compatible with one another."""

from __future__ import annotations

from fedsync.config.cipher import MaskedConfig, PlainConfig, least_silos, sealed_metrics, sealing
from fedsync.config.private_runs import private
from fedsync.config.sections.strategy_sections import StrategySections
from fedsync.config.tasks.survival_task import SurveyConfig
from fedsync.config.tasks.task_kinds import CsvConfig

_PLAIN = "or write cipher.metrics: plain, if the silos' owners allow it"
_MANY = "many: bsp, a-bsp, fsp or elastic"


def check_together(config: StrategySections) -> None:
    """Raise `ValueError` if sections of a strategy contradict each other: a line for each, with its remedy."""
    found = [problem for problem, wrong in _policies(config).items() if wrong]
    for check in (
        _balance,
        _own_loop,
        _statistics,
        _survival,
        _encrypted,
        _steps,
        _controls,
        _rounds,
        _masked,
        _sealed,
        private,
    ):
        try:
            # Only the first of a group: others often follow from it.
            found += [problem for problem, wrong in check(config).items() if wrong][:1]
        except ValueError as error:
            found.append(str(error))
    if found:
        raise ValueError("\n".join(found))


def too_few(config: StrategySections, silos: int, file: str) -> tuple[str, str, str] | None:
    """Key, problem and remedy if ``file`` lists fewer silos than the strategy needs; None if there are enough."""
    cipher, sealed = config.cipher, sealing(config.cipher)
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
    combiner, part = config.aggregation.combiner(), config.barrier.sampled(silos)
    there = f"{file} has {silos} silos"
    here = there if part == silos else f"a round has {part} of the {silos} silos in {file}"
    if combiner is not None and combiner.least > part:
        problem = f"needs {combiner.least} updates as configured, and {here}"
        return "aggregation", problem, "Lower malicious and keep of krum, add silos, or raise share of fraction"
    for key, number in named.items():
        most, said = (silos, there) if key.endswith(("min_silos", "least")) else (part, here)
        if number > most:
            return key, f"{number}, and {said}", f"Write at most {most}, or add silos"
    return None


def adds_regions(config: StrategySections) -> bool:
    """Whether relays may add up updates before a commit: weights are known before, and a commit takes all updates."""
    weighed = config.aggregation.is_shipped() and config.aggregation.weigher(config.solver).weighting is not None
    return weighed and config.barrier.innermost.most_updates is None


# Each function returns problems, each with whether the strategy has it.


def _balance(config: StrategySections) -> dict[str, bool]:
    config.balancer.check(config.local.batch_size)
    return {}


def _policies(config: StrategySections) -> dict[str, bool]:
    aggregation, balancer, local = config.aggregation, config.balancer, config.local
    barrier, combiner = config.barrier.innermost, aggregation.combiner()
    least, most = 1 if combiner is None else combiner.least, barrier.most_updates
    kinds = [each.kind for each in config.extensions or ()]
    twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
    swings = local.learning_rate * local.proximal >= 1 or config.solver.pull > 1
    return {
        f"balancer.scale 'steps' has no effect: barrier.kind {barrier.kind} sets the steps": (
            balancer.scales_steps and barrier.sets_steps
        ),
        f"balancer.kind {balancer.kind} compares the times of rounds, and barrier.kind {barrier.kind} has no rounds in "
        "which all silos do the same steps; write balancer: {kind: equalise}, or barrier: {kind: bsp}": (
            balancer.needs_lockstep and not barrier.lockstep
        ),
        f"local.proximal {local.proximal:g} times local.learning_rate {local.learning_rate:g} is not below 1: silos "
        "would swing around the model they start from": aggregation.normalises and swings,
        "barrier.late 'stale' needs a discount of stale updates, which aggregation does not have; give aggregation a "
        "staleness: {kind: polynomial}, or write late: next": barrier.needs_discount and not aggregation.discounts,
        f"aggregation.kind {aggregation.kind!r} compares {least} updates or more, and barrier.kind {barrier.kind!r} as "
        f"configured commits {most} at a time; choose a barrier that commits {_MANY}": most is not None
        and most < least,
        f"extensions has {twice!r} twice; list each kind once": twice is not None,
    }


def _own_loop(config: StrategySections) -> dict[str, bool]:
    task, local = config.task, config.local
    if not task.own_loop:
        return {}
    ignored = {
        "optimizer": local.optimizer != "sgd",
        "momentum": local.momentum > 0,
        "weight_decay": local.weight_decay > 0,
        "clip_norm": local.clip_norm is not None,
        "precision": local.precision != "fp32",
        "proximal": local.proximal > 0,
    }
    return {
        f"local.{key} has no effect on task.kind {task.kind}, which has a loop of its own; leave it out, and set it in "
        "that loop": wrong
        for key, wrong in ignored.items()
    }


def _statistics(config: StrategySections) -> dict[str, bool]:
    task, local, optimizer = config.task, config.local, config.server_optimizer
    if not task.additive:
        return {}
    unfit = f"does not fit task.kind {task.kind}: its model is a mean of statistics;"
    unwanted = {
        f"local.optimizer {local.optimizer}": local.optimizer != "sgd",
        f"local.momentum {local.momentum:g}": local.momentum > 0,
        f"local.weight_decay {local.weight_decay:g}": local.weight_decay > 0,
        "local.clip_norm": local.clip_norm is not None,
        f"local.learning_rate {local.learning_rate:g} above 1": local.learning_rate > 1,
    }
    return {
        **{f"{name} {unfit} use plain sgd with a learning rate up to 1": wrong for name, wrong in unwanted.items()},
        f"server_optimizer.kind {getattr(optimizer, 'kind', '')!r} {unfit} leave server_optimizer out": (
            optimizer is not None
        ),
        f"aggregation.kind {config.aggregation.kind!r} {unfit} choose fedavg": config.aggregation.combiner()
        is not None,
    }


def _survival(config: StrategySections) -> dict[str, bool]:
    task, privacy = config.task, config.privacy
    if isinstance(task, CsvConfig) and task.time is not None and privacy is not None:
        return {f"privacy.kind {privacy.kind!r}: a Cox loss compares rows, so no row has a gradient": True}
    if not isinstance(task, SurveyConfig):
        return {}
    sealed = sealing(config.cipher)
    bits = "needs sealed sums of 16 bits, of two silos or more; leave bits and only out, and write members: 2"
    coarse = sealed is not None and (sealed.bits != 16 or bool(sealed.only) or sealed.members == 1)
    sums = "adds up sums; write aggregation: {kind: fedavg, weight: silo}, without server_optimizer"
    weighed = getattr(config.aggregation, "weight", "") != "silo"
    other = config.aggregation.kind != "fedavg" or config.server_optimizer is not None
    if task.survival is None:
        changed = other or config.wire.set or weighed
        return {f"task.kind 'survey' {bits}": coarse, f"task.kind 'survey' {sums} and wire": changed}
    rounds = task.survival.rounds
    problems = {
        f"takes {rounds} rounds; write stop: {{rounds: {rounds}}}": config.stop.rounds != rounds,
        sums: other or weighed,
        "needs all silos in each round; write barrier: {kind: bsp, complete: true}": (
            config.barrier.kind != "bsp" or not getattr(config.barrier, "complete", False)
        ),
        bits: coarse,
        "has no metrics; write evaluation: {metrics: []}": config.evaluation.metrics != [],
    }
    return {f"task.survival {problem}": wrong for problem, wrong in problems.items()}


def _encrypted(config: StrategySections) -> dict[str, bool]:
    cipher, aggregation = config.cipher, config.aggregation
    if isinstance(cipher, PlainConfig):
        return {}
    remedy = "write staleness: {kind: constant}" if aggregation.additive else "choose fedbuff"
    if aggregation.combiner() is not None:
        remedy = "choose fedavg or fednova, or write cipher: {kind: plain}"
    bits = "cipher.inner.bits" if isinstance(cipher, MaskedConfig) else "cipher.bits"
    return {
        f"wire is for runs in the clear, and cipher.kind {cipher.kind!r} has bits of its own; leave wire out, and "
        f"write {bits}: 8, 12 or 16": config.wire.set,
        f"aggregation.kind {aggregation.kind!r} as configured needs a server that sees the updates, and cipher.kind "
        f"{cipher.kind!r} hides them; {remedy}": aggregation.weigher(config.solver).weighting is None,
        f"aggregation.kind {aggregation.kind!r} is your own, and with cipher.kind {cipher.kind!r} silos, which do not "
        "have it, weigh updates themselves; choose one that is part of FedSync": not aggregation.is_shipped(),
    }


def _steps(config: StrategySections) -> dict[str, bool]:
    optimizer, barrier, cipher = config.server_optimizer, config.barrier.innermost, config.cipher
    if optimizer is None:
        return {}
    sealed, kind = not isinstance(cipher, PlainConfig), config.aggregation.kind
    return {
        f"server_optimizer.kind {optimizer.kind!r} steps along updates, and aggregation.kind {kind!r} moves towards "
        "whole models; choose fedbuff, or leave server_optimizer out": config.aggregation.weigher(config.solver).toward,
        f"server_optimizer.kind {optimizer.kind!r} is your own, and with cipher.kind {cipher.kind!r} silos, which do "
        "not have it, make the steps; choose one that is part of FedSync": sealed and not optimizer.is_shipped(),
        f"barrier.kind {barrier.kind!r} as configured goes back to earlier models, and with cipher.kind "
        f"{cipher.kind!r} silos do not know what server_optimizer remembered there; write interval: {{kind: fixed}}, "
        "or leave server_optimizer out": sealed and barrier.rolls_back,
    }


def _controls(config: StrategySections) -> dict[str, bool]:
    """Problems by which a run's control variate is not the mean of the silos' variates; see `control_variates`."""
    optimizer, local, barrier, balancer = config.server_optimizer, config.local, config.barrier, config.balancer
    if optimizer is None or not optimizer.controls:
        return {}
    weighting = config.aggregation.weigher(config.solver).weighting
    aggregation = f"aggregation.kind {config.aggregation.kind!r} as configured"
    given = {"kind": local.optimizer} if isinstance(local.optimizer, str) else local.optimizer
    plain_sgd = given["kind"] == "sgd" and local.sgd_momentum == 0 and not given.get("maximize", False)
    problems = {
        f"task.kind {config.task.kind} has a loop of its own; leave server_optimizer out": config.task.own_loop,
        f"local.optimizer {given['kind']!r} as configured is not plain SGD; write optimizer: sgd, without "
        "momentum": not plain_sgd,
        "local.proximal holds silos back, as control variates do; write proximal: 0": local.proximal > 0,
        f"balancer.kind {balancer.kind!r} as configured gives silos different learning rates; write scale: batch": (
            balancer.scales_rates
        ),
        f"{aggregation} does not define a commit's number of local steps; write aggregation: {{kind: fednova}}, "
        "which with equal steps is FedAvg": weighting is None or not weighting.normalised,
        f"{aggregation} changes a silo's weight from commit to commit; write weight: examples, or silo": (
            weighting is not None and weighting.by == "samples"
        ),
        f"barrier.kind {barrier.kind!r} as configured commits updates that began with different versions; choose bsp, "
        "a-bsp, fsp or elastic, or write late: drop": barrier.mixes_rounds,
        f"barrier.kind {barrier.innermost.kind!r} as configured goes back to earlier models, and silos' variates do "
        "not; write interval: {kind: fixed}": barrier.innermost.rolls_back,
        "wire has less than 32 bits; leave it out": config.wire.set,
        "is your own, which silos do not have; choose scaffold": not optimizer.is_shipped(),
    }
    corrects = f"server_optimizer.kind {optimizer.kind!r} corrects the steps of silos, and"
    return {f"{corrects} {problem}": wrong for problem, wrong in problems.items()}


def _rounds(config: StrategySections) -> dict[str, bool]:
    if config.on_round is None or not config.on_round.changes_rate:
        return {}
    problems = {
        "server_optimizer.kind 'scaffold' needs a constant learning rate; leave server_optimizer out": (
            config.controlled
        ),
        f"aggregation.kind {config.aggregation.kind!r} needs a constant product of local.proximal and rate; write "
        "proximal: 0": config.aggregation.normalises and config.local.proximal > 0,
        f"task.kind {config.task.kind} needs a constant one; leave on_round out": (config.task.additive),
    }
    return {f"on_round changes the learning rate, and {problem}": wrong for problem, wrong in problems.items()}


def _masked(config: StrategySections) -> dict[str, bool]:
    barrier = config.barrier
    if not isinstance(config.cipher, MaskedConfig):
        return {}
    return {
        "cipher.kind 'masked' decrypts sums of one round only, and barrier as configured may commit updates alone or "
        "with later updates; choose bsp, a-bsp or elastic, or write late: drop": barrier.mixes_rounds,
        "cipher.kind 'masked' decrypts only sums of nearly all silos, and barrier has a part of them in each round; "
        "leave the fraction out, or write cipher.kind: bfv": barrier.draws,
        "balancer.scale 'learning_rate' gives silos different learning rates, and masks (cipher.kind 'masked') "
        "cancel only if all have the same rate; write balancer.scale: batch, or cipher.kind: bfv": (
            config.balancer.scales_rates
        ),
    }


def _sealed(config: StrategySections) -> dict[str, bool]:
    sealed, barrier, best = sealing(config.cipher), config.barrier.innermost, config.evaluation.best
    if sealed is None:
        return {}
    most, members, silos = barrier.most_updates, sealed.members or 1, len(config.silos or ()) or config.min_silos
    part = None if silos is None or not config.barrier.draws else config.barrier.sampled(silos)
    figures, unsized = sealed_metrics(config.cipher) is not None, sealed.examples is None
    weighting = config.aggregation.weigher(config.solver).weighting
    return {
        f"cipher.members {members}: barrier.kind {barrier.kind!r} as configured commits {most} at a time, so silos "
        f"would decrypt no version; write members: {most}, or choose a barrier that commits {_MANY}": (
            most is not None and members > most
        ),
        f"cipher.members {members}: barrier has {part} of {silos} silos in each round, so silos would decrypt no "
        f"version; raise share, or write barrier.least: {members}": part is not None and members > part,
        f"barrier.kind {barrier.kind!r} as configured uses the loss of each round, and with sealed metrics the "
        f"server learns it too late; if it has an interval, write interval: {{kind: fixed}}, {_PLAIN}": (
            figures and barrier.needs_losses
        ),
        f"barrier.kind {barrier.kind!r} counts passes over silos' data, and with sealed metrics the server does not "
        f"learn numbers of samples; write cipher.examples: the number of samples of a pass, for all silos, {_PLAIN}": (
            figures and unsized and barrier.needs_examples
        ),
        f"evaluation.best.by {best.by!r}: sealed metrics hide the metrics of single silos; write "
        f"pooled, {_PLAIN}": figures and best.by != "pooled",
        "aggregation.weight 'examples' needs the number of each silo's samples for what cipher.only leaves in the "
        f"clear, and with sealed metrics the server does not learn it; write weight: silo, {_PLAIN}": (
            figures and bool(sealed.only) and weighting is not None and weighting.by in ("examples", "precision")
        ),
    }
