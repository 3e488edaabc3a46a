"""Configuration of a Flower ClientApp as a task."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field

from fedsync.common.errors import ConfigError
from fedsync.config.sections.section import Section
from fedsync.config.tasks.task_trainers import OwnLoopSection
from fedsync.model.tensor_parts import UNSAID, PartPatterns
from fedsync.model.transfer import MAX_SEALED_BYTES
from fedsync.policies.schema import register
from fedsync.tasks.task_section import TensorForm

if TYPE_CHECKING:
    from fedsync.client.app import Silo
    from fedsync.train.local_trainer import LocalTrainer
    from fedsync.train.options import LocalOptions

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_MOST_VALUES = MAX_SEALED_BYTES // 4
"""Maximum number of values in a model that a server describes: the largest model that it could send."""

_MOST_TENSORS = 10_000


@dataclass(frozen=True, slots=True)
class CodePlace:
    """Location of a ``name`` in a user's ``file``, relative to the task's folder or absolute; ``module`` is the file's
    dotted name for the import, empty for a file that is given by its path.
    """

    file: Path
    module: str
    name: str

    @classmethod
    def parse(cls, text: str) -> CodePlace:
        where, _, name = text.rpartition(":")
        if not (where and name.isidentifier()):
            raise ValueError(f"{text!r} names no object; write package.module:name or folder/file.py:name")
        if where.endswith(".py"):
            return cls(Path(where), "", name)
        if not _DOTTED.fullmatch(where):
            raise ValueError(f"{where!r} is neither a module nor a Python file; write package.module:name")
        return cls(Path(*where.split(".")).with_suffix(".py"), where, name)

    def find(self, folder: Path, key: str, run: dict[str, ModuleType], *, call: bool = False) -> Any:
        """Run the file, unless it is in ``run``, and return the named object. With ``call``, the object will be called,
        which the silo's owner must allow by its name. Raises `ConfigError`, with ``key``, if this fails.
        """
        from fedsync.common.sandbox.named_code import run_file

        path = folder / self.file
        known = self.module or str(path)
        if call or known not in run:
            run[known] = run_file(path, key, self.module, self.name if call else "")
        found = getattr(run[known], self.name, None)
        if found is None:
            raise ConfigError(str(path), f"there is no {self.name} in it", f"Correct {key}")
        return found

    def root(self, path: Path) -> Path:
        return path.parents[self.module.count(".")]


class TensorConfig(Section):
    """One array of a model."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    """Name in the model's state dict."""

    dtype: Literal[
        "float16", "float32", "float64",
        "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool",
    ]  # fmt: skip
    """NumPy data type."""

    shape: Annotated[list[Annotated[int, Field(ge=0, le=_MOST_VALUES)]], Field(max_length=32)]
    """Length along each axis."""


def _names_code(text: str) -> str:
    CodePlace.parse(text)
    return text


_Code = Annotated[str, AfterValidator(_names_code)]


@register("clientapp")
@dataclass(frozen=True, slots=True)
class ClientAppConfig(OwnLoopSection):
    """An unmodified Flower ClientApp; see docs/flower-clientapp.md."""

    app: _Code
    """The ``ClientApp``: ``package.module:name`` as in ``pyproject.toml``, or ``folder/file.py:name``."""

    model: _Code | None = None
    """Class or function that makes the first model, in the same form as ``app``; it returns a module, a Flower
    ``ArrayRecord`` or a list of NumPy arrays. Left out, the ServerApp's ``initial_arrays`` are used."""

    folder: str = "."
    """Folder of the modules and of ``pyproject.toml``, whose ``tool.flwr.app.config`` the app finds in
    ``context.run_config``. Relative to the strategy file if the app exists there."""

    tensors: Annotated[list[TensorConfig], Field(max_length=_MOST_TENSORS)] = field(default_factory=list)
    """Tensors of the first model, if ``model`` is left out; filled in from a ServerApp's ``initial_arrays``."""

    def __post_init__(self) -> None:
        # `trainer` imports modules from one root folder.
        if self.model is not None and bool(CodePlace.parse(self.app).module) != bool(
            CodePlace.parse(self.model).module
        ):
            raise ValueError(f"app is {self.app!r} and model {self.model!r}; name modules in both, or files")
        size = sum(prod(max(axis, 1) for axis in tensor.shape) for tensor in self.tensors)
        if size > _MOST_VALUES:
            raise ValueError(f"tensors have {size} values, more than {_MOST_VALUES}")
        if len({tensor.name for tensor in self.tensors}) < len(self.tensors):
            raise ValueError("tensors have a name twice; give each its own")

    def relocated(self, locate: Callable[[str], str]) -> Self:
        app, folder = self._located(self.app, locate)
        model = None if self.model is None else self._located(self.model, locate)[0]
        return replace(self, app=app, model=model, folder=folder)

    def _located(self, text: str, locate: Callable[[str], str]) -> tuple[str, str]:
        place = CodePlace.parse(text)
        found = Path(locate(str(Path(self.folder) / place.file)))
        if not found.is_absolute():  # the file exists only at the silos
            return text, self.folder
        # `locate` also decides whether this folder may be read.
        root = locate(str(place.root(found)))
        return (text if place.module else f"{found}:{place.name}"), root

    def started_from(self, tensors: Sequence[TensorForm]) -> Self:
        if self.model is not None:
            return self
        made = [TensorConfig.model_validate({"name": n, "dtype": d, "shape": list(s)}) for n, d, s in tensors]
        return replace(self, tensors=made)

    def trainer(self, site: Silo, slots: int, options: LocalOptions, run: PartPatterns = UNSAID) -> LocalTrainer:
        from fedsync.train.guests.guest_clientapp import ClientAppTrainer, FirstModel

        folder, modules, place = Path(self.folder), dict[str, ModuleType](), CodePlace.parse(self.app)
        first = FirstModel(tensors=[(each.name, each.dtype, tuple(each.shape)) for each in self.tensors])
        if self.model is not None:
            first = FirstModel(make=CodePlace.parse(self.model).find(folder, "task.model", modules, call=True))
        app = place.find(folder, "task.app", modules)
        return ClientAppTrainer(app, first, site, slots, options, place.root(folder / place.file), run)
