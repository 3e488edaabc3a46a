"""Tasks on samples from a source: networks, linear models, and expectation maximisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from fedsync.common.errors import ConfigError
from fedsync.config.sections.section import Scores, Section
from fedsync.config.tasks.data_partition import OwnConfig, SourcePartitionConfig, iid
from fedsync.config.tasks.data_sources import (
    AnyData,
    BlobsConfig,
    DataSection,
    Digits28Config,
    ImageData,
    KeywordsConfig,
    NonNegative,
    NpzConfig,
    PositiveInt,
    RatingsConfig,
    RatingsData,
    SequenceData,
    SparseConfig,
)
from fedsync.config.training import LocalConfig
from fedsync.core.weighting import Solver
from fedsync.model.tensor_parts import UNSAID, PartPatterns

if TYPE_CHECKING:
    from fedsync.client.silo_facts import Silo
    from fedsync.tasks.partition import Partition
    from fedsync.tasks.samples import Source
    from fedsync.tasks.task_protocol import Task
    from fedsync.train.local_trainer import LocalTrainer, ModelKeeper
    from fedsync.train.options import LocalOptions

Share = Annotated[float, Field(gt=0, lt=1)]
Spread = Annotated[float, Field(gt=0)]

_GENERATED = (Digits28Config, KeywordsConfig, BlobsConfig, SparseConfig, RatingsConfig)


Tensor = tuple[str, str, tuple[int, ...]]
"""Name, NumPy's type and shape of one array of a model."""


class TaskSection(Section):
    """What all tasks share."""

    own_loop: ClassVar[bool] = False
    """Whether the task brings a training loop of its own, so that only silos know its model."""

    @property
    def linear(self) -> bool:
        """Whether the model is one layer, and its loss convex."""
        return False

    @property
    def libraries(self) -> tuple[str, ...]:
        """Modules that its trainers import late, and that take long: trainers of one machine can share them."""
        return ()

    def solver(self, local: LocalConfig) -> Solver:
        """How local steps go, for aggregation that normalises them."""
        return Solver(local.sgd_momentum, local.learning_rate * local.proximal)

    def build(self) -> Task:
        """Model and data; raises `ConfigError` where they are not usable here."""
        raise NotImplementedError

    @property
    def deals_data(self) -> bool:
        """Whether a silo's data are a share by its number, so that there are as many silos as shares at most."""
        return True

    def look(self, data: Mapping[str, Mapping[str, str]], seed: int) -> list[str]:
        """Notes on the data of emulated silos, for people, before a run; see `emulated`.

        Raises:
            ConfigError: a silo's data cannot be read, or mean something else than those of the others.
        """
        return []

    def own(self, index: int, silos: int) -> Self:
        """The task as the silo ``index`` of ``silos`` carries it out: without the files of others.

        Raises:
            ConfigError: there is no file for each silo.
        """
        return self

    def emulated(self, data: Mapping[str, Mapping[str, str]]) -> Self:
        """The task of emulated silos: ``data`` are the paths of each by the names that it has for them.

        Raises:
            ConfigError: a silo has no data by the name that the task asks for.
        """
        return self

    def relocated(self, locate: Callable[[str], str]) -> Self:
        """The task with its paths as ``locate`` says."""
        return self

    def started_from(self, tensors: Sequence[Tensor]) -> Self:
        """The task of a run whose first model is the ServerApp's; most know its form anyway."""
        return self

    def trainer(self, site: Silo, slots: int, options: LocalOptions, run: PartPatterns = UNSAID) -> LocalTrainer:
        """What trains at a silo.

        Args:
            site: the silo.
            slots: number of silos that the data are dealt to.
            options: how to train.
            run: what the run says of the model's parts.
        """
        from fedsync.tasks.task_protocol import SiloSlot
        from fedsync.train.loop import Trainer

        slot = SiloSlot(site.name, site.index, slots, site.seed)
        if options.processes == 1:
            return Trainer(self.build(), slot, options, run)
        from fedsync.train.processes.group import GroupTrainer

        return GroupTrainer(self.build, slot, options, run)

    def keeper(self, site: Silo, slots: int, options: LocalOptions, run: PartPatterns = UNSAID) -> ModelKeeper:
        """What knows the model's form and writes it to a file, as `trainer` would."""
        from fedsync.tasks.task_protocol import SiloSlot
        from fedsync.train.weights import TaskModel

        task = self.build()
        task.table(SiloSlot(site.name, site.index, slots, site.seed))  # of which a model may depend
        return TaskModel(task, site.seed, run)


