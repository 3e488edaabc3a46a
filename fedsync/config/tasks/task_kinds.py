"""Configuration classes of tasks: tables in CSV files, and users' own Python files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from fedsync.common.errors import ConfigError
from fedsync.config.sections.section import EITHER, SECTION, VALUE, Section
from fedsync.config.tasks.task_trainers import OwnLoopSection
from fedsync.model.table_columns import ColumnRule
from fedsync.model.tensor_parts import UNSAID, PartPatterns
from fedsync.policies.schema import register
from fedsync.tasks.task_section import BY_NAME, PartOfData, Scores, TaskSection

if TYPE_CHECKING:
    from fedsync.client.app import Silo
    from fedsync.evaluation.survey.findings import ColumnScale
    from fedsync.tasks.csv_ import CsvTask
    from fedsync.tasks.task_protocol import Task
    from fedsync.train.local_trainer import LocalTrainer
    from fedsync.train.options import LocalOptions

# Tasks import torch. They are imported in `build`, so that a file validates without torch.

_Pair = Annotated[list[float], Field(min_length=2, max_length=2)]


def _rising(given: list[float]) -> list[float]:
    if not (isfinite(given[0]) and isfinite(given[1]) and given[0] < given[1]):
        raise ValueError(f"{given} is no range; write the smaller number first")
    return given


class ColumnStatisticsConfig(Section):
    """Statistics of columns that silos compute together before training."""

    bins: Annotated[int, Field(ge=0, le=64)] = 10
    """Number of bins in each column's histogram; 0 makes no histograms, and saves one of two rounds. The first and the
    last bin are open, so that they disclose no smallest or largest cell."""

    ranges: dict[str, Annotated[_Pair, AfterValidator(_rising)]] = Field(default_factory=dict)
    """First and last edge of the bins of columns, as in ``{age: [0, 120]}``. The bins of other columns span four
    deviations on each side of the pooled mean."""

    least: Annotated[int, Field(ge=1)] = 5
    """Smallest count that is disclosed, except 0."""


_Scaling = Annotated[Annotated[Literal["own", "federated"], VALUE] | Annotated[dict[str, list[float]], SECTION], EITHER]


def _words(given: object) -> object:
    if isinstance(given, list) and any(isinstance(one, bool) for one in given):
        raise ValueError("YAML reads yes, no, true and false as booleans; put words in quotes")
    return given


class ColumnConfig(Section):
    """Format and meaning of a table's column."""

    kind: Literal["number", "category", "text"] | None = None
    """``number``: one feature. ``category``: one feature for each of ``categories``. ``text``: eight features, by a
    hash of the cell. Left out, the kind follows from ``categories`` or from the cells."""

    unit: str = ""
    """Unit of the numbers, such as ``mg/dl``; a cell may contain the unit after its number."""

    categories: Annotated[list[str], BeforeValidator(_words)] = Field(default_factory=list)
    """All words that may occur in the column. In the target column they are the classes, in the order of their
    numbers."""

    gaps: Annotated[list[str | int | float], BeforeValidator(_words)] | None = None
    """Cells that count as missing, besides empty cells. Left out, the usual markers: ``?``, ``-``, ``.``, ``NA``,
    ``N/A``, ``NaN``, ``NULL``, ``None``, ``<NA>``."""

    decimal: Literal[".", ","] = "."
    """Decimal mark of numbers."""

    thousands: Literal["", ",", ".", "'", " "] = ""
    """Mark between groups of three digits; left out, none."""

    @model_validator(mode="after")
    def _is_one_thing(self) -> Self:
        if (self.kind == "category") != bool(self.categories) and self.kind is not None:
            raise ValueError(
                f"kind {self.kind} and {len(self.categories)} categories; write categories and kind: category"
            )
        if self.decimal == self.thousands:
            raise ValueError(f"decimal and thousands are both {self.decimal!r}; write two different characters")
        return self

    def build(self) -> ColumnRule:
        gaps = None if self.gaps is None else tuple(self.gaps)
        return ColumnRule(self.kind, self.unit, tuple(self.categories), gaps, self.decimal, self.thousands)


