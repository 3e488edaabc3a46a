"""`FedSync`, the Flower strategy that runs a strategy file."""

from __future__ import annotations

import inspect
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedsync.common.errors import ConfigError, HugeModel, RunError
from fedsync.common.files import read_input
from fedsync.common.run_claim import EVIDENCE, Existing, claimed
from fedsync.config.cipher import sealing
from fedsync.config.cluster import ClusterConfig
from fedsync.config.compatibility import adds_regions
from fedsync.config.run_spec import RunSpec
from fedsync.config.sections.survey import survey_of
from fedsync.config.strategy import StrategyConfig
from fedsync.core.coordinator import Coordinator
from fedsync.evaluation.survey.findings import STATISTICS
from fedsync.flower import payloads
from fedsync.flower.first_model import ask_for_model, given_by, model_writer, task_model
from fedsync.flower.hub_transport import way_to_silos
from fedsync.flower.result import (
    BestModel,
    EvaluateFn,
    FinalModel,
    RoundLog,
    RunResult,
    ServerEvaluation,
    fill_metrics,
    logger,
)
from fedsync.flower.shipped import Shipped
from fedsync.flower.silo_metrics import MetricsAggrFn, SiloMetrics
from fedsync.flower.uncalled_methods import unexpected
from fedsync.model.chunked_arrays import ArrayKeeper
from fedsync.model.layout import Vector
from fedsync.model.plain_aggregator import PlainAggregator
from fedsync.model.tensor_parts import CommonForm, PartsError
from fedsync.model.transfer import DurableAggregator
from fedsync.observe.quality.kept_models import KeptModels
from fedsync.observe.quality.survey_report import FOLDER as SURVEY
from fedsync.observe.quality.survey_report import after_survey, write_statistics
from fedsync.observe.recorder import Listener
from fedsync.observe.run_builder import RunBuilder, measuring
from fedsync.policies.rounds.settings_by_round import Called, Scalar
from fedsync.server.checkpoints import KEPT, Checkpoints, Moment, Origin, clear, digest, new_identity, resumed
from fedsync.server.driver import FlowerDriver
from fedsync.server.driver_extension import DriverExtension
from fedsync.server.nodes import Admission
from fedsync.server.operator_requests import OperatorRequests, Suspects, problem_with
from fedsync.server.timeouts import Timeouts
from fedsync.silo.protocol import InitialModel
from fedsync.transport.port import Transport

if TYPE_CHECKING:
    from fedsync.cipher.keys.keywrap import ServerKeys
    from fedsync.cipher.plan import EncryptionPlan
    from fedsync.policies.schema import Policy

ARRAYS = "arrays"
"""Folder of a run's large models and updates, in the folder of the run's files; removed at the end."""


@dataclass(frozen=True, slots=True)
class _Begin:
    """Start of a run: its first model, or the checkpoint from which it resumes."""

    origin: Origin
    model: Vector
    moment: Moment | None


def _model_of(aggregator: PlainAggregator, origin: Origin) -> FinalModel:
    return FinalModel(aggregator.model, origin.layout, origin.kept, origin.ties)


