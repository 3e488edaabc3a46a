"""The kinds of tasks that exist, and what each can be told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from fedsync.config.section import Scores, Section
from fedsync.config.tasks_clientapp import ClientAppConfig
from fedsync.config.tasks_kinds import (
    OWN_LOOP_LIBRARIES,
    FactorisationConfig,
    FuzzyConfig,
    GaussianMixtureConfig,
    ImagesConfig,
    KMeansConfig,
    LinearConfig,
    MlpConfig,
    SequencesConfig,
    Share,
    TaskSection,
    has_own_loop,
)
from fedsync.config.tasks_partition import PartitionConfig, iid
from fedsync.core.errors import ConfigError
from fedsync.core.parts import UNSAID, PartPatterns

if TYPE_CHECKING:
    from fedsync.client.silo import Silo
    from fedsync.core.survey.findings import ColumnScale
    from fedsync.tasks.protocol import Task
    from fedsync.train.local import LocalTrainer, ModelKeeper
    from fedsync.train.options import LocalOptions

# Tasks import torch, so they are imported where they are built: a file validates without it.


_Pair = Annotated[list[float], Field(min_length=2, max_length=2)]


def _rising(given: list[float]) -> list[float]:
    if not (isfinite(given[0]) and isfinite(given[1]) and given[0] < given[1]):
        raise ValueError(f"{given} is no range; write the smaller number first")
    return given


class DigitsConfig(TaskSection):
    """Scikit-learn's 1,797 handwritten digits and a small CNN."""

    kind: Literal["digits"]
    partition: PartitionConfig = Field(default_factory=iid)
    """How the digits are dealt to silos."""

    test_share: Share = 0.2
    """Share of all samples that is kept for tests."""

    validation: Share | None = None
    """Share of a silo's training samples by which rounds are evaluated; the test samples are then used once, at the
    end. None: test samples in every round."""

    @property
    def scores(self) -> Scores:
        return "share"

    @property
    def libraries(self) -> tuple[str, ...]:
        return ("sklearn.datasets", "sklearn.model_selection")

    def build(self) -> Task:
        from fedsync.tasks.digits import DigitsTask

        return DigitsTask(self.partition.build(), self.test_share, self.validation)

    def relocated(self, locate: Callable[[str], str]) -> DigitsConfig:
        return self


class ColumnStatisticsConfig(Section):
    """What silos find together of their columns before training."""

    bins: Annotated[int, Field(ge=0, le=64)] = 10
    """Bins of each column's histogram; 0 makes none, which takes one round instead of two. The first and the last are
    open, so that nobody learns a smallest or largest cell."""

    ranges: dict[str, Annotated[_Pair, AfterValidator(_rising)]] = Field(default_factory=dict)
    """Where the bins of columns begin and end, as in ``{age: [0, 120]}``; of other columns, four deviations on each
    side of the pooled mean."""

    least: Annotated[int, Field(ge=1)] = 5
    """Smallest count that is told, but for 0."""


class CsvConfig(TaskSection):
    """One CSV file a silo; classification of one column.

    Columns are numbers or text as their cells say.
    """

    kind: Literal["csv"]
    files: Annotated[list[str], Field(min_length=1)]
    """One file a silo, in the order of the silos."""

    target: str
    """Column to predict."""

    classes: Annotated[int, Field(ge=2)] = 2
    """Number of classes."""

    positive_above: float | None = None
    """With it there are two classes, and a target above this number is class 1."""

    ignore: list[str] = Field(default_factory=list)
    """Columns to leave out."""

    text: list[str] = Field(default_factory=list)
    """Columns to treat as text though some silo's cells all look like numbers."""

    model: Literal["logistic", "mlp"] = "logistic"
    """``logistic`` regression, or an ``mlp`` with one hidden layer."""

    hidden: Annotated[int, Field(ge=1)] = 16
    """Width of the hidden layer."""

    test_share: Share = 0.25
    """Share of each class that goes into a silo's own test samples."""

    validation: Share | None = None
    """Share of a silo's other rows by which rounds are evaluated, and on which it does not train; the test samples are
    then used once, at the end. None: test samples in every round."""

    standardise: Literal["own", "federated"] | dict[str, list[float]] = "own"
    """What columns of numbers are standardised by. ``own``: each silo by the mean and deviation of its own training
    rows, missing cells by their median. ``federated``: all silos by the mean and deviation of all training rows,
    which they find together before training; a missing cell is that mean. Or mean and deviation of each column, as in
    ``{age: [54.4, 9.0]}``."""

    statistics: ColumnStatisticsConfig | None = None
    """With it, silos find counts, missing cells, means, deviations and histograms of their columns together, before
    training."""

    @model_validator(mode="after")
    def _has_scales(self) -> Self:
        for name, scale in self.standardise.items() if isinstance(self.standardise, dict) else ():
            if len(scale) != 2 or not (isfinite(scale[0]) and isfinite(scale[1]) and scale[1] > 0):
                raise ValueError(
                    f"standardise.{name} {scale} is no mean and deviation above 0; write both, as in [54.4, 9]"
                )
        return self

    @property
    def linear(self) -> bool:
        return self.model == "logistic"

    @property
    def scores(self) -> Scores:
        return "share"

    def build(self) -> Task:
        from fedsync.tasks.csv_ import CsvTask

        return CsvTask(
            files=tuple(self.files),
            target=self.target,
            classes=self.classes,
            positive_above=self.positive_above,
            ignore=tuple(self.ignore),
            text=tuple(self.text),
            model=self.model,
            hidden=self.hidden,
            test_share=self.test_share,
            validation=self.validation,
            scales=self._scales(),
        )

    def _scales(self) -> dict[str, ColumnScale] | None:
        from fedsync.core.survey.findings import ColumnScale

        if self.standardise == "own":
            return None
        # Before a survey there are none, and there is no data to be had, but the model has its form.
        known = {} if self.standardise == "federated" else self.standardise
        return {name: ColumnScale(*scale) for name, scale in known.items()}

    def survey(self) -> ColumnStatisticsConfig | None:
        """What silos find out together before training; None for nothing."""
        if self.statistics is not None or self.standardise != "federated":
            return self.statistics
        return ColumnStatisticsConfig(bins=0)

    def relocated(self, locate: Callable[[str], str]) -> CsvConfig:
        return self.model_copy(update={"files": [locate(file) for file in self.files]})


