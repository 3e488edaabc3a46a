"""Runner of simulations in virtual time: from the configuration to the files of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from fedsync.common.errors import ConfigError, OwnerRefusal, ProtocolError, RunError, UserCodeError
from fedsync.common.run_claim import Claim, claimed
from fedsync.config.cipher import PlainConfig
from fedsync.config.cluster import ClusterConfig
from fedsync.config.run_spec import RunSpec
from fedsync.config.sections.survey import survey_of
from fedsync.config.strategy import StrategyConfig
from fedsync.core.coordinator import Coordinator
from fedsync.model.layout import Layout, Vector
from fedsync.model.plain_aggregator import PlainAggregator
from fedsync.model.tensor_parts import CommonForm
from fedsync.model.transfer import Aggregator, Replica
from fedsync.observe.quality.kept_models import KeptModels
from fedsync.observe.quality.survey_report import FOLDER, after_survey, write_statistics
from fedsync.observe.recorder import Listener
from fedsync.observe.run_builder import RunBuilder, measuring
from fedsync.silo.owner.privacy_ledger import spent_by
from fedsync.silo.owner.refusals import code_of, explained, explained_together, explained_too_few
from fedsync.silo.protocol import Identity, Refusal, Refused
from fedsync.silo.session.session import SiloSession
from fedsync.simulation.engine import Stuck, VirtualDriver
from fedsync.simulation.machine import Machine

if TYPE_CHECKING:
    from fedsync.cipher.keys.keyring import Ring
    from fedsync.cipher.keys.keywrap import ServerKeys


def run_virtual(
    config: StrategyConfig,
    cluster: ClusterConfig,
    out: Path | Claim,
    *,
    target_accuracy: float | None = None,
    listeners: Sequence[Listener] = (),
    poll_s: float = 0.0,
) -> dict[str, Any]:
    """Run a strategy on simulated machines with real training, and with real keys under encryption; return the summary.

    ``target_accuracy`` is for ``seconds_to_target``, by default the stop rules' target. For ``poll_s`` see
    `VirtualDriver`. Raises `ConfigError` if strategy and silos do not fit together, `RunError` if the run could not
    reach its end.
    """
    keys, rings = _keys(config, cluster)
    with claimed(out) as folder:
        builder = RunBuilder(measuring(config), cluster, folder, "virtual", target_accuracy, listeners)
        spec = _surveyed(config, cluster, builder.spec(), folder, keys, rings)
        done = _drive(builder, spec, keys, rings, poll_s)
        write_statistics(config.task, done.layout, done.model, folder)
        return done.summary


def surveyed_again(config: StrategyConfig, cluster: ClusterConfig, spec: RunSpec) -> RunSpec:
    """Return a run's specification with the survey repeated on local data; raises `ConfigError` if data are absent."""
    plain = config.model_copy(update={"cipher": PlainConfig(kind="plain")})
    with TemporaryDirectory() as folder:
        return _surveyed(plain, cluster, spec, Path(folder), None, {})


def _surveyed(
    config: StrategyConfig,
    cluster: ClusterConfig,
    spec: RunSpec,
    out: Path,
    keys: ServerKeys | None,
    rings: Mapping[str, Ring],
) -> RunSpec:
    survey = survey_of(config, cluster.at_start)
    if survey is None:
        return spec
    before = RunBuilder(survey, cluster, out / FOLDER, "virtual")
    asked = before.spec()
    done = _drive(before, asked, keys, rings)
    return after_survey(spec, asked.dump(), done.layout, done.aggregator, out)


@dataclass(frozen=True, slots=True)
class _Done:
    layout: Layout
    aggregator: Aggregator
    model: Vector
    summary: dict[str, Any]


