"""Guard of a silo's privacy budgets: limits on what a differentially private run may do and send.

An order is admitted if the budget has room for all of its steps. The steps are entered in the ledgers before training,
since a failure, a hang or a kill may depend on the data. Steps that the order then leaves out are given back. The
report keeps only figures that follow from the order, figures that the owner declared public, and scores with noise;
docs/assurance/privacy.md lists each figure.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from pathlib import Path
from typing import TYPE_CHECKING

from fedsync.common.errors import BudgetSpent, ConfigError, OwnerRefusal, ProtocolError
from fedsync.config.cipher import PlainConfig
from fedsync.config.run_spec import RunSpec
from fedsync.config.sections.privacy import BudgetConfig, PrivacyConfig
from fedsync.config.tasks.survival_task import SurveyConfig
from fedsync.config.tasks.task_kinds import CsvConfig
from fedsync.core.orders import Evaluation, WorkOrder, WorkReport
from fedsync.model.layout import matches
from fedsync.model.running_statistics import INSTEAD, NAMES
from fedsync.privacy.accounting import LEAST_NOISE, PrivacyPlan
from fedsync.privacy.release import PrivateSettings, Release
from fedsync.silo.owner.audit import audit_here
from fedsync.silo.owner.owner_policy import ALL_DATA, OwnerPolicy
from fedsync.silo.owner.privacy_ledger import LEDGERS, PrivacyLedger, PrivacyTally, ledger_file, tally_of
from fedsync.silo.protocol import Identity
from fedsync.silo.session.session_extension import Judge, SessionExtension
from fedsync.tasks.task_section import TaskSection
from fedsync.train.silo_trainer import ESTIMATED, Outcome, SiloTrainer, TrainerFacts

if TYPE_CHECKING:
    from fedsync.cipher.encoding.silo_noise import SiloNoise

_TOLD = 12  # digits of a run's digest in the ledger


@dataclass
class PrivacyGuard(SessionExtension):
    """Guard of one run at one silo.

    With a target epsilon, the noise is computed anew whenever the rest of the run, at the batch size of the next order,
    would exceed the target. So runs with changing batch sizes keep the target.

    Args:
        ledgers: ledgers of the data that the run reads; with a target, the last has it as budget, in memory.
        finished: number of the run's orders that the silo has finished.
        counts: whether an evaluation's score is a number of right predictions, to which each row adds at most one.
        whole: the only release of an order, if the noise is on whole updates; steps then have no noise.
        weighed_values: size of the model, if updates are weighed by precision; else 0.
        estimate: steps of the first estimate of updates, which an encrypted run needs.
        seed: text from which noise on scores is drawn in virtual time, different at each silo.
    """

    config: PrivacyConfig
    ledgers: Sequence[PrivacyLedger]
    settings: PrivateSettings
    trainer: SiloTrainer
    run: str
    rounds: int
    counts: bool
    whole: Release | None = None
    weighed_values: int = 0
    tally: PrivacyTally | None = None
    estimate: int = 0
    seed: str = ""
    finished: int = 0
    _aimed: int = 1
    _begun: WorkOrder | None = None

    def allow(self, order: WorkOrder) -> WorkOrder:
        """Return an order that may begin; an order with a time budget is cut to the steps for which budgets have room.
        Raise `BudgetSpent` without room, and `OwnerRefusal` if the order would train without privacy.
        """
        if order.apart:
            problem = f"a {order.subject} model would be trained without privacy, and a budget guards the data"
            raise OwnerRefusal("evaluation.cross_site", problem, "Leave cross_site out")
        if not order.scores_only:
            behind = min(self.finished, order.base_version)  # a restarted server may order lost versions again
            self.aim(order.batch_size, order.max_steps, min(max(self.rounds - behind, 1), self.rounds))

        def fit(steps: int) -> bool:
            return all(ledger.allows(self._asked(order, steps)) for ledger in self.ledgers)

        if order.scores_only or order.budget_s is None or fit(order.max_steps):
            for ledger in self.ledgers:
                ledger.check(self._asked(order, order.max_steps))
            return order
        steps = bisect_left(range(1, order.max_steps + 1), True, key=lambda count: not fit(count))
        for ledger in self.ledgers:
            ledger.check(self._asked(order, max(steps, 1)))
        return replace(order, max_steps=steps)

    def known(self, facts: TrainerFacts) -> TrainerFacts:
        """Facts with the public number of rows: it sets the scale on which the silo seals, which other silos learn."""
        return replace(facts, examples=self.settings.units)

    def estimated(self, order: WorkOrder) -> int | None:
        """Enter the silo's own order, from which the scale of updates is estimated; raises as `begins`."""
        self._enter("estimate", self._releases_of(order, order.max_steps))
        return self._precision(order)

    def as_trained(self, order: WorkOrder) -> WorkOrder:
        """Return an order, without evaluation unless scores leave: even a failed evaluation discloses something."""
        return order if self.tells else replace(order, evaluate=False)

    @property
    def tells(self) -> bool:
        """Whether scores leave, with noise or because the owner declared them public."""
        return self._noisy or self._open

    def begins(self, order: WorkOrder) -> None:
        """Enter all that an order may release. Raise `BudgetSpent` if other runs have spent the budget meanwhile, and
        `ConfigError` if a ledger takes no entry.
        """
        self._enter(order.update_id, self._asked(order, order.max_steps))
        self._begun = order

    def aim(self, batch_size: int, steps: int, orders: int) -> None:
        """Choose the noise with which further orders keep the target; raise `BudgetSpent` if none does."""
        if self.config.noise_multiplier is not None or self.whole is not None:
            return
        now = self.settings
        # The last evaluations: of the last version, and on the test split of it and the best.
        scores, estimate = 3 if self.trainer.facts.validates else 1, self.estimate if now.noise is None else 0
        score_noise = self.config.score_noise if self._scored() else None
        plan = PrivacyPlan(orders, steps, batch_size, score_noise, scores, estimate)
        guess = None if now.noise is None else 1.01 * now.noise * now.rate(batch_size) / now.rate(self._aimed)
        noise = now.noise or max((each.budget.least_noise for each in self.ledgers), default=LEAST_NOISE)
        for ledger in self.ledgers:
            if self.settings.noise is not None and ledger.allows(plan.releases(replace(self.settings, noise=noise))):
                continue
            budget = ledger.budget
            aim = (budget.epsilon, budget.delta, noise, budget.accountant)
            try:
                noise = plan.noise(self.settings, *aim, spent=ledger.spent, guess=guess)
            except ValueError as error:
                remedy = "Ask for fewer rounds or more score_noise, or have the owner raise the budget"
                raise BudgetSpent("privacy", str(error), remedy) from error
        if noise != self.settings.noise:
            self.settings, self._aimed = replace(self.settings, noise=noise), batch_size
            self.trainer.make_private(self.settings)

    def released(self, order: WorkOrder, outcome: Outcome) -> Outcome:
        """Give back the releases that an order did not make; return its outcome as it may leave. Raises as `begins`."""
        report = outcome.report
        evaluation, releases = None, self._releases_of(order, max(report.steps, 0))
        if order.evaluate or report.evaluation is not None:
            releases += self._scored()
            evaluation = self._told(report.evaluation, f"{order.seed}")
        entered = self._asked(order, order.max_steps) if self._begun is order else Counter[Release]()
        self._begun, self.finished = None, self.finished + 1
        if more := releases - entered:
            self._enter(order.update_id, more)
        self._give_back(order.update_id, entered - releases)
        return replace(outcome, report=replace(self._stripped(order, report), evaluation=evaluation))

    def judged(self, judge: Judge, of: str) -> Evaluation:
        """Enter an evaluation, since even its failure may depend on data; return what may leave. Raises as `begins`."""
        self._enter(of, self._scored())
        return self._told(judge(False) if self.tells else None, of)

    def public(self, figure: str) -> bool:
        return all(figure in ledger.budget.public for ledger in self._owned)

    @property
    def _owned(self) -> Sequence[PrivacyLedger]:
        aimed = self.config.target_epsilon is not None and self.whole is None
        return self.ledgers[:-1] if aimed else self.ledgers

    def _asked(self, order: WorkOrder, steps: int) -> Counter[Release]:
        return self._releases_of(order, steps) + (self._scored() if order.evaluate else Counter())

    def _releases_of(self, order: WorkOrder, steps: int) -> Counter[Release]:
        if order.scores_only:  # its update is zero
            return Counter()
        if self.whole is not None:
            return Counter({self.whole: 1})
        return Counter({self.settings.release(order.batch_size): steps})

    @property
    def _noisy(self) -> bool:
        return self.config.score_noise is not None and self.counts

    @property
    def _open(self) -> bool:
        return bool(self._owned) and self.public("scores")

    def _scored(self) -> Counter[Release]:
        return Counter({Release(1.0, self.config.score_noise or 0.0): 1} if self._noisy and not self._open else {})

    def _enter(self, of: str, releases: Counter[Release]) -> None:
        for ledger in self.ledgers:
            ledger.check(releases)
        for ledger in self.ledgers:
            ledger.enter(self.run, of, releases)
        if self.tally is not None:
            self.tally.count(releases)

    def _give_back(self, of: str, releases: Counter[Release]) -> None:
        for ledger in self.ledgers if releases else ():
            ledger.give_back(self.run, of, releases)
        if self.tally is not None:
            self.tally.count(releases, -1)

    def _told(self, found: Evaluation | None, of: str) -> Evaluation:
        """Return a score with noise, or nothing. A row adds at most one to the number of right predictions. If the
        number of rows is not public, it gets noise too, and a row changes both numbers together by at most the square
        root of two.
        """
        if self._open and found is not None:
            return replace(found, gains={})
        if not self._noisy or found is None or found.correct is None:
            return Evaluation(None, None, self.settings.units)
        assert self.config.score_noise is not None
        drawn = random.Random(f"{self.seed} {of}") if self.settings.seeded else random.SystemRandom()
        exact = all(ledger.budget.examples is None for ledger in self._owned)
        spread = self.config.score_noise * (1.0 if exact else sqrt(2))
        counted = found.correct if isfinite(found.correct) else 0.0
        right = min(max(counted, 0.0), float(found.samples)) + drawn.gauss(0.0, spread)
        samples = found.samples if exact else max(round(found.samples + drawn.gauss(0.0, spread)), 1)
        return Evaluation(None, min(max(right, 0.0), float(samples)), samples)

    def _stripped(self, order: WorkOrder, report: WorkReport) -> WorkReport:
        loss = report.loss if self._owned and self.public("loss") else None
        if not self.public("speed"):
            samples = report.steps * order.batch_size
            report = WorkReport(report.base_version, report.steps, samples, float(report.steps), None)
        return replace(report, loss=loss, metrics={}, precision=self._precision(order))

    def _precision(self, order: WorkOrder) -> int | None:
        return self.settings.precision(order.batch_size, self.weighed_values) if self.weighed_values else None