class SurveyConfig(TaskSection):
    """What silos' columns hold together: a run that trains nothing, before one that does, or by itself."""

    own_loop: ClassVar[bool] = True

    kind: Literal["survey"]
    of: CsvConfig
    """The task whose columns are meant."""

    @property
    def scores(self) -> Scores:
        return "any"

    @property
    def statistics(self) -> ColumnStatisticsConfig:
        return self.of.survey() or ColumnStatisticsConfig()

    def build(self) -> Task:
        """Raises `ConfigError`: which columns there are, the silos know."""
        raise has_own_loop(self.kind)

    def relocated(self, locate: Callable[[str], str]) -> SurveyConfig:
        return self.model_copy(update={"of": self.of.relocated(locate)})

    def trainer(self, site: Silo, slots: int, options: LocalOptions, run: PartPatterns = UNSAID) -> LocalTrainer:
        from fedsync.tasks.protocol import SiloSlot
        from fedsync.train.survey import SurveyTrainer

        columns = self.of.build().columns(SiloSlot(site.name, site.index, slots, site.seed))
        if columns is None:
            raise ConfigError("task.of", f"kind {self.of.kind} has no columns", "Survey a table")
        asked = self.statistics
        return SurveyTrainer(site.name, site.index, slots, columns, options, asked.ranges, asked.bins)

    def keeper(self, site: Silo, slots: int, options: LocalOptions, run: PartPatterns = UNSAID) -> ModelKeeper:
        return self.trainer(site, slots, options, run)


class _OwnFileSection(TaskSection):
    """What tasks in a Python file of the user's share."""

    kind: str
    file: str
    """The Python file; relative to the strategy file, where something is there."""

    @property
    def scores(self) -> Scores:
        return "any"

    def relocated(self, locate: Callable[[str], str]) -> Self:
        return self.model_copy(update={"file": locate(self.file)})


class CustomConfig(_OwnFileSection):
    """A Python file of the user's that defines one `fedsync.tasks.Task`; see docs/your-task.md."""

    kind: Literal["custom"]
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class in it."""

    def build(self) -> Task:
        from fedsync.tasks.custom import load_task

        return load_task(Path(self.file), self.options)


class SiloAppConfig(_OwnFileSection):
    """A Python file of the user's with a `fedsync.client.SiloApp`: training code of one's own."""

    own_loop: ClassVar[bool] = True

    kind: Literal["silo-app"]
    app: str = "app"
    """Name of the `SiloApp` in it."""

    options: dict[str, Any] = Field(default_factory=dict)
    """What its ``setup`` finds in ``silo.options``."""

    @property
    def libraries(self) -> tuple[str, ...]:
        return OWN_LOOP_LIBRARIES

    @property
    def deals_data(self) -> bool:
        return False

    def build(self) -> Task:
        """Raises `ConfigError`: model and data are one step, which is taken where the data are."""
        raise has_own_loop(self.kind)

    def trainer(self, site: Silo, slots: int, options: LocalOptions, run: PartPatterns = UNSAID) -> LocalTrainer:
        from fedsync.client.app import SiloApp
        from fedsync.tasks.custom import run_file
        from fedsync.train.guest import GuestTrainer

        app = getattr(run_file(Path(self.file), "task.file"), self.app, None)
        if not isinstance(app, SiloApp):
            problem = f"there is no SiloApp by the name of {self.app}"
            raise ConfigError(self.file, problem, f"Write {self.app} = SiloApp(), or mend task.app")
        return GuestTrainer(app, replace(site, options=self.options), options, run)

    def keeper(self, site: Silo, slots: int, options: LocalOptions, run: PartPatterns = UNSAID) -> ModelKeeper:
        """The trainer itself: the model is where the data are."""
        return self.trainer(site, slots, options, run)


TaskConfig = Annotated[
    DigitsConfig
    | CsvConfig
    | SurveyConfig
    | CustomConfig
    | SiloAppConfig
    | ClientAppConfig
    | ImagesConfig
    | SequencesConfig
    | MlpConfig
    | LinearConfig
    | KMeansConfig
    | FuzzyConfig
    | GaussianMixtureConfig
    | FactorisationConfig,
    Field(discriminator="kind"),
]
