"""FedSync as a Flower strategy."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedsync.config.cluster import ClusterConfig
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.core.coordinator import Coordinator
from fedsync.core.errors import ConfigError, FedSyncError
from fedsync.core.layout import Layout, Vector
from fedsync.core.transfer import DurableAggregator
from fedsync.flower import payloads
from fedsync.flower.checkpoints import KEPT, Checkpoints, Moment, Origin, clear, digest, new_identity, prepare
from fedsync.flower.driver import FlowerDriver
from fedsync.flower.first_model import ask_for_model
from fedsync.flower.nodes import Admission
from fedsync.flower.timeouts import Timeouts
from fedsync.observe.exporters.base import open_exporters
from fedsync.observe.ledger import Ledger
from fedsync.observe.recorder import Listener, Recorder
from fedsync.policies.aggregate.aggregator import PlainAggregator
from fedsync.train.weights import initial_model

if TYPE_CHECKING:
    from fedsync.cipher.plan import EncryptionPlan

logger = logging.getLogger(__name__)

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


@dataclass(frozen=True, slots=True)
class _Begin:
    """Where a run begins: its first model, or the moment from which it goes on."""

    origin: Origin
    model: Vector
    moment: Moment | None


class FedSync(Strategy):
    """Runs a FedSync configuration on a Flower grid.

    Use it in any ServerApp::

        FedSync.from_yaml("strategies/lb-bsp.yaml").start(grid, initial_arrays)

    The nodes run `fedsync.flower.client_app.app` as their ClientApp.

    Args:
        config: the strategy.
        cluster: machines that the silos emulate, by partition; None in a real federation.
        out: folder for the run's files; a new temporary one by default.
        runtime: what the summary calls this runtime.
        target_accuracy: for ``seconds_to_target``; by default that of the stop rules.
        timing: how long to wait for what; by default as the strategy's ``waiting`` says.
        listeners: called after every entry of the journal.
        keys: the server's key file, for an encrypted run.
        supervised: somebody watches over server and silos: by default the run waits without end for silos to come.
        registered: accept only nodes that are registered by name, as the SuperLink of `fedsync server` demands.
        resume: go on with the run in ``out``, from its newest checkpoint.
        checkpoints: how many of the newest to keep in ``out``; 0 writes none.
    """

    def __init__(
        self,
        config: StrategyConfig,
        cluster: ClusterConfig | None = None,
        *,
        out: Path | None = None,
        runtime: str = "flower",
        target_accuracy: float | None = None,
        timing: Timeouts | None = None,
        listeners: Sequence[Listener] = (),
        keys: Path | None = None,
        supervised: bool = False,
        registered: bool = False,
        resume: bool = False,
        checkpoints: int = KEPT,
    ) -> None:
        self.config = config
        self.cluster = cluster
        self.out = out if out is not None else Path(tempfile.mkdtemp(prefix="fedsync-"))
        self.run_summary: dict[str, Any] | None = None
        self._runtime = runtime
        self._target_accuracy = config.stop.target_accuracy if target_accuracy is None else target_accuracy
        self._timing = timing or Timeouts.of(config.waiting, supervised=supervised)
        self._listeners = listeners
        self._keys = keys
        self._admission = Admission(config.silos, registered)
        self._resume = resume
        self._checkpoints = checkpoints

    @classmethod
    def from_yaml(cls, name: str | Path, overrides: Sequence[str] = (), **options: Any) -> FedSync:
        """Strategy from a YAML file.

        Args:
            name: path of a file, or name of a shipped strategy.
            overrides: ``a.b=value`` assignments.
            options: as the constructor's.

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
        **unused: Any,
    ) -> Result:
        """Run the strategy to its end.

        Args:
            grid: of the ServerApp.
            initial_arrays: model to start from; by default the task's own, from the seed.
            num_rounds: overrides ``stop.rounds``.
            timeout: seconds after which an order without an update has failed; by default as ``waiting`` says.
            train_config: not used: orders carry what silos need.
            evaluate_config: not used.
            evaluate_fn: called at the server with every version and its arrays, from version 0 on.
            unused: what later versions of Flower pass.

        Returns:
            Final arrays, none of an encrypted run; training and evaluation metrics by version.

        Raises:
            RunError: the run could not reach its end.
            ConfigError: strategy and silos do not fit together, or there is nothing to resume from.
        """
        config, timing = self._adjusted(num_rounds, timeout)
        self.summary()
        begin = self._resumed(config) if self._resume else self._fresh(grid, config, timing, initial_arrays)
        layout, spec = begin.origin.layout, RunSpec.parse(begin.origin.spec)
        plan = spec.encryption_plan(layout)
        if plan is not None and evaluate_fn is not None:
            raise ConfigError("evaluate_fn", "the server of an encrypted run has no model", "Evaluate at the silos")
        policies = config.policies(self._silos)
        plain = PlainAggregator(begin.model, keep_bases=policies.weigher.toward)
        initial = None if initial_arrays is None else begin.model
        aggregator: DurableAggregator = plain if plan is None else self._encrypted_aggregator(plan, initial)
        coordinator = Coordinator(policies)
        if begin.moment is not None:
            coordinator.restore(begin.moment.coordinator)
            aggregator.restore(begin.moment.aggregator)
        result = Result()

        def after_commit(version: int) -> None:
            metrics = evaluate_fn(version, payloads.to_arrays(plain.model, layout)) if evaluate_fn else None
            if metrics is not None:
                result.evaluate_metrics_serverapp[version] = metrics

        if begin.moment is None:
            after_commit(0)
        recorder = self._recorder(config, layout.nbytes, 0.0 if plan is None else plan.share)
        checkpoints = (
            Checkpoints(self.out, begin.origin, self._checkpoints, begin.moment) if self._checkpoints else None
        )
        driver = FlowerDriver(
            grid,
            coordinator,
            aggregator,
            layout,
            begin.origin.spec,
            recorder,
            timing,
            report_s=config.report_s,
            after_commit=after_commit,
            sealed=plan is not None,
            admission=self._admission,
            checkpoints=checkpoints,
            resumed=begin.moment,
        )
        try:
            driver.run()
            if plan is None:
                result.arrays = payloads.to_arrays(plain.model, layout)
            else:
                logger.info("the final model is at the silos; the server never had it")
        finally:
            self.run_summary = recorder.finish()
        _fill_metrics(result, recorder.ledger)
        return result

    def summary(self) -> None:
        """Log what is about to run."""
        logger.info(
            "FedSync %s: barrier %s, balancer %s, files in %s",
            self.config.name,
            self.config.barrier.kind,
            self.config.balancer.kind,
            self.out,
        )

    @property
    def _silos(self) -> int | None:
        """How many there are, where that is known."""
        return len(self.cluster.silos) if self.cluster is not None else None

    @property
    def _machines(self) -> list[dict[str, Any]] | None:
        """What silos emulate, as it is written down."""
        return None if self.cluster is None else [silo.model_dump(mode="json") for silo in self.cluster.silos]

    def _adjusted(self, num_rounds: int | None, timeout: float | None) -> tuple[StrategyConfig, Timeouts]:
        """Configuration and timing with what `start` was told."""
        config, timing = self.config, self._timing
        if num_rounds is not None:
            config = config.model_copy(update={"stop": config.stop.model_copy(update={"rounds": num_rounds})})
        if timeout is not None:
            timing = replace(timing, order_timeout_s=timeout, order_limit_s=timeout)
        return config, timing

    def _resumed(self, config: StrategyConfig) -> _Begin:
        """From the newest checkpoint; the store's state brings the model."""
        found = prepare(self.out, digest(config, self._machines))
        return _Begin(found.origin, np.zeros(found.origin.layout.size, dtype=np.float32), found.moment)

    def _fresh(self, grid: Grid, config: StrategyConfig, timing: Timeouts, given: ArrayRecord | None) -> _Begin:
        """From version 0; what is left of another run goes."""
        spec = RunSpec.of(config, self.cluster, self._silos or config.shares)
        spec = spec.model_copy(update={"run": new_identity()})
        clear(self.out)
        model, layout = self._first_model(grid, config, spec, given, timing)
        return _Begin(Origin(digest(config, self._machines), spec.dump(), layout), model, None)

    def _first_model(
        self, grid: Grid, config: StrategyConfig, spec: RunSpec, given: ArrayRecord | None, timing: Timeouts
    ) -> tuple[Vector, Layout]:
        """Version 0: the one given, the task's own, or that of a silo where the task needs data to build it."""
        if given is None:
            try:
                return initial_model(config.task.build(), config.seed)
            except ConfigError as error:
                logger.info("asking a silo for the model, for the server cannot build it: %s", error)
                return ask_for_model(grid, spec.dump(), timing, self._admission)
        layout = payloads.layout_of(given)
        return payloads.from_arrays(given, layout, "initial_arrays"), layout

    def _encrypted_aggregator(self, plan: EncryptionPlan, initial: Vector | None) -> DurableAggregator:
        """Adds what silos seal; ``initial`` is version 0 where silos cannot build it."""
        if self._keys is None:
            raise ConfigError(
                "cipher.kind",
                f"{plan.kind!r}, but the server was given no key file",
                "Name the server.json that `fedsync keys issue` wrote in the run configuration, as `keys`",
            )
        from fedsync.cipher.keys.keywrap import read_server_file
        from fedsync.cipher.server.aggregator import EncryptedAggregator

        return EncryptedAggregator(plan, read_server_file(self._keys.read_bytes(), str(self._keys)), initial)

    def _recorder(self, config: StrategyConfig, model_bytes: int, sealed_share: float) -> Recorder:
        plain = config.model_dump(mode="json")
        return Recorder(
            self.out,
            runtime=self._runtime,
            config=plain,
            silos=self._machines,
            model_bytes=model_bytes,
            target_accuracy=self._target_accuracy,
            sealed_share=sealed_share,
            listeners=self._listeners,
            exporters=open_exporters(config.export, self.out, {**plain, "runtime": self._runtime}),
            resume=self._resume,
        )

    # The steps of Flower's own loop. FedSync has a loop of its own, in which there is no moment at
    # which all messages of a round are made, or all replies are there.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Not a step of FedSync's loop; raises `FedSyncError`."""
        _refuse()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Not a step of FedSync's loop; raises `FedSyncError`."""
        _refuse()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Not a step of FedSync's loop; raises `FedSyncError`."""
        _refuse()

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Not a step of FedSync's loop; raises `FedSyncError`."""
        _refuse()


def _refuse() -> NoReturn:
    raise FedSyncError("FedSync drives its own loop: call start(), not the steps of Flower's round")


def _fill_metrics(result: Result, ledger: Ledger) -> None:
    for row in ledger.rounds:
        result.train_metrics_clientapp[row.round] = MetricRecord(
            {"train_loss": row.loss, "seconds": row.seconds, "silos": len(row.silos)}
        )
        if row.accuracy is not None and row.test_loss is not None:
            result.evaluate_metrics_clientapp[row.round] = MetricRecord(
                {"accuracy": row.accuracy, "loss": row.test_loss}
            )