def privacy_guard(
    spec: RunSpec,
    identity: Identity,
    ledgers: list[PrivacyLedger],
    trainer: SiloTrainer,
    noise: SiloNoise | None,
    folder: Path | None = None,
    done: int = 0,
    *,
    seeded: bool,
) -> PrivacyGuard | None:
    """Return the guard of a run, and make its trainer private; None for a run without privacy.

    ``ledgers`` are those of `check_budgets`, ``noise`` the noise on whole updates, if any. ``folder`` keeps what a run
    with a target has spent, if no ledger on disk does. ``done`` is the number of the run's orders that the silo
    finished before a restart. ``seeded`` draws noise from the seeds of orders, in virtual time. Raise `BudgetSpent` if
    nothing is left, and `ConfigError` if the trainer cannot train privately.
    """
    config = spec.privacy
    if config is None:
        return None
    column = next((ledger.budget.person_column or "" for ledger in ledgers), "")
    # A server that lost a checkpoint continues the run under another name, and the target covers both parts.
    run = f"{spec.origin} {identity.text.lasting.hex()[:_TOLD]}".strip()
    whole = None if noise is None else Release(1.0, noise.multiplier)
    if whole is None:
        found = trainer.make_private(PrivateSettings(config.clip, None, 1, column, seeded))
    else:
        if any(matches(name, NAMES) for name in trainer.facts.layout.names):
            problem = "running statistics of norm layers change more than weights, and would take most of privacy.clip"
            raise ConfigError("privacy.kind 'silo-noise'", problem, f"Use {INSTEAD}")
        found = trainer.facts.examples
    told = [ledger.budget.examples for ledger in ledgers if ledger.budget.examples is not None]
    scores = bool(ledgers) and all("scores" in ledger.budget.public for ledger in ledgers)
    units = min(told, default=found)
    settings = PrivateSettings(config.clip, config.noise_multiplier, units, column, seeded, scores)
    rounds = 1 if spec.stop is None else spec.stop.rounds or 1
    estimate = 0 if isinstance(spec.cipher, PlainConfig) or done else min(spec.local.steps, ESTIMATED)
    tally = tally_of(spec, config, identity.index)
    if whole is not None:
        _check_noise("noise_multiplier", whole.noise, ledgers)
        return PrivacyGuard(config, tuple(ledgers), settings, trainer, run, rounds, False, whole, tally=tally)
    if config.target_epsilon is not None:
        target = BudgetConfig(epsilon=config.target_epsilon, delta=config.delta, least_noise=LEAST_NOISE)
        spent = ledgers[0].by_run.get(run, Counter()) if ledgers else Counter()
        durable = folder is None or any(ledger.file is not None for ledger in ledgers)
        own = None if durable else ledger_file(f"{folder}/{LEDGERS}", "run")
        if own is not None:
            spent = _spent_elsewhere(run, identity, own, target)
        ledgers.append(PrivacyLedger("the run", target, own, spent=Counter(spent)).load())
        done = done or min(spent.total() // spec.local.steps, rounds - 1)
    counts = spec.task.scores == "share" and not column
    weighting = spec.aggregation.weigher(spec.local.solver(spec.task)).weighting
    size = trainer.facts.layout.size if weighting is not None and weighting.by == "precision" else 0
    seed, made = f"{spec.seed} {identity.index}", tuple(ledgers)
    guard = PrivacyGuard(config, made, settings, trainer, run, rounds, counts, None, size, tally, estimate, seed, done)
    if settings.noise is None:
        guard.aim(spec.local.batch_size, spec.local.steps, max(rounds - done, 0))
    else:
        trainer.make_private(settings)
    return guard


def _spent_elsewhere(run: str, identity: Identity, own: Path, target: BudgetConfig) -> Counter[Release]:
    """Return what this silo spent in a run under its former names, each of which has a trainer's folder of its own."""
    spent = Counter[Release]()
    for file in own.parents[2].glob(f"*/{LEDGERS}/{own.name}"):
        with suppress(OSError, ValueError, ProtocolError):
            both = identity, Identity.load(file.parents[1])
            if file != own and len({(each.index, each.name, each.text.lasting) for each in both}) == 1:
                spent += PrivacyLedger("the run", target, file).load().by_run.get(run, Counter())
    return spent


def check_budgets(spec: RunSpec, identity: Identity, owner: OwnerPolicy) -> list[PrivacyLedger]:
    """Check a run against the budgets of its data, before data are read; return their ledgers. Raise `OwnerRefusal` if
    the run is not private, or less than the owner demands; `ConfigError` for a damaged ledger, or data of different
    units.
    """
    ledgers, config = ledgers_of(owner, spec.task), spec.privacy
    emulated = spec.emulate[identity.index] if spec.emulate else None
    if emulated is not None and emulated.privacy is not None:
        kept = Counter[Release]() if config is None else tally_of(spec, config, identity.index).releases
        ledgers.append(PrivacyLedger(emulated.name, emulated.privacy, spent=kept))
    public = all("statistics" in ledger.budget.public for ledger in ledgers)
    if config is None:
        if not ledgers or (isinstance(spec.task, SurveyConfig) and public):
            return []
        problem = "the run is not private, and this silo's owner set a privacy budget"
        raise OwnerRefusal("privacy", problem, "Write privacy: {kind: dp-sgd, clip: 1.0, target_epsilon: ...}")
    whole = config.kind == "silo-noise"
    if any((ledger.budget.unit == "silo") != whole for ledger in ledgers):
        problem = f"privacy.kind {config.kind!r} protects another unit than this silo's owner set a budget for"
        kind = "dp-sgd" if whole else "silo-noise"
        raise OwnerRefusal("privacy.kind", problem, f"Write kind: {kind}, or ask the owner for a budget of its unit")
    if not whole and isinstance(spec.task, CsvConfig) and not isinstance(spec.task.standardise, dict):
        problem = "each row would change the mean of its column, and so all scaled rows"
        raise OwnerRefusal("task.standardise", problem, "Write standardise: {COLUMN: [mean, deviation]}")
    _check_demands(config, ledgers)
    return ledgers


def ledgers_of(owner: OwnerPolicy, task: TaskSection) -> list[PrivacyLedger]:
    """Return the loaded ledgers of the data that a task reads; of all data unless it is a table or a survey."""
    read: list[Path] = []
    task.relocated(lambda path: read.append(Path(path).resolve()) or path)  # type: ignore[func-returns-value]
    everything = not isinstance(task, CsvConfig | SurveyConfig)
    return [
        ledger_of(owner, name)
        for name in owner.privacy
        if everything
        or name == ALL_DATA
        or any(each.is_relative_to(Path(owner.named[name]).resolve()) for each in read)
    ]


def ledger_of(owner: OwnerPolicy, name: str) -> PrivacyLedger:
    """Return the loaded ledger of data with a budget, with the releases under former budgets of the same data.

    A budget of all data includes the ledgers of named data, and the other way round. So an owner who replaces one kind
    of budget by the other resets nothing.
    """
    audit, log = None if owner.audit is None else Path(owner.audit.folder), audit_here()
    tell = PrivacyLedger.tell if log is None else log.add
    known = sorted(path.stem for path in Path(owner.ledgers).glob("*.jsonl"))
    former = [each for each in known if each not in owner.privacy and ALL_DATA in (name, each)]
    found, *others = (
        PrivacyLedger(each, owner.privacy[name], ledger_file(owner.ledgers, each), audit, tell).load()
        for each in (name, *former)
    )
    for other in others:
        found.include(other)
    return found


def _check_demands(config: PrivacyConfig, ledgers: Sequence[PrivacyLedger]) -> None:
    columns = {ledger.budget.person_column or "" for ledger in ledgers}
    if len(columns) > 1:
        raise ConfigError("privacy", "the run reads data whose budgets have different units", "Write one unit for all")
    for budget in [ledger.budget for ledger in ledgers]:
        if config.clip > budget.largest_clip:
            problem = f"{config.clip:g}, and this silo's owner allows at most {budget.largest_clip:g}"
            raise OwnerRefusal("privacy.clip", problem, f"Write clip: {budget.largest_clip:g}")
    _check_noise("noise_multiplier", config.noise_multiplier, ledgers)
    _check_noise("score_noise", config.score_noise, ledgers)


def _check_noise(name: str, noise: float | None, ledgers: Sequence[PrivacyLedger]) -> None:
    for budget in [ledger.budget for ledger in ledgers]:
        if noise is not None and noise < budget.least_noise:
            problem = f"{noise:g}, and this silo's owner demands at least {budget.least_noise:g}"
            raise OwnerRefusal(f"privacy.{name}", problem, f"Write {name}: {budget.least_noise:g}")