class FedSync(Shipped):
    """Flower strategy that runs a FedSync configuration on a Flower grid.

    Use it in any ServerApp::

        FedSync.lb_bsp(batch_size=32).start(grid, initial_arrays, num_rounds=40)
        FedSync.from_yaml("my-strategy.yaml").start(grid, initial_arrays)

    Each shipped strategy has a constructor, all of which take `fedsync.flower.shipped.Options`. The nodes run
    `fedsync.flower.client_app.app` as their ClientApp.

    Args:
        cluster: machines that the silos emulate, by partition; None in a real federation.
        policies: ready policies by section, as in ``{"barrier": MyBarrier()}``; they need not be registered.
        on_round: function of the round, from 1, that returns settings of its orders: ``learning_rate``, and entries of
            ``train_config``. A subclass may override `configure_train` instead.
        train_metrics_aggr_fn: combines the silos' training metrics of a commit into one record of the run's result.
        evaluate_metrics_aggr_fn: combines the silos' evaluations of a version into one record.
        out: folder for the run's files; by default a new temporary folder.
        runtime: name of the runtime in the summary.
        target_accuracy: accuracy for ``seconds_to_target``; by default the target of the stop rules.
        timing: timeouts; by default those of the strategy's ``waiting``.
        listeners: called after every entry of the journal.
        keys: the server's key file, for an encrypted run.
        supervised: whether operators watch server and silos; then the run waits for silos without limit by default.
        registered: whether to accept only nodes that are registered by name, as with `fedsync server`.
        regions: as in `Admission`.
        resume: whether to resume the run in ``out`` from its newest checkpoint.
        overwrite: whether to replace an existing run in ``out``; by default, `start` refuses its folder.
        checkpoints: number of newest checkpoints that are kept in ``out``; 0 (not with ``resume``) writes none.
    """

    def __init__(
        self,
        config: StrategyConfig,
        cluster: ClusterConfig | None = None,
        *,
        policies: Mapping[str, Policy] | None = None,
        on_round: Callable[[int], Mapping[str, Scalar]] | None = None,
        train_metrics_aggr_fn: MetricsAggrFn | None = None,
        evaluate_metrics_aggr_fn: MetricsAggrFn | None = None,
        out: str | Path | None = None,
        runtime: str = "flower",
        target_accuracy: float | None = None,
        timing: Timeouts | None = None,
        listeners: Sequence[Listener] = (),
        keys: Path | None = None,
        supervised: bool = False,
        registered: bool = False,
        regions: Mapping[str, Sequence[str]] | None = None,
        resume: bool = False,
        overwrite: bool = False,
        checkpoints: int = KEPT,
    ) -> None:
        self._refuse_overridden()
        by_round = {} if on_round is None else {"on_round": Called.of(on_round)}
        self.config = config = config.with_policies({**(policies or {}), **by_round})
        self._aggregates = train_metrics_aggr_fn, evaluate_metrics_aggr_fn
        self.cluster = cluster
        self.out = Path(out if out is not None else tempfile.mkdtemp(prefix="fedsync-"))
        self.run_summary: dict[str, Any] | None = None
        self._runtime = runtime
        self._target_accuracy = target_accuracy
        self._timing = timing or Timeouts.of(config.waiting, supervised=supervised)
        self._listeners, self._keys = listeners, keys
        asked = len(config.silos or (cluster.silos if cluster else ())) or config.quorum()
        expected = None if resume else asked  # a resumed run waits for silos that took part before
        needed = config.quorum(cluster.at_start if cluster else None)
        self._admission = Admission(config.silos, registered, expected, regions, config.most_examples, needed)
        self._existing = Existing.RESUME if resume else Existing.OVERWRITE if overwrite else Existing.REFUSE
        self._resume, self._kept = resume, checkpoints
        if resume and not checkpoints:
            problem = "0 in a resumed run: silos would get versions after its checkpoint, which it could make again"
            raise ConfigError("FedSync, checkpoints", problem, "Write at least 1, or leave it out")

    @classmethod
    def from_yaml(cls, name: str | Path, overrides: Sequence[str] = (), **options: Any) -> FedSync:
        """Return the strategy of a YAML file.

        Args:
            name: path of a file, or name of a shipped strategy.
            overrides: ``a.b=value`` assignments.
            options: keywords of the constructor.

        Raises:
            ConfigError: anything is wrong with the file; names the place and the remedy.
        """
        return cls(StrategyConfig.load(name, overrides), **options)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
        **later: Any,
    ) -> RunResult:
        """Run the strategy to its end.

        Args:
            grid: grid of the ServerApp.
            initial_arrays: first model, by the tensor names of the silos' model. Any types are allowed, but values
                travel as float32. By default the task's own model, from the seed.
            num_rounds: overrides ``stop.rounds``.
            timeout: time after which an order without an update has failed [s]; by default as ``waiting`` says.
            train_config: further settings for the silos' own training code: numbers, text and booleans.
            evaluate_config: further settings for the silos' own evaluation code.
            evaluate_fn: called at the server with every version and its arrays, from version 0 on. A resumed run calls
                it from the first version after its checkpoint on, and its result has no earlier metrics of this kind.
            later: keywords of later versions of Flower, which have no effect.

        Returns:
            Final arrays, with names and types as given, and none for an encrypted run; training and evaluation metrics
              by version; the folder of the run's files.

        Raises:
            RunError: the run could not reach its end.
            ConfigError: strategy and silos do not fit together, ``out`` has a run, or there is nothing to resume from.
            TypeError: a keyword is known neither to FedSync nor to the installed Flower.
        """
        ours, theirs = (inspect.signature(start).parameters.keys() for start in (FedSync.start, Strategy.start))
        for word in sorted(later.keys() - theirs):
            raise unexpected("FedSync.start", word, (ours | theirs) - {"self", "later"})
        self._refuse_overridden()
        config, timing = self._adjusted(num_rounds, timeout)
        config = self._configured(grid, config.told(train_config or {}, evaluate_config or {}))
        with claimed(self.out, self._existing, config.initial_model), way_to_silos(grid, self.out) as silos:
            result, final = self._driven(silos, config, timing, evaluate_fn, initial_arrays)[:2]
        if final is not None:
            result.arrays = final.arrays(initial_arrays)
        return result

    def run(self, grid: Grid) -> FinalModel | None:
        """Run as `start`, in a folder that the caller has claimed, and without a further copy as Flower's arrays."""
        with way_to_silos(grid, self.out) as silos:
            return self._driven(silos, self.config, self._timing, None, None)[1]

    def _surveyed(self, silos: Transport, config: StrategyConfig, timing: Timeouts, spec: RunSpec) -> RunSpec:
        """Run the survey, if any, as a run of its own; return the specification with its findings."""
        survey = survey_of(config, None if self.cluster is None else len(self.cluster.silos))
        if survey is None:
            return spec
        before = FedSync(
            survey, self.cluster, out=self.out / SURVEY, runtime=self._runtime, timing=timing, keys=self._keys,
            registered=self._admission.registered, regions=self._admission.regions, checkpoints=self._kept,
        )  # fmt: skip
        origin, aggregator = before._driven(silos, survey, timing, None, None)[2:]
        clear(before.out)
        return after_survey(spec, origin.spec, origin.layout, aggregator, self.out)

    def _driven(
        self,
        silos: Transport,
        config: StrategyConfig,
        timing: Timeouts,
        evaluate_fn: EvaluateFn | None,
        given: ArrayRecord | None,
    ) -> tuple[RunResult, FinalModel | None, Origin, DurableAggregator]:
        """Return result, final model (None if encrypted, as only silos have it), origin and aggregator of the run."""
        listeners = (*self._listeners, RoundLog(config.stop.rounds))
        run = RunBuilder(measuring(config), self.cluster, self.out, self._runtime, self._target_accuracy, listeners)
        self.summary()
        keeper = ArrayKeeper(self.out / ARRAYS, or_memory=True)
        given = given or given_by(config, resumed=self._resume)
        begin = self._resumed(run) if self._resume else self._fresh(silos, run, timing, given, keeper)
        layout, moment, result = begin.origin.layout, begin.moment, RunResult(out=self.out)
        spec = RunSpec.parse(begin.origin.spec)
        logger.info("silos call this run %s", spec.run)
        plan = spec.encryption_plan(layout)
        if plan is not None and evaluate_fn is not None:
            raise ConfigError("evaluate_fn", "the server of an encrypted run has no model", "Evaluate at the silos")
        if plan is not None and given is not None and (compared := config.evaluation.cross_site) and compared.local:
            remedy = "Begin with the task's own model, or write local: false"
            problem = "silos of an encrypted run forget the model that was given"
            raise ConfigError("evaluation.cross_site", problem, remedy)
        policies, metrics = run.policies(), SiloMetrics(*self._aggregates)
        policies = metrics.joined(policies, sealed=plan is not None and plan.seal_metrics)
        coordinator, keys = Coordinator(policies), self._server_keys(plan)
        first = None if given is None else begin.model
        aggregator = run.aggregator(layout, begin.model, policies, plan, keys, first, spec.run, keeper)
        if moment is not None:
            coordinator.restore(moment.coordinator)
            aggregator.restore(moment.aggregator)

        extensions: list[DriverExtension] = []
        current: Callable[[], FinalModel] | None = None
        recorder = run.recorder(layout.nbytes, plan, resume=self._resume)
        models = KeptModels(self.out, model_writer(config, layout), resume=self._resume)
        if isinstance(aggregator, PlainAggregator):
            current = partial(_model_of, aggregator, begin.origin)
            extensions.append(BestModel(models, aggregator))
            if evaluate_fn is not None:
                extensions.append(ServerEvaluation(evaluate_fn, current, given, result))
        for each in extensions:
            if moment is None:
                each.on_version(0)
            elif coordinator.best is not None:
                each.on_best(coordinator.best)
        checkpoints = Checkpoints(self.out, begin.origin, self._kept, moment, required=plan is not None)
        operator = OperatorRequests(self.out, partial(problem_with, config))
        searches = plan is not None and plan.seal_metrics
        extensions.append(Suspects(operator, *coordinator.steered) if searches else operator)
        driver = FlowerDriver(
            silos,
            coordinator,
            aggregator,
            layout,
            CommonForm(layout, begin.origin.frozen),
            begin.origin.spec,
            recorder,
            timing,
            report_s=run.config.report_s,
            admission=self._admission,
            checkpoints=checkpoints if self._kept else None,
            resumed=moment,
            extensions=extensions,
            adds=adds_regions(config),
        )
        final = None
        try:
            driver.run()
            final = None if current is None else current()
        except RunError:
            final = current() if current is not None and recorder.ledger.rounds else None  # what it has learnt
            raise
        finally:
            for each in extensions:
                each.close()
            try:
                models.finish(None if final is None else final.vector)
            finally:  # a full disk may still have room for the summary
                checkpoints.close()
                keeper.close()
                recorder.ledger.notes += [*driver.refusals(), *aggregator.notes()]
                self.run_summary = result.summary = recorder.finish(models.digests)
                for note in self.run_summary["notes"]:
                    logger.warning("note: %s", note)
                logger.info("files of the run: %s", self.out)
        recorder.check_silos()
        fill_metrics(result, recorder.out)
        metrics.fill(result)
        if final is None:
            logger.info("the final model is at the silos; the server never had it")
        else:
            write_statistics(config.task, layout, final.vector, self.out)
        return result, final, begin.origin, aggregator

    def summary(self) -> None:
        config, about = self.config, "FedSync %s: barrier %s, balancer %s, task %s; files in %s"
        task = f"{config.task.kind} {getattr(config.task, 'app', '')}".strip()
        logger.info(about, config.name, config.barrier.kind, config.balancer.kind, task, self.out)

    def _adjusted(self, num_rounds: int | None, timeout: float | None) -> tuple[StrategyConfig, Timeouts]:
        config, timing = self.config, self._timing
        if num_rounds is not None:
            if not isinstance(num_rounds, int) or num_rounds < 1:
                remedy = "Write a whole number, at least 1"
                raise ConfigError("FedSync.start, num_rounds", f"{num_rounds!r} is not allowed", remedy)
            config = config.model_copy(update={"stop": config.stop.model_copy(update={"rounds": num_rounds})})
        if timeout is not None:
            timing = replace(timing, order_timeout_s=timeout, order_limit_s=timeout)
        return config, timing

    def _resumed(self, run: RunBuilder) -> _Begin:
        found = resumed(self.out, run.config, run.cluster)
        return _Begin(found.origin, np.zeros(found.origin.layout.size, dtype=np.float32), found.moment)

    def _fresh(
        self, silos: Transport, run: RunBuilder, timing: Timeouts, given: ArrayRecord | None, keeper: ArrayKeeper
    ) -> _Begin:
        """Start with the given model, the task's, or else a silo's; remove the files of an earlier run."""
        config = run.config
        tensors = [(name, array.dtype, tuple(array.shape)) for name, array in (given or {}).items()]
        task = (asked := run.spec()).task.started_from(tensors)
        clear(self.out)
        for folder in (EVIDENCE, SURVEY):
            shutil.rmtree(self.out / folder, ignore_errors=True)
        (self.out / STATISTICS).unlink(missing_ok=True)
        told = asked.model_copy(update={"run": new_identity(config.name), "task": task})
        spec = self._surveyed(silos, config, timing, told).dump()
        if given is not None and task is not asked.task:
            model, layout = payloads.from_arrays(given)  # silos receive this layout with their task
            about = InitialModel(layout)
        else:
            model, about = self._first_model(silos, config, spec, timing, given)
        # Silos report a digest of frozen tensors; under encryption it is keyed, and the server lacks the key.
        frozen = about.frozen if sealing(config.cipher) is None else None
        origin = Origin(digest(config, run.cluster), spec, about.layout, about.kept, frozen, about.ties)
        return _Begin(origin, keeper.keep(model), None)

    def _first_model(
        self, silos: Transport, config: StrategyConfig, spec: str, timing: Timeouts, given: ArrayRecord | None
    ) -> tuple[Vector, InitialModel]:
        try:
            built = task_model(config)
            model, frozen = built.initial(), built.frozen_digest.hex()
            about = InitialModel(built.layout, built.parts.kept, frozen, built.ties)
            built.check_frozen(given or {}, frozen)
        except (PartsError, HugeModel):
            raise
        except ConfigError as error:
            logger.info("asking a silo for the model, because the server cannot build it: %s", error)
            model, about = ask_for_model(silos, spec, timing, self._admission, values=given is None)
        if given is not None:
            model = payloads.from_arrays(given, about.layout, about.kept, about.ties)[0]
        return model, about

    def _server_keys(self, plan: EncryptionPlan | None) -> ServerKeys | None:
        """Read the server's part of the silos' keys, which decrypts nothing; None in the clear."""
        if plan is None:
            return None
        if self._keys is None:
            problem = f"{plan.kind!r}, but the server was given no key file"
            remedy = "Name the server.json that `fedsync keys issue` wrote in the run configuration, as `keys`"
            raise ConfigError("cipher.kind", problem, remedy)
        from fedsync.cipher.keys.keywrap import read_server_file

        return read_server_file(read_input(Path(self._keys), 2**24), str(self._keys))