@register("csv")
@dataclass(frozen=True, kw_only=True)
class CsvConfig(TaskSection):
    """Classification of one column of CSV files, with one file per silo. Columns are matched by name. They are numbers
    or text as ``columns`` defines, or as their cells show.
    """

    files: Annotated[list[str], Field(min_length=1)] | None = None
    """One file per silo, in the order of the silos. A silo is asked only for its own file."""

    file: str | None = None
    """Alternative to ``files``. ``data:NAME`` is the file that each silo's owner lists as NAME in ``data`` of
    ``silo.yaml``. A path is the same at all silos."""

    target: str
    """Column to predict."""

    time: str | None = None
    """Column with the time of each person's event, or until which the person was followed, above 0. With it, the target
    says whether the event happened (1, or above ``positive_above``), and the model is a Cox model: one output, the
    logarithm of the hazard. Batches of 32 and more make better steps, as only persons of one batch are compared."""

    classes: Annotated[int, Field(ge=2)] = 2
    """Number of classes."""

    positive_above: float | None = None
    """Threshold of a numeric target: with it there are two classes, and a target above the threshold is class 1."""

    ignore: list[str] = field(default_factory=list)
    """Names of columns to leave out; a silo may lack them."""

    text: list[str] = field(default_factory=list)
    """Names of columns to treat as text, even if all cells of a silo look like numbers."""

    columns: dict[str, ColumnConfig] = field(default_factory=dict)
    """Format of columns, by name, as in ``{chol: {unit: mg/dl, gaps: [-9]}}``. Other columns follow from their cells,
    which must be all numbers or all words. A cell that only resembles a number, as 1,5 or 45% or a date, is refused."""

    model: Literal["logistic", "mlp"] = "logistic"
    """Model: ``logistic`` regression, or an ``mlp`` with one hidden layer."""

    hidden: Annotated[int, Field(ge=1)] = 16
    """Width of the hidden layer."""

    test_share: PartOfData = 0.25
    """Share of each class that is held out as the silo's test samples."""

    validation: PartOfData | None = None
    """Share of a silo's other rows that is held out to evaluate rounds, and not trained on; the test samples are then
    used only once, at the end. None: the test samples evaluate every round."""

    standardise: _Scaling = "own"
    """Standardisation of numeric columns. ``own``: each silo uses the mean and deviation of its own training rows, and
    fills missing cells with their median. ``federated``: all silos use the mean and deviation of all training rows,
    which they compute together before training, and fill missing cells with that mean. Or give mean and deviation of
    each column, as in ``{age: [54.4, 9.0]}``."""

    statistics: ColumnStatisticsConfig | None = None
    """Statistics that silos compute together before training: counts, missing cells, means, deviations and histograms
    of their columns. Left out, no statistics."""

    def __post_init__(self) -> None:
        if (self.files is None) == (self.file is None):
            raise ValueError("either file or files is needed; write file: data:NAME, or files: one path per silo")
        for name, scale in self.standardise.items() if isinstance(self.standardise, dict) else ():
            if len(scale) != 2 or not (isfinite(scale[0]) and isfinite(scale[1]) and scale[1] > 0):
                raise ValueError(
                    f"standardise.{name} {scale} is no mean and positive deviation; write both, as in [54.4, 9]"
                )

    def build_by_row(self) -> CsvTask:
        return self.build(by_row=True)

    def build(self, *, by_row: bool = False) -> CsvTask:
        from fedsync.tasks.csv_ import CsvTask

        make: Callable[..., CsvTask] = CsvTask
        if self.time is not None:
            from fedsync.extras.survival.cox import CoxTask

            make = partial(CoxTask, self.time)
        alike = ("target", "classes", "positive_above", "model", "hidden", "test_share", "validation")
        return make(
            files=tuple(self.files or (str(self.file),)),
            everywhere=self.files is None,
            **{name: getattr(self, name) for name in alike},
            ignore=tuple(self.ignore),
            text=tuple(self.text),
            scales=self._scales(),
            columns={name: column.build() for name, column in self.columns.items()},
            by_row=by_row,
        )

    def _scales(self) -> dict[str, ColumnScale] | None:
        from fedsync.evaluation.survey.findings import ColumnScale

        if self.standardise == "own":
            return None
        # Before a survey the scales are unknown. The model's form does not depend on them, and no data are loaded yet.
        known = {} if self.standardise == "federated" else self.standardise
        return {name: ColumnScale(*scale) for name, scale in known.items()}

    def survey(self) -> ColumnStatisticsConfig | None:
        if self.statistics is not None or self.standardise != "federated":
            return self.statistics
        return ColumnStatisticsConfig(bins=0)

    def emulated(self, data: Mapping[str, Mapping[str, str]]) -> Self:
        if not data or self.file is None or not self.file.startswith(BY_NAME):
            return self
        name = self.file.removeprefix(BY_NAME)
        for silo, paths in data.items():
            if name not in paths:
                problem = f"the task asks for {self.file}, and silo {silo!r} has no data by that name"
                raise ConfigError("task.file", problem, f"Write data: {{{name}: PATH}} in the silo file")
        return replace(self, files=[paths[name] for paths in data.values()], file=None)

    def look(self, data: Mapping[str, Mapping[str, str]], seed: int) -> list[str]:
        from fedsync.tasks.csv_ import look_at

        return look_at(self.emulated(data).build, list(data), seed)

    def own(self, index: int, silos: int) -> Self:
        if self.files is None:
            return self
        if len(self.files) != silos or not 0 <= index < silos:
            problem = f"{len(self.files)} files for {silos} silos"
            raise ConfigError("task.files", problem, "Name exactly one file per silo")
        return replace(self, files=None, file=self.files[index])

    def relocated(self, locate: Callable[[str], str]) -> Self:
        files = self.files and [locate(file) for file in self.files]
        return replace(self, files=files, file=self.file and locate(self.file))


