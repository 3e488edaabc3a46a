"""Builder of a run's policies, aggregator and recorder, for simulated and real runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedsync.common.run_claim import EVIDENCE
from fedsync.config.cipher import sealing
from fedsync.config.cluster import ClusterConfig
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.core.journal import JOURNAL, read_journal
from fedsync.core.state import Policies
from fedsync.model.chunked_arrays import ArrayKeeper
from fedsync.model.layout import Layout, Vector
from fedsync.model.plain_aggregator import PlainAggregator
from fedsync.model.running_statistics import fitted, statistics_of
from fedsync.model.transfer import DurableAggregator
from fedsync.observe.ledger import KEPT_ROUNDS
from fedsync.observe.recorder import Exporter, Listener, Recorder

if TYPE_CHECKING:
    from fedsync.cipher.keys.keywrap import ServerKeys
    from fedsync.cipher.plan import EncryptionPlan


def measuring(config: StrategyConfig) -> StrategyConfig:
    """Fill in the default metrics, for server, silos and replays; `ConfigError` if metrics and task do not fit."""
    return config.model_copy(update={"evaluation": config.evaluation.of_task(config.task)})


@dataclass(frozen=True, slots=True)
class RunBuilder:
    """Builder of one run.

    ``cluster`` has the silos' emulated machines; None in a real federation. ``target_accuracy`` is for
    ``seconds_to_target``; None uses that of the stop rules. ``trains`` is False in simulations of time only.
    """

    config: StrategyConfig
    cluster: ClusterConfig | None
    out: Path
    runtime: str
    target_accuracy: float | None = None
    listeners: Sequence[Listener] = ()
    trains: bool = True

    def policies(self) -> Policies:
        silos = None
        if self.cluster is not None:
            # Only simulated machines can join late; real processes that emulate machines start with the run.
            silos = self.cluster.at_start if self.runtime == "virtual" else len(self.cluster.silos)
        policies = self.config.policies(silos)
        # Without training there are no models to compare.
        return policies if self.trains else replace(policies, cross_site=None)

    def spec(self) -> RunSpec:
        if self.cluster is not None:
            self.config.check_silos([silo.name for silo in self.cluster.silos])
        silos = self.config.shares if self.cluster is None else len(self.cluster.silos)
        return RunSpec.of(self.config, self.cluster, silos)

    def aggregator(
        self,
        layout: Layout,
        model: Vector,
        policies: Policies,
        plan: EncryptionPlan | None,
        keys: ServerKeys | None,
        given: Vector | None = None,
        run: str = "",
        keeper: ArrayKeeper | None = None,
    ) -> DurableAggregator:
        """Build the aggregator, encrypted if ``plan`` and ``keys`` are given.

        ``model`` is version 0, float32 [values], if updates are plain; ``given`` is version 0 for encrypted runs whose
        silos cannot build it. Without the identity ``run``, as in virtual time, no evidence of single updates is kept.
        ``keeper`` stores plain models and updates; None keeps them in memory.
        """
        if plan is None or keys is None:
            chosen = self.config.server_optimizer
            optimizer = None if chosen is None else chosen.build().fitted(layout)
            combiner = self.config.aggregation.combiner()
            wire, statistics = fitted(self.config.wire.formats, layout), statistics_of(layout)
            return PlainAggregator(
                model, wire=wire, keeper=keeper, optimizer=optimizer, combiner=combiner, statistics=statistics
            )
        from fedsync.cipher.server.sealed_aggregator import SUMS, EncryptedAggregator

        sealed, evidence = sealing(self.config.cipher), None
        if run and sealed is not None and sealed.kept_versions:
            from fedsync.extras.tracing.evidence import Evidence

            evidence = Evidence(self.out / EVIDENCE, run, sealed.kept_versions, sealed.kept_bytes)
        # Virtual runs keep sums in memory: many runs may be active at once, and models are small.
        return EncryptedAggregator(plan, keys, given, evidence, self.out / SUMS if run else None)

    def recorder(
        self, model_bytes: int, plan: EncryptionPlan | None = None, *, journal: bool = True, resume: bool = False
    ) -> Recorder:
        config, target = self.config.model_dump(mode="json"), self.target_accuracy
        if target is None and resume:  # a resumption need not repeat the target
            target = read_journal(self.out / JOURNAL)[0].get("target_accuracy")
        elif target is None and self.trains:
            target = self.config.stop.target_accuracy
        exporters: Sequence[Exporter] = ()
        if self.config.export is not None:
            from fedsync.extras.exporters.exporter_base import open_exporters

            exporters = open_exporters(self.config.export, self.out, {**config, "runtime": self.runtime})
        recorder = Recorder(
            self.out,
            runtime=self.runtime,
            config=config,
            silos=None if self.cluster is None else self.cluster.entries(),
            model_bytes=model_bytes,
            target_accuracy=target,
            sealed_share=0.0 if plan is None else plan.sealed.size / max(plan.layout.size, 1),
            listeners=(*self.listeners, *(own for each in self.config.extensions or () if (own := each.listened()))),
            exporters=exporters,
            journal=journal,
            resume=resume,
            metrics=self.config.evaluation.built(self.config.task) if self.trains else (),
            keep=None if self.runtime == "virtual" else KEPT_ROUNDS,
        )
        recorder.ledger.lost.evaluates = self.trains
        recorder.ledger.lost.sealed = plan is not None and plan.seal_metrics
        return recorder
