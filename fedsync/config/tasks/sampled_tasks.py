"""Configuration of tasks on samples from a source: networks, linear models, and expectation maximisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from fedsync.common.errors import ConfigError
from fedsync.config.sections.section import Scores, Section
from fedsync.config.training import LocalConfig
from fedsync.core.weighting import Solver
from fedsync.model.tensor_parts import UNSAID, PartPatterns
from fedsync.policies.schema import Chosen, NonNegative, Positive, PositiveInt
from fedsync.tasks.partition import Iid, Own, Partition
from fedsync.tasks.samples import Source

if TYPE_CHECKING:
    from fedsync.client.app import Silo
    from fedsync.tasks.neural import LinearTask
    from fedsync.tasks.task_protocol import Task
    from fedsync.train.local_trainer import LocalTrainer, ModelKeeper
    from fedsync.train.options import LocalOptions

Share = Annotated[float, Field(gt=0, lt=1)]

DEALT = ("iid", "dirichlet", "dual-dirichlet", "pathological", "shards")
"""Kinds of partitions for any data."""

_IMAGES, _SEQUENCES, _ROWS = ("digits28", "idx", "cifar", "femnist"), ("keywords", "speech"), ("libsvm", "table")
AnyData = Annotated[Source, Chosen("data", among=("blobs", "sparse", *_ROWS, "npz", *_IMAGES, *_SEQUENCES))]

Tensor = tuple[str, str, tuple[int, ...]]
"""Name, NumPy data type and shape of one array of a model."""


class TaskSection(Section):
    """Base of all tasks."""

    own_loop: ClassVar[bool] = False
    """Whether the task brings its own training loop, so that only silos know its model."""

    deals_data: ClassVar[bool] = True
    """Whether a silo's number selects its share of the data; then there are at most as many silos as shares."""

    @property
    def libraries(self) -> tuple[str, ...]:
        """Modules that trainers import late and that load slowly; the trainers of one machine can share them."""
        return ()

    def solver(self, local: LocalConfig) -> Solver:
        """Return the effect of local steps, for aggregation that normalises updates."""
        return Solver(local.sgd_momentum, local.learning_rate * local.proximal)

    def build(self) -> Task:
        """Return model and data; raises `ConfigError` if they cannot be built at this machine."""
        raise NotImplementedError

    def build_by_row(self) -> Task:
        """Return model and data for a private run, in which no row may affect how another row is read."""
        return self.build()

    def look(self, data: Mapping[str, Mapping[str, str]], seed: int) -> list[str]:
        """Return notes for the operator on the data of emulated silos, by silo and name, before a run.

        Raises `ConfigError` if a silo's data cannot be read, or differ in meaning from the data of other silos.
        """
        return []

    def own(self, index: int, silos: int) -> Self:
        """Return the task for silo ``index`` of ``silos``, without others' files; `ConfigError` if files do not fit."""
        return self

    def emulated(self, data: Mapping[str, Mapping[str, str]]) -> Self:
        """Return the task of emulated silos, with the path of each data name; `ConfigError` if a silo has none."""
        return self

    def relocated(self, locate: Callable[[str], str]) -> Self:
        return self

    def started_from(self, tensors: Sequence[Tensor]) -> Self:
        return self

    def trainer(self, site: Silo, slots: int, options: LocalOptions, run: PartPatterns = UNSAID) -> LocalTrainer:
        """Return the trainer of a silo, one of ``slots`` sharing the data; ``run`` chooses the tensors that travel."""
        from fedsync.tasks.task_protocol import SiloSlot
        from fedsync.train.loop import Trainer

        slot = SiloSlot(site.name, site.index, slots, site.seed)
        if options.private:
            from fedsync.train.dp_sgd.private_trainer import PrivateTrainer

            return PrivateTrainer(self.build_by_row(), slot, options, run)
        if options.processes == 1:
            return Trainer(self.build(), slot, options, run)
        from fedsync.train.processes.group import GroupTrainer

        return GroupTrainer(self.build, slot, options, run)

    def keeper(self, site: Silo, slots: int, options: LocalOptions, run: PartPatterns = UNSAID) -> ModelKeeper:
        """Return an object that knows the model's form and writes models to files, consistent with `trainer`."""
        from fedsync.tasks.task_protocol import SiloSlot
        from fedsync.train.weights import TaskModel

        task = self.build_by_row() if options.private else self.build()
        task.table(SiloSlot(site.name, site.index, slots, site.seed))  # the form of the model may depend on the table
        return TaskModel(task, site.seed, run)