@dataclass(frozen=True)
class _OwnFileSection(TaskSection):
    """Base of tasks that are defined in a user's Python file."""

    file: str
    """Python file; relative to the strategy file if it exists there."""

    scores: ClassVar[Scores] = "any"

    def relocated(self, locate: Callable[[str], str]) -> Self:
        return replace(self, file=locate(self.file))


@register("custom")
@dataclass(frozen=True, kw_only=True)
class CustomConfig(_OwnFileSection):
    """Your own Python file with one `fedsync.Task`; see docs/your-task.md."""

    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the task's class in the file."""

    def build(self) -> Task:
        from fedsync.tasks.custom import load_task

        return load_task(Path(self.file), self.options)


@register("silo-app")
@dataclass(frozen=True, kw_only=True)
class SiloAppConfig(OwnLoopSection, _OwnFileSection):
    """Your own Python file with a `fedsync.client.SiloApp`, which contains your own training code."""

    app: str = "app"
    """Name of the `SiloApp` in the file."""

    options: dict[str, Any] = field(default_factory=dict)
    """Values that ``setup`` finds in ``silo.options``."""

    def trainer(self, site: Silo, slots: int, options: LocalOptions, run: PartPatterns = UNSAID) -> LocalTrainer:
        from fedsync.client.app import SiloApp
        from fedsync.common.sandbox.named_code import run_file
        from fedsync.train.guests.guest import GuestTrainer

        app = getattr(run_file(Path(self.file), "task.file"), self.app, None)
        if not isinstance(app, SiloApp):
            problem = f"there is no SiloApp by the name of {self.app}"
            raise ConfigError(self.file, problem, f"Write {self.app} = SiloApp(), or correct task.app")
        return GuestTrainer(app, replace(site, options=self.options), options, run)
