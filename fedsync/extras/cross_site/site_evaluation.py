"""Evaluation of models on silos' test data after a run, for ``fedsync evaluate``.

A machine with all data evaluates every silo of a run, with the data that the run assigned to the silo. A real silo
evaluates on its own data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedsync.common import foreign
from fedsync.common.errors import ConfigError, ProtocolError
from fedsync.common.names import near_miss
from fedsync.config.cluster import ClusterConfig
from fedsync.config.run_spec import RunSpec
from fedsync.config.silo_start import SiloStartConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.config.tasks.clientapp_task import ClientAppConfig
from fedsync.core.orders import Cursor, Split, Subject
from fedsync.extras.cross_site.cross_site_matrix import Matrix, ModelRow
from fedsync.extras.cross_site.own_models import OwnModels
from fedsync.extras.surveys.opened_survey import open_survey, surveyed
from fedsync.silo.owner.owner_policy import OwnerPolicy, act_for_owner
from fedsync.silo.protocol import STATE_FOLDER, Identity
from fedsync.silo.room.process import TrainingProcess
from fedsync.silo.room.process_start import room_folder
from fedsync.silo.session.silo_setup import local_trainer
from fedsync.simulation.run import surveyed_again
from fedsync.train.module_parts import packed
from fedsync.train.silo_trainer import SiloTrainer
from fedsync.train.weights import load_for, read_state

if TYPE_CHECKING:
    from torch import Tensor

logger = foreign.logger(__name__)

_FOUND = {"best.pt": Subject.BEST, "last.pt": Subject.LAST}
_OLDER = "model.pt"
_MOST_NAMED = 3
_UNTRAINED = (
    "the private tensors (%s) are those of the model's file: the files of a run's folder have them untrained, so "
    "scores differ from the run's"
)


@dataclass(frozen=True, slots=True)
class Site:
    """A silo whose data are on this machine."""

    name: str
    spec: RunSpec
    identity: Identity
    folder: Path | None = None
    owner: OwnerPolicy | None = None

    @contextmanager
    def trainer(self) -> Iterator[SiloTrainer]:
        """Yield the trainer for the silo's evaluations; in a room, where the owner's rules confine training. Raises
        `ConfigError` if task or data are not on this machine, and `UserCodeError` if the user's training code raised an
        error.
        """
        if self.owner is None or not self.owner.confines:
            yield local_trainer(self.spec, self.identity)
            return
        with room_folder() as folder:
            trainer = TrainingProcess(self.identity, self.spec, self.owner, folder)
            try:
                yield trainer
            finally:
                trainer.end()


def sites_of_run(folder: Path, names: Sequence[str]) -> list[Site]:
    """Return the silos of a run, restricted to ``names`` unless empty. Raises `ConfigError` if the folder has no run,
    or the run has no silo of a name.
    """
    if not (folder / "config.yaml").is_file():
        raise ConfigError(str(folder), "no run: config.yaml is not there", "Name the folder of a run")
    config = StrategyConfig.load(folder / "config.yaml")
    cluster = ClusterConfig.load(folder / "silos.yaml") if (folder / "silos.yaml").is_file() else None
    if cluster is None:
        known = config.silos or [f"silo-{index}" for index in range(config.shares)]
    else:  # a silo's data follow from its place in this file; ``silos`` of the strategy may have another order, or more
        known = [silo.name for silo in cluster.silos]
    spec = RunSpec.of(config, cluster, len(known))
    for name in names:
        if name not in known:
            raise ConfigError("--silo", f"the run has no silo {name!r}", near_miss(name, known))
    if cluster is not None:
        spec = surveyed_again(config, cluster, spec)
    return [
        Site(name, spec, Identity(spec.dump(), index, name, resources=False))
        for index, name in enumerate(known)
        if not names or name in names
    ]


def site_here(file: Path, run: str | None = None) -> Site:
    """Return a real silo as it took part in a run, by default the newest run. Raises `ConfigError` if the silo took
    part in no such run, or its owner does not allow reading the run's files.
    """
    config = SiloStartConfig.load(file)
    found: list[tuple[float, Identity, RunSpec, Path]] = []
    for folder in (Path(config.state) / STATE_FOLDER).glob("*"):
        try:
            identity, used_s = Identity.load(folder), folder.stat().st_mtime
            spec = RunSpec.parse(identity.spec)
        except (OSError, ValueError, ProtocolError):  # the folder is still empty, or from another version of FedSync
            continue
        if run in (None, spec.run):
            found.append((used_s, identity, spec, folder))
    if not found:
        problem = f"no run has files in {config.state}" if run is None else f"no run {run!r} was here"
        raise ConfigError("fedsync evaluate", problem, "Evaluate where the silo took part in a run")
    _, identity, spec, folder = max(found, key=lambda each: each[0])
    owner = act_for_owner(config, identity)
    if spec.survey is not None and config.keys is not None:
        from fedsync.cipher.keys.keyring import open_ring

        sums = open_survey(spec.survey, identity, open_ring(Path(config.keys)), owner)
        spec = surveyed(spec, sums, None)
    return Site(config.name, owner.checked(spec, identity.index), identity, folder, owner)


def models_of_run(folder: Path) -> list[tuple[ModelRow, Path]]:
    """Return a run's model files: best and last, or else ``model.pt``; `ConfigError` if there is none."""
    names = [name for name in _FOUND if (folder / name).is_file()] or [_OLDER]
    if not (folder / names[0]).is_file():
        remedy = "Name a model: --model FILE; of an encrypted run, `fedsync silo export` writes one"
        raise ConfigError(str(folder), "the run has left no model", remedy)
    return [(ModelRow(_FOUND.get(name, Subject.LAST)), folder / name) for name in names]


def evaluate(sites: Sequence[Site], models: Sequence[tuple[ModelRow, Path]]) -> Matrix:
    """Evaluate each model at each site, and each silo's own models at their site.

    Private tensors are those of a model's file, which a run writes untrained: a warning says so. Raises `ConfigError`
    if a file does not fit the task, or the data are not on this machine.
    """
    spec = sites[0].spec
    matrix = Matrix([site.name for site in sites], spec.evaluation.built(spec.task))
    for site in sites:
        with site.trainer() as trainer:
            facts, own = trainer.facts, OwnModels(site.folder)
            if facts.private_names and models and site is sites[0]:
                logger.warning(_UNTRAINED, ", ".join(facts.private_names[:_MOST_NAMED]))
            for model, file in models:
                private = {name: each for name, each in read_state(file).items() if name in facts.private_names}
                loaded = load_for(facts, file), Cursor(private=_packed(spec, private))
                matrix.cells[model, site.name] = trainer.judge(*loaded, Split.TEST, model.subject, gains=True)
            for subject in own.subjects:
                found = trainer.judge(*own.model(subject), Split.TEST, subject, gains=True)
                matrix.cells[ModelRow(subject, site.name), site.name] = found
    return matrix


def _packed(spec: RunSpec, private: Mapping[str, Tensor]) -> bytes:
    """Serialise private tensors as the trainer of the run's task keeps them."""
    if not isinstance(spec.task, ClientAppConfig):
        return packed(private)
    from fedsync.train.guests.guest_clientapp import packed_private

    return packed_private({name: each.numpy() for name, each in private.items()})