class OwnLoopSection(TaskSection):
    """Base of tasks with a training loop of their own, so that only silos know the model."""

    own_loop: ClassVar[bool] = True
    scores: ClassVar[Scores] = "any"
    libraries: ClassVar[tuple[str, ...]] = ("torch._dynamo",)
    """Modules that PyTorch imports with the first optimizer of a foreign loop; see `fedsync.train.options`."""

    deals_data: ClassVar[bool] = False
    kind: str

    def build(self) -> Task:
        problem = "it has a training loop of its own, and its model is where that is, at the silos"
        remedy = "Ask a silo for the model, or try a run in virtual time. "
        remedy += "How fast silos are, a run says, not fedsync probe"
        raise ConfigError(f"task.kind {self.kind}", problem, remedy)

    def keeper(self, site: Silo, slots: int, options: LocalOptions, run: PartPatterns = UNSAID) -> ModelKeeper:
        return self.trainer(site, slots, options, run)


class SourceSection(TaskSection):
    """Base of tasks on samples from a source."""

    kind: str
    data: Annotated[Source, Chosen("data")]
    """Source of the samples."""

    partition: Annotated[Partition | Own, Chosen("partition", among=(*DEALT, "natural", "own"))] = Field(
        default_factory=Iid
    )
    """Distribution of one data set among silos."""

    test_share: Share = 0.2
    """Share held out for tests, if the data have no separate test samples."""

    validation: Share | None = None
    """Share of a silo's training samples that is held out to evaluate rounds; the test samples are then used only once,
    at the end. None: the test samples evaluate every round."""

    @model_validator(mode="after")
    def _silos_differ(self) -> Self:
        if isinstance(self.partition, Own) and not self.data.paths:
            raise ValueError(
                f"partition.kind own gives every silo the same samples, for {self.data.kind} are generated; "
                "choose another partition"
            )
        return self

    @property
    def scores(self) -> Scores:
        return "share"

    @property
    def libraries(self) -> tuple[str, ...]:
        return self.data.libraries

    def source(self) -> tuple[Source, Partition | None, float, float | None]:
        """Return source, partition, test share and validation share."""
        dealt = None if isinstance(self.partition, Own) else self.partition
        return self.data, dealt, self.test_share, self.validation

    def relocated(self, locate: Callable[[str], str]) -> Self:
        return self.model_copy(update={"data": self.data.relocated(locate)})


class ImagesConfig(SourceSection):
    """Image classification with LeNet-5, a small CNN with two convolutions, or a residual network."""

    kind: Literal["images"]
    data: Annotated[Source, Chosen("data", among=(*_IMAGES, "npz"))]
    """Source of the images."""

    model: Literal["lenet5", "cnn", "resnet20", "resnet32"] = "lenet5"
    """Name of the network."""

    norm: Literal["group", "batch"] = "group"
    """Normalisation in ``cnn`` and the residual networks. Batch norm uses statistics of a silo's own batches, which
    differ between silos that hold different classes."""

    def build(self) -> Task:
        from fedsync.tasks.neural import ImagesTask

        return ImagesTask(*self.source(), self.model, self.norm)


class SequencesConfig(SourceSection):
    """Classification of sequences with an LSTM."""

    kind: Literal["sequences"]
    data: Annotated[Source, Chosen("data", among=(*_SEQUENCES, "npz"))]
    """Source of the sequences."""

    hidden: PositiveInt = 64
    """Width of a recurrent layer."""

    layers: PositiveInt = 2
    """Number of recurrent layers."""

    def build(self) -> Task:
        from fedsync.tasks.neural import SequencesTask

        return SequencesTask(*self.source(), self.hidden, self.layers)


class MlpConfig(SourceSection):
    """Classification of any data with dense layers."""

    kind: Literal["mlp"]
    data: AnyData
    hidden: list[PositiveInt] = Field(default_factory=lambda: [64])
    """Widths of the hidden layers, first to last."""

    def build(self) -> Task:
        from fedsync.tasks.neural import MlpTask

        return MlpTask(*self.source(), tuple(self.hidden))


class LinearConfig(SourceSection):
    """Linear model, trained by mini-batch SGD. With ``squared``, accuracy is minus the mean squared error."""

    kind: Literal["linear"]
    data: AnyData
    loss: Literal["logistic", "hinge", "squared"] = "logistic"
    """Loss: ``logistic`` regression, ``hinge`` for a linear SVM, ``squared`` for lasso (with ``l1``) and ridge
    regression (with ``l2``)."""

    l1: NonNegative = 0.0
    """Strength of the L1 penalty."""

    l2: NonNegative = 0.0
    """Strength of the L2 penalty; half of it times the squared norm is added to the loss."""

    @property
    def scores(self) -> Scores:
        """Share of right answers, or minus the mean squared error."""
        return "error" if self.loss == "squared" else "share"

    def build(self) -> LinearTask:
        from fedsync.tasks.neural import LinearTask

        return LinearTask(*self.source(), self.loss, self.l1, self.l2)

    def build_by_row(self) -> Task:
        return replace(self.build(), by_row=True)