OWN_LOOP_LIBRARIES = ("torch._dynamo",)
"""What PyTorch imports with the first optimizer of a loop that is not ours; see `fedsync.train.optimizers`."""


def has_own_loop(kind: str) -> ConfigError:
    """Why a task that brings its own training loop cannot be built apart from it."""
    problem = "it has a training loop of its own, and its model is where that is, at the silos"
    remedy = "Ask a silo for the model, or try a run in virtual time. How fast silos are, a run says, not fedsync probe"
    return ConfigError(f"task.kind {kind}", problem, remedy)


class SourceSection(TaskSection):
    """What tasks on samples from a source share."""

    kind: str
    data: DataSection
    """Where samples come from."""

    partition: SourcePartitionConfig = Field(default_factory=iid)
    """How one data set is dealt to silos."""

    test_share: Share = 0.2
    """Share kept for tests where the data have no test samples apart."""

    validation: Share | None = None
    """Share of a silo's training samples by which rounds are evaluated; the test samples are then used once, at the
    end. None: test samples in every round."""

    @model_validator(mode="after")
    def _silos_differ(self) -> Self:
        if isinstance(self.partition, OwnConfig) and isinstance(self.data, _GENERATED):
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
        """What every task on samples is made of."""
        return self.data.build(), self.partition.build(), self.test_share, self.validation

    def emulated(self, data: Mapping[str, Mapping[str, str]]) -> Self:
        """The task of emulated silos: ``data`` are the paths of each by the names that it has for them.

        Raises:
            ConfigError: a silo has no data by the name that the task asks for.
        """
        return self

    def relocated(self, locate: Callable[[str], str]) -> Self:
        return self.model_copy(update={"data": self.data.relocated(locate)})


class ImagesConfig(SourceSection):
    """Tell images apart: LeNet-5, a small CNN with two convolutions, or a residual network."""

    kind: Literal["images"]
    data: ImageData
    """Where images come from."""

    model: Literal["lenet5", "cnn", "resnet20", "resnet32"] = "lenet5"
    """The network."""

    norm: Literal["group", "batch"] = "group"
    """Normalisation of ``cnn`` and the residual networks. Statistics of batch norm are of a silo's batches, and silos
    that hold different classes disagree about them."""

    def build(self) -> Task:
        from fedsync.tasks.neural import ImagesTask

        return ImagesTask(*self.source(), self.model, self.norm)


class SequencesConfig(SourceSection):
    """Tell sequences apart with an LSTM of two recurrent layers."""

    kind: Literal["sequences"]
    data: SequenceData
    """Where sequences come from."""

    hidden: PositiveInt = 64
    """Width of a recurrent layer."""

    layers: PositiveInt = 2
    """Number of recurrent layers."""

    def build(self) -> Task:
        from fedsync.tasks.neural import SequencesTask

        return SequencesTask(*self.source(), self.hidden, self.layers)


class MlpConfig(SourceSection):
    """Tell anything apart with dense layers."""

    kind: Literal["mlp"]
    data: AnyData
    hidden: list[PositiveInt] = Field(default_factory=lambda: [64])
    """Widths of the layers between, first to last."""

    def build(self) -> Task:
        from fedsync.tasks.neural import MlpTask

        return MlpTask(*self.source(), tuple(self.hidden))


