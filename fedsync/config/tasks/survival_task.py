"""Configuration of the task ``survey``: statistics of columns, or survival analysis from pooled sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from math import isfinite
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from pydantic import Field, model_validator

from fedsync.common.errors import ConfigError
from fedsync.config.sections.section import EITHER, SECTION, VALUE, Section
from fedsync.config.tasks.task_kinds import ColumnStatisticsConfig, CsvConfig
from fedsync.config.tasks.task_trainers import OwnLoopSection
from fedsync.model.tensor_parts import UNSAID, PartPatterns
from fedsync.policies.schema import Chosen, Positive, register

if TYPE_CHECKING:
    from fedsync.client.app import Silo
    from fedsync.extras.survival.survival_sums import SurvivalForm
    from fedsync.train.local_trainer import LocalTrainer
    from fedsync.train.options import LocalOptions

_MOST_VALUES = 4_000_000


class GridConfig(Section):
    """Equal distances in the public grid of times."""

    every: Positive
    """Distance of two times, in the unit of the column ``of.time``."""

    until: Positive
    """The grid ends at the first multiple of ``every`` that is not below this time."""


class SurvivalConfig(Section):
    """Kaplan-Meier curves, log-rank test and Cox regression over the rows of all silos, test rows included."""

    grid: Annotated[
        Annotated[GridConfig, SECTION] | Annotated[list[Positive], Field(min_length=1), VALUE],
        EITHER,
    ]
    """Public times, as in ``{every: 30, until: 1000}``, or a list. Times are rounded up to the grid; a person who is
    followed beyond the grid is censored at its end. A silo's owner limits their number (``limits.times``)."""

    group: str | None = None
    """Column of ``of`` with ``categories``: one curve for each category, and their log-rank test. Left out, one curve
    of all persons. Persons without a known category are left out."""

    covariates: list[str] = Field(default_factory=list)
    """Columns of the Cox regression; left out, none. A column with ``categories`` gives one covariate for each category
    but the first. Persons with a missing covariate are left out of the regression."""

    steps: Annotated[int, Field(ge=1, le=20)] = 6
    """Newton steps of the Cox regression; each is a round of the run."""

    @model_validator(mode="after")
    def _rises(self) -> Self:
        times = self.times
        if not all(isfinite(time) for time in times) or any(one >= other for one, other in pairwise(times)):
            raise ValueError("grid has times that do not increase; write each time once, the smallest first")
        if len(set(self.covariates)) != len(self.covariates):
            raise ValueError("covariates has a column twice; list each once")
        return self

    @property
    def times(self) -> tuple[float, ...]:
        if not isinstance(self.grid, GridConfig):
            return tuple(self.grid)
        # Multiples of the decimal number: 3 * 30.4 of floats is below 91.2, and persons at 91.2 would count later.
        every, until = (Fraction(str(each)) for each in (self.grid.every, self.grid.until))
        count = -(-until // every)
        if count > _MOST_VALUES:
            raise ValueError(f"grid has {count} times; write a larger every")
        return tuple(float(every * (at + 1)) for at in range(count))

    @property
    def rounds(self) -> int:
        return 1 + (self.steps if self.covariates else 0)

    def check(self, of: CsvConfig) -> None:
        if of.time is None:
            raise ValueError("survival needs times; write of.time: the column with the time of each person")
        named = [*([] if self.group is None else [self.group]), *self.covariates]
        for name in named:
            if name in (of.target, of.time, *of.ignore):
                raise ValueError(f"survival uses the column {name!r}, which is the target, the time or ignored")
            if name == self.group and len(of.columns[name].categories if name in of.columns else ()) < 2:
                raise ValueError(f"survival.group {name!r} has no categories; write two or more in of.columns")
        if self.form(of, 1).layout.size > _MOST_VALUES:
            raise ValueError("survival has too many sums; write fewer covariates, times or steps")

    def form(self, of: CsvConfig, silos: int) -> SurvivalForm:
        from fedsync.extras.survival.survival_sums import SurvivalForm

        groups = () if self.group is None else tuple(of.columns[self.group].categories)
        names = tuple(name if category is None else f"{name} {category}" for name, _, category in self._covariates(of))
        asked = of.survey()
        return SurvivalForm(silos, self.times, groups, names, self.steps, 5 if asked is None else asked.least)

    def trainer(self, of: CsvConfig, site: Silo, slots: int, options: LocalOptions) -> LocalTrainer:
        from fedsync.extras.survival.cox import CoxTask
        from fedsync.extras.survival.survival_trainer import SurvivalTrainer
        from fedsync.tasks.task_protocol import SiloSlot

        task, slot = of.build(), SiloSlot(site.name, site.index, slots, site.seed)
        if not isinstance(task, CoxTask):
            raise ConfigError("task.of.time", "survival needs times", "Write the column with the time of each person")
        covariates = [(name, number) for name, number, _ in self._covariates(of)]
        rows = task.survivors(slot, self.group, covariates)
        return SurvivalTrainer(site.name, site.index, self.form(of, slots), rows, options, task.table(slot))

    def _covariates(self, of: CsvConfig) -> list[tuple[str, int | None, str | None]]:
        found: list[tuple[str, int | None, str | None]] = []
        for name in self.covariates:
            categories = of.columns[name].categories if name in of.columns else []
            found += [(name, at, each) for at, each in enumerate(categories) if at] or [(name, None, None)]
        return found


@register("survey")
@dataclass(frozen=True, kw_only=True)
class SurveyConfig(OwnLoopSection):
    """Joint statistics of the silos' columns: a run without training, before a training run or by itself."""

    libraries: ClassVar[tuple[str, ...]] = ()
    deals_data: ClassVar[bool] = True
    of: Annotated[CsvConfig, Chosen("task", among=("csv",))]
    """Task whose columns are surveyed."""

    survival: SurvivalConfig | None = None
    """Survival analysis in the place of statistics of columns; see docs/survival.md."""

    def __post_init__(self) -> None:
        if self.survival is not None:
            self.survival.check(self.of)

    @property
    def statistics(self) -> ColumnStatisticsConfig:
        return self.of.survey() or ColumnStatisticsConfig()

    def emulated(self, data: Mapping[str, Mapping[str, str]]) -> Self:
        return replace(self, of=self.of.emulated(data))

    def look(self, data: Mapping[str, Mapping[str, str]], seed: int) -> list[str]:
        return self.of.look(data, seed)

    def own(self, index: int, silos: int) -> Self:
        return replace(self, of=self.of.own(index, silos))

    def relocated(self, locate: Callable[[str], str]) -> Self:
        return replace(self, of=self.of.relocated(locate))

    def trainer(self, site: Silo, slots: int, options: LocalOptions, run: PartPatterns = UNSAID) -> LocalTrainer:
        from fedsync.extras.surveys.survey_trainer import SurveyTrainer
        from fedsync.tasks.task_protocol import SiloSlot

        if self.survival is not None:
            return self.survival.trainer(self.of, site, slots, options)
        task, slot = self.of.build(), SiloSlot(site.name, site.index, slots, site.seed)
        columns, asked = task.columns(slot), self.statistics
        if columns is None:
            raise ConfigError("task.of", f"kind {self.of.kind} has no columns", "Choose kind: csv")
        table = task.table(slot)
        return SurveyTrainer(site.name, site.index, slots, columns, options, asked.ranges, asked.bins, table)