class StatisticsSection(SourceSection):
    """Base of tasks whose model is a vector of statistics: silos add statistics, and every user does the M-step.

    These tasks need plain SGD. ``learning_rate`` is the share of the statistics that a batch renews; 1 renews all.
    Accuracy is minus the test loss.
    """

    spread: Positive = 1.0
    """Standard deviation of the random initial groups around 0."""

    scores: ClassVar[Scores] = "error"
    """Minus the test loss."""

    def solver(self, local: LocalConfig) -> Solver:
        """Return the solver; its pull adds ``learning_rate`` (the step) and ``learning_rate * proximal``."""
        return Solver(pull=local.learning_rate * (1 + local.proximal))

    def check(self, local: LocalConfig) -> None:
        """Raise ValueError if local steps would not keep the statistics a running mean."""
        unwanted = {
            f"local.optimizer {local.optimizer}": local.optimizer != "sgd",
            f"local.momentum {local.momentum:g}": local.momentum > 0,
            f"local.weight_decay {local.weight_decay:g}": local.weight_decay > 0,
            "local.schedule": local.schedule is not None,
            "local.clip_norm": local.clip_norm is not None,
            f"local.learning_rate {local.learning_rate:g} above 1": local.learning_rate > 1,
        }
        for setting, wrong in unwanted.items():
            if wrong:
                raise ValueError(
                    f"{setting} does not fit task.kind {self.kind}: its model is a mean of statistics; "
                    "use plain sgd with a learning rate up to 1"
                )


class KMeansConfig(StatisticsSection):
    """K-means clustering. The loss is the mean squared distance to the nearest centre (inertia per sample)."""

    kind: Literal["k-means"]
    data: AnyData
    clusters: PositiveInt = 8
    """Number of clusters."""

    def build(self) -> Task:
        from fedsync.extras.tasks.clustering import KMeansTask

        return KMeansTask(*self.source(), clusters=self.clusters, spread=self.spread)


class FuzzyConfig(StatisticsSection):
    """Fuzzy c-means clustering: each sample belongs to all clusters, more to nearer clusters."""

    kind: Literal["fuzzy-c-means"]
    data: AnyData
    clusters: PositiveInt = 8
    """Number of clusters."""

    fuzziness: Annotated[float, Field(gt=1)] = 2.0
    """Exponent m, above 1: larger values make clusters share samples more. Values close to 1 give k-means."""

    def build(self) -> Task:
        from fedsync.extras.tasks.clustering import FuzzyTask

        return FuzzyTask(*self.source(), clusters=self.clusters, spread=self.spread, fuzziness=self.fuzziness)


class GaussianMixtureConfig(StatisticsSection):
    """Mixture of Gaussians with diagonal covariances. The loss is minus the mean log-likelihood."""

    kind: Literal["gaussian-mixture"]
    data: AnyData
    components: PositiveInt = 8
    """Number of Gaussians."""

    floor: Positive = 1e-3
    """Constant that is added to every variance."""

    scores: ClassVar[Scores] = "any"
    """Mean log-likelihood; as it is of densities, it may be above 0."""

    def build(self) -> Task:
        from fedsync.extras.tasks.gaussian_mixture import MixtureTask

        return MixtureTask(*self.source(), components=self.components, spread=self.spread, floor=self.floor)


class FactorisationConfig(StatisticsSection):
    """Matrix factorisation by alternating least squares; a sample is a user, and NaN is an unknown rating.

    The test loss is the mean squared error of ratings that are held out when the users' vectors are computed.
    """

    kind: Literal["factorisation"]
    data: Annotated[Source, Chosen("data", among=("ratings", "npz"))]
    """Source of the ratings."""

    factors: PositiveInt = 4
    """Length of the vectors of users and items."""

    ridge: Positive = 0.01
    """Strength of the penalty on the vectors."""

    non_negative: bool = False
    """Whether vectors are kept non-negative, for ratings that are not negative."""

    def build(self) -> Task:
        from fedsync.extras.tasks.factorisation import FactorisationTask

        return FactorisationTask(
            *self.source(), factors=self.factors, ridge=self.ridge, spread=self.spread, non_negative=self.non_negative
        )

    def source(self) -> tuple[Source, Partition | None, float, float | None]:
        """Return the parts as for any data, with missing inputs allowed."""
        from fedsync.tasks.readers.npz import NpzSource, RatingsNpz

        source, partition, test_share, validation = super().source()
        known = RatingsNpz(source.file, source.classes) if isinstance(source, NpzSource) else source
        return known, partition, test_share, validation