class LinearConfig(SourceSection):
    """A linear model by mini-batch SGD. Accuracy of ``squared`` is minus the mean squared error."""

    kind: Literal["linear"]
    data: AnyData
    loss: Literal["logistic", "hinge", "squared"] = "logistic"
    """``logistic`` regression, ``hinge`` for a linear SVM, ``squared`` for lasso (with ``l1``) and ridge regression
    (``l2``)."""

    l1: NonNegative = 0.0
    """Strength of the L1 penalty."""

    l2: NonNegative = 0.0
    """Strength of the L2 penalty, half of which times the squared norm is added."""

    @property
    def linear(self) -> bool:
        return True

    @property
    def scores(self) -> Scores:
        """The share of right answers, or minus the mean squared error."""
        return "error" if self.loss == "squared" else "share"

    def build(self) -> Task:
        from fedsync.tasks.linear import LinearTask

        return LinearTask(*self.source(), self.loss, self.l1, self.l2)


class StatisticsSection(SourceSection):
    """Tasks whose model is a vector of statistics, which silos add and everybody maximises.

    They want plain SGD; ``learning_rate`` is the share of the statistics that a batch renews, 1 being all.
    Accuracy is minus the test loss.
    """

    spread: Spread = 1.0
    """Groups begin at random around 0 with this standard deviation."""

    @property
    def scores(self) -> Scores:
        """Minus the test loss."""
        return "error"

    def solver(self, local: LocalConfig) -> Solver:
        """A step goes a share of the way to the batch's statistics, and as much of the way back to any others."""
        return Solver(pull=local.learning_rate * (1 + local.proximal))

    def check(self, local: LocalConfig) -> None:
        """Raise ValueError if local steps would make something else of statistics than their running mean."""
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
    """K-means. The loss is the mean squared distance to the nearest centre (inertia a sample)."""

    kind: Literal["k-means"]
    data: AnyData
    clusters: PositiveInt = 8
    """Number of clusters."""

    def build(self) -> Task:
        from fedsync.tasks.clustering import KMeansTask

        return KMeansTask(*self.source(), clusters=self.clusters, spread=self.spread)


class FuzzyConfig(StatisticsSection):
    """Fuzzy c-means: samples belong to all clusters, more to nearer ones."""

    kind: Literal["fuzzy-c-means"]
    data: AnyData
    clusters: PositiveInt = 8
    """Number of clusters."""

    fuzziness: Annotated[float, Field(gt=1)] = 2.0
    """How much clusters share; m, above 1. Close to 1 is k-means."""

    def build(self) -> Task:
        from fedsync.tasks.clustering import FuzzyTask

        return FuzzyTask(*self.source(), clusters=self.clusters, spread=self.spread, fuzziness=self.fuzziness)


class GaussianMixtureConfig(StatisticsSection):
    """A mixture of Gaussians with diagonal covariances. The loss is minus the mean log-likelihood."""

    kind: Literal["gaussian-mixture"]
    data: AnyData
    components: PositiveInt = 8
    """Number of Gaussians."""

    floor: Annotated[float, Field(gt=0)] = 1e-3
    """Added to every variance."""

    @property
    def scores(self) -> Scores:
        """The mean log-likelihood, of densities, which may be above 0."""
        return "any"

    def build(self) -> Task:
        from fedsync.tasks.gaussian_mixture import MixtureTask

        return MixtureTask(*self.source(), components=self.components, spread=self.spread, floor=self.floor)


class FactorisationConfig(StatisticsSection):
    """Matrix factorisation by alternating least squares; a sample is a user, NaN stands for an unknown rating.

    The test loss is the mean squared error of ratings that are kept from the users' vectors.
    """

    kind: Literal["factorisation"]
    data: RatingsData
    """Where ratings come from."""

    factors: PositiveInt = 4
    """Length of users' and items' vectors."""

    ridge: Annotated[float, Field(gt=0)] = 0.01
    """Strength of the penalties on the vectors."""

    non_negative: bool = False
    """Whether vectors are kept from being negative, for ratings that are not either."""

    def build(self) -> Task:
        from fedsync.tasks.factorisation import FactorisationTask

        return FactorisationTask(
            *self.source(),
            factors=self.factors,
            ridge=self.ridge,
            spread=self.spread,
            non_negative=self.non_negative,
        )

    def source(self) -> tuple[Source, Partition | None, float, float | None]:
        """As of any data, but that what is missing is no mistake."""
        source = self.data.build(missing=True) if isinstance(self.data, NpzConfig) else self.data.build()
        return source, self.partition.build(), self.test_share, self.validation