def _drive(
    builder: RunBuilder, spec: RunSpec, keys: ServerKeys | None, rings: Mapping[str, Ring], poll_s: float = 0.0
) -> _Done:
    cluster, config, out = builder.cluster, builder.config, builder.out
    workers, refused = _sessions(spec, config.quorum(None if cluster is None else cluster.at_start), rings)
    first = next(iter(workers.values()))
    policies, plan = builder.policies(), spec.encryption_plan(first.layout)
    given = None
    if config.initial_model is not None:
        from fedsync.train.weights import load_for

        given = load_for(first.trainer_facts, Path(config.initial_model))
    begin = first.initial_model() if given is None else given
    aggregator = builder.aggregator(first.layout, begin, policies, plan, keys, given)
    recorder = builder.recorder(first.layout.nbytes, plan)
    machines = {silo.name: Machine(silo, config.seed) for silo in spec.emulate}
    driver = VirtualDriver(Coordinator(policies), aggregator, machines, workers, recorder, poll_s)
    models, last = KeptModels(out, first.save_model), None
    replicas = {name: each.replica for name, each in workers.items()}
    try:
        driver.run()
        last = final_model(aggregator, replicas)
    except RunError as error:
        last = final_model(aggregator, replicas) if recorder.ledger.rounds else None  # what it has learnt
        if isinstance(error, Stuck):
            raise error.naming(recorder.ledger.missing()) from error
        raise
    finally:
        best = best_model(aggregator, replicas)
        if recorder.ledger.best is not None and best is not None:
            models.keep(recorder.ledger.best, best)
        recorder.ledger.notes += [f"took no part: {explained(name, why)}" for name, why in refused.items()]
        recorder.ledger.notes += aggregator.notes()
        try:
            models.finish(last)
        finally:  # the summary is small enough to write even if the disk has no space for a model
            summary = recorder.finish(models.digests, spent_by(each.tally for each in workers.values()))
    recorder.check_silos()
    return _Done(first.layout, aggregator, last, summary)


def _sessions(
    spec: RunSpec, needed: int, rings: Mapping[str, Ring]
) -> tuple[dict[str, SiloSession], dict[str, Refused]]:
    """Return the sessions of silos that take part, and the answers of silos that refuse the run, by name. Raises
    `RunError` if fewer than ``needed`` take part; `ConfigError` if no owner but the user's input is the reason.
    """
    text, workers, errors = spec.dump(), dict[str, SiloSession](), dict[str, ConfigError | UserCodeError]()
    for index, silo in enumerate(spec.emulate):
        try:
            identity = Identity(text, index, silo.name, resources=False)
            workers[silo.name] = SiloSession(identity, spec, rings.__getitem__)
        except (ConfigError, UserCodeError) as error:
            errors[silo.name] = error
    other = _of_other_form(workers)
    workers = {name: worker for name, worker in workers.items() if name not in other}
    refused = {name: Refused(code_of(error), str(error)) for name, error in errors.items()}
    refused |= {name: Refused(Refusal.CONFIG, str(error)) for name, error in other.items()}
    if not refused or len(workers) >= needed:
        return workers, refused
    owners = any(isinstance(error, OwnerRefusal) for error in errors.values())
    if not (workers or owners) and len(set(refused.values())) == 1:  # a mistake of the run and of no silo
        raise next(iter(errors.values()))
    alike = not workers and len({each.code for each in refused.values()}) == 1
    told = explained_together(refused) if alike else explained_too_few(refused, needed, len(workers))
    if all(isinstance(error, ConfigError) for error in errors.values()) and not owners:
        raise ConfigError("silos", told, "Correct what they name, or write a lower min_silos")
    raise RunError(told)


def _of_other_form(workers: Mapping[str, SiloSession]) -> dict[str, ProtocolError]:
    found, form = dict[str, ProtocolError](), None
    for name, worker in workers.items():
        form = form or CommonForm(worker.layout, worker.form.frozen)
        try:
            form.check(name, worker.form)
        except ProtocolError as error:
            found[name] = error
    return found


def best_model(aggregator: Aggregator, replicas: Mapping[str, Replica]) -> Vector | None:
    return aggregator.best if isinstance(aggregator, PlainAggregator) else _newest(replicas).best_model


def final_model(aggregator: Aggregator, replicas: Mapping[str, Replica]) -> Vector:
    return aggregator.model if isinstance(aggregator, PlainAggregator) else _newest(replicas).model


def _newest(replicas: Mapping[str, Replica]) -> Replica:
    return max(replicas.values(), key=lambda replica: replica.holds)


def _keys(config: StrategyConfig, cluster: ClusterConfig) -> tuple[ServerKeys | None, dict[str, Ring]]:
    if config.cipher.kind == "plain":
        return None, {}
    from fedsync.cipher.keys.authority import emulated_rings

    return emulated_rings([silo.name for silo in cluster.silos], config.seed)
