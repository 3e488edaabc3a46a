"""Base class of tasks in strategy files: ``kind`` chooses the class, and the class's fields are the YAML keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Self

from annotated_types import Gt, Lt

from fedsync.common.errors import ConfigError
from fedsync.policies.schema import Chosen, DataPart
from fedsync.tasks.task_protocol import Task

BY_NAME = "data:"
"""Prefix of a task's path that is a name; each silo maps the name to its own path in ``data``."""

Scores = Literal["share", "error", "any"]
"""Meaning of a task's accuracy: share of right answers, minus an error, or any number."""

PartOfData = Annotated[float, Gt(0), Lt(1)]

TensorForm = tuple[str, str, tuple[int, ...]]
"""Name, NumPy data type and shape of one array of a model."""


class TaskSection(DataPart):
    """Base of all tasks."""

    section = "task"

    own_loop: ClassVar[bool] = False
    """Whether the task brings its own training loop, so that only silos know its model."""

    deals_data: ClassVar[bool] = True
    """Whether a silo's number selects its share of the data; then there are at most as many silos as shares."""

    additive: ClassVar[bool] = False
    """Whether the model is a mean of statistics, which only plain SGD moves; see `fedsync.extras.tasks.em_training`."""

    @property
    def scores(self) -> Scores:
        return "share"

    @property
    def libraries(self) -> tuple[str, ...]:
        """Modules that trainers import late and that load slowly; the trainers of one machine can share them."""
        return ()

    def build(self) -> Task:
        """Return model and data; raises `ConfigError` if they cannot be built at this machine."""
        raise NotImplementedError

    def build_by_row(self) -> Task:
        """Return model and data for a private run, in which no row may affect how another row is read."""
        return self.build()

    def look(self, data: Mapping[str, Mapping[str, str]], seed: int) -> list[str]:
        """Return notes for the operator on the data of emulated silos, by silo and name, before a run; `ConfigError` if
        a silo's data cannot be read, or differ in meaning from other silos' data.
        """
        return []

    def own(self, index: int, silos: int) -> Self:
        """Return the task for silo ``index`` of ``silos``, without others' files; `ConfigError` if files do not fit."""
        return self

    def emulated(self, data: Mapping[str, Mapping[str, str]]) -> Self:
        """Return the task of emulated silos, with the path of each data name; `ConfigError` if a silo has none. This
        default has no paths of single silos, and refuses names.
        """

        def checked(path: str) -> str:
            if data and path.startswith(BY_NAME):
                problem = f"emulated silos cannot have files of their own in a task of kind {self.kind!r}: {path}"
                raise ConfigError("task", problem, "Choose kind: csv, or name one file and a partition that divides it")
            return path

        return self.relocated(checked)

    def relocated(self, locate: Callable[[str], str]) -> Self:
        return self

    def started_from(self, tensors: Sequence[TensorForm]) -> Self:
        return self


class ShippedTask(TaskSection, Task):
    """Base of tasks whose class is both the section of the file, and the model and the data.

    A strategy file validates without torch, so its modules import torch inside functions.
    """

    def build(self) -> Self:
        return self


_KINDS = (
    *("digits", "csv", "survey", "custom", "silo-app", "clientapp", "images", "sequences", "mlp", "linear"),
    *("k-means", "fuzzy-c-means", "gaussian-mixture", "factorisation"),
)
AnyTask = Annotated[TaskSection, Chosen("task", among=_KINDS)]
