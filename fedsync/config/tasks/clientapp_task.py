"""A Flower ClientApp as a task."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from fedsync.common.errors import ConfigError
from fedsync.config.sections.section import Scores, Section
from fedsync.config.tasks.sampled_tasks import OWN_LOOP_LIBRARIES, TaskSection, Tensor, has_own_loop
from fedsync.model.tensor_parts import UNSAID, PartPatterns
from fedsync.model.transfer import MAX_SEALED_BYTES

if TYPE_CHECKING:
    from fedsync.client.silo_facts import Silo
    from fedsync.tasks.task_protocol import Task
    from fedsync.train.local_trainer import LocalTrainer, ModelKeeper
    from fedsync.train.options import LocalOptions

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_MOST_VALUES = MAX_SEALED_BYTES // 4
"""Values of a model that a server describes: those of one that it could send."""

_MOST_TENSORS = 10_000


@dataclass(frozen=True, slots=True)
class CodePlace:
    """Where a name of a user's code is.

    Args:
        file: Python file, relative to the task's folder or absolute.
        module: dotted name that it is imported by; empty for a file that goes by its path.
        name: what is meant in it.
    """

    file: Path
    module: str
    name: str

    @classmethod
    def parse(cls, text: str) -> CodePlace:
        """Of ``package.module:name`` or ``folder/file.py:name``; raises ValueError."""
        where, _, name = text.rpartition(":")
        if not (where and name.isidentifier()):
            raise ValueError(f"{text!r} names nothing; write package.module:name or folder/file.py:name")
        if where.endswith(".py"):
            return cls(Path(where), "", name)
        if not _DOTTED.fullmatch(where):
            raise ValueError(f"{where!r} is neither a module nor a Python file; write package.module:name")
        return cls(Path(*where.split(".")).with_suffix(".py"), where, name)

    def find(self, folder: Path, key: str, run: dict[str, ModuleType], *, call: bool = False) -> Any:
        """What is meant.

        Args:
            folder: of the task.
            key: of the YAML file, which says it.
            run: files that were run for the task, by module or path; this one comes to them.
            call: whether it is called, which the silo's owner has to allow by its name.

        Raises:
            ConfigError: there is no such file, it does not run, or it defines no such name.
        """
        from fedsync.common.sandbox.named_code import run_file

        path = folder / self.file
        known = self.module or str(path)
        if call or known not in run:
            run[known] = run_file(path, key, self.module, self.name if call else "")
        found = getattr(run[known], self.name, None)
        if found is None:
            raise ConfigError(str(path), f"there is no {self.name} in it", f"Mend {key}")
        return found

    def root(self, path: Path) -> Path:
        """The folder that the file at ``path`` imports from."""
        return path.parents[self.module.count(".")]


class TensorConfig(Section):
    """One array of a model."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    """As in the model's state dict."""

    dtype: Literal[
        "float16", "float32", "float64",
        "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool",
    ]  # fmt: skip
    """NumPy's name of its type."""

    shape: Annotated[list[Annotated[int, Field(ge=0, le=_MOST_VALUES)]], Field(max_length=32)]
    """Its length along each axis."""


class ClientAppConfig(TaskSection):
    """A Flower ClientApp as it is; see docs/your-loop.md."""

    own_loop: ClassVar[bool] = True

    kind: Literal["clientapp"]
    app: str
    """The ``ClientApp``: ``package.module:name`` as in ``pyproject.toml``, or ``folder/file.py:name``."""

    model: str | None = None
    """What makes the first model, in the same form: a class or a function that gives a module, a Flower ``ArrayRecord``
    or a list of NumPy arrays. Left out, the ServerApp gives ``initial_arrays``."""

    folder: str = "."
    """The folder that modules are in, and ``pyproject.toml``, whose ``tool.flwr.app.config`` the app finds in
    ``context.run_config``; relative to the strategy file, where the app is there."""

    tensors: Annotated[list[TensorConfig], Field(max_length=_MOST_TENSORS)] = Field(default_factory=list)
    """What the first model consists of, where ``model`` is left out; a ServerApp's ``initial_arrays`` fill it in."""

    @property
    def libraries(self) -> tuple[str, ...]:
        return OWN_LOOP_LIBRARIES

    @property
    def scores(self) -> Scores:
        return "any"

    @property
    def deals_data(self) -> bool:
        return False

    @field_validator("app", "model")
    @classmethod
    def _names_code(cls, text: str | None) -> str | None:
        if text is not None:
            CodePlace.parse(text)
        return text

    @model_validator(mode="after")
    def _in_one_form(self) -> Self:
        # Modules are looked up in one folder at a time.
        if self.model is not None and bool(CodePlace.parse(self.app).module) != bool(
            CodePlace.parse(self.model).module
        ):
            raise ValueError(f"app is {self.app!r} and model {self.model!r}; name modules in both, or files")
        return self

    @model_validator(mode="after")
    def _of_a_size(self) -> Self:
        size = 0
        for tensor in self.tensors:
            values = 1
            for axis in tensor.shape:
                values *= max(axis, 1)
            size += values
        if size > _MOST_VALUES:
            raise ValueError(f"tensors have {size} values, more than {_MOST_VALUES}")
        if len({tensor.name for tensor in self.tensors}) < len(self.tensors):
            raise ValueError("tensors have a name twice; give each its own")
        return self

    def build(self) -> Task:
        """Raises `ConfigError`: nobody but the app knows model and data."""
        raise has_own_loop(self.kind)

    def relocated(self, locate: Callable[[str], str]) -> Self:
        app, folder = self._located(self.app, locate)
        model = None if self.model is None else self._located(self.model, locate)[0]
        return self.model_copy(update={"app": app, "model": model, "folder": folder})

    def _located(self, text: str, locate: Callable[[str], str]) -> tuple[str, str]:
        """The name of code and the folder of modules, as they are once paths are located."""
        place = CodePlace.parse(text)
        found = Path(locate(str(Path(self.folder) / place.file)))
        if not found.is_absolute():  # it is not here
            return text, self.folder
        # The folder, too, is to be one that may be read.
        root = locate(str(place.root(found)))
        return (text if place.module else f"{found}:{place.name}"), root

    def started_from(self, tensors: Sequence[Tensor]) -> Self:
        if self.model is not None:
            return self
        made = [TensorConfig.model_validate({"name": n, "dtype": d, "shape": list(s)}) for n, d, s in tensors]
        return self.model_copy(update={"tensors": made})

    def trainer(self, site: Silo, slots: int, options: LocalOptions, run: PartPatterns = UNSAID) -> LocalTrainer:
        from fedsync.train.guests.guest_clientapp import ClientAppTrainer, FirstModel

        folder, modules, place = Path(self.folder), dict[str, ModuleType](), CodePlace.parse(self.app)
        first = FirstModel(tensors=[(each.name, each.dtype, tuple(each.shape)) for each in self.tensors])
        if self.model is not None:
            first = FirstModel(make=CodePlace.parse(self.model).find(folder, "task.model", modules, call=True))
        app = place.find(folder, "task.app", modules)
        return ClientAppTrainer(app, first, site, slots, options, place.root(folder / place.file), run)

    def keeper(self, site: Silo, slots: int, options: LocalOptions, run: PartPatterns = UNSAID) -> ModelKeeper:
        """The trainer itself: the model is where the data are."""
        return self.trainer(site, slots, options, run)
