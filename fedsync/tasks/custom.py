"""Users' own Python files beside the YAML: one with a task, one with policies."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from fedsync.common.fence import fence_here, open_data
from fedsync.core.errors import ConfigError
from fedsync.tasks.protocol import Task

_NAME = "fedsync_file_"


def load_task(path: Path, options: Mapping[str, object]) -> Task:
    """Run the file at ``path`` and make the one task that it defines.

    The file is code of this silo's owner, run with this process's rights: never one that came by wire. It imports what
    lies beside it as a script does, at once or later. A task from another folder ends that: what this one has imported
    it keeps, and what it imports from then on is looked for beside the other.

    Args:
        path: a Python file with exactly one subclass of `Task`.
        options: keyword arguments of its constructor.

    Raises:
        ConfigError: no such file, it does not run, it defines no task or several, the options do not
            fit, or the constructor fails. Names the file, and the line where there is one.
    """
    task_class = _only_task(run_file(path, "task.file"), path)
    try:
        inspect.signature(task_class).bind(**options)
    except TypeError as error:
        raise ConfigError(
            f"{path}, class {_told(task_class.__name__)}",
            f"the options {sorted(options)} do not fit: {_tell(error)}",
            f"It takes {_told(str(inspect.signature(task_class)))}; mend task.options",
        ) from error
    try:
        return task_class(**options)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            _place(path, error),
            f"making a {_told(task_class.__name__)} failed: {_tell(error)}",
            "Mend the file or its options",
        ) from error


def run_file(path: Path, key: str, module_name: str = "") -> ModuleType:
    """Run a user's file as a module, once more if it was run before.

    Args:
        path: a Python file.
        key: of the YAML file, which names it.
        module_name: with dots, where the file belongs to a package: it then imports from the package's folder.

    Raises:
        ConfigError: no such file, or it does not run. Names the file, and the line where there is one.
    """
    if not path.is_file():
        raise ConfigError(str(path), "there is no such file", f"Mend {key}; it is relative to the YAML file")
    name = module_name or f"{_NAME}{zlib.crc32(str(path.resolve()).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise ConfigError(str(path), "this is not a Python file", "Give it a name that ends in .py")
    module = importlib.util.module_from_spec(spec)
    _neighbours.go_to(path.resolve().parents[name.count(".")])
    try:
        if module.__package__:
            importlib.import_module(module.__package__)
        # Dataclasses and pickle look a class's module up there.
        sys.modules[name] = module
        # Not by the loader, which opens whatever the path leads to by then, and runs bytecode from beside it.
        with open_data(path) as source:
            exec(compile(source.read(), str(path), "exec"), vars(module))
    except ConfigError:
        sys.modules.pop(name, None)
        raise
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        raise ConfigError(_place(path, error), f"running the file failed: {_tell(error)}", "Mend the file") from error
    return module


class _Neighbours:
    """Has the modules beside one task's file be found, those in one folder at a time.

    Modules go by their bare names, so those of two folders would be taken for each other.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._before: frozenset[str] = frozenset()

    def go_to(self, folder: Path) -> None:
        """Look in this folder first, and forget what was imported from the one before."""
        if folder != self._folder:
            self._leave()
            self._folder, self._before = folder, frozenset(sys.modules)
            sys.path.insert(0, str(folder))
        elif str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
        # Files may have come since somebody looked.
        importlib.invalidate_caches()

    def _leave(self) -> None:
        if self._folder is None:
            return
        if str(self._folder) in sys.path:
            sys.path.remove(str(self._folder))
        gone = {name for name in sys.modules.keys() - self._before if self._is_beside(name)}
        for name in [name for name in sys.modules if name.partition(".")[0] in gone]:
            sys.modules.pop(name, None)

    def _is_beside(self, name: str) -> bool:
        """Whether it is a module or package in the folder itself, and no task's file."""
        if "." in name or name.startswith(_NAME):
            return False
        module = sys.modules[name]
        places = getattr(module, "__path__", None) or [getattr(module, "__file__", None)]
        return any(place is not None and Path(place).parent == self._folder for place in places)


_neighbours = _Neighbours()


def _only_task(module: ModuleType, path: Path) -> type[Task]:
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Task) and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        names = ", ".join(value.__name__ for value in found) or "none"
        raise ConfigError(
            str(path),
            f"one subclass of fedsync.tasks.protocol.Task is wanted, found: {_told(names)}",
            "Define exactly one in the file; put others in a file of their own",
        )
    return found[0]


def _place(path: Path, error: BaseException) -> str:
    """The file and, if the error passed through it, the last line there."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{path}, line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}, line {lines[-1]}" if lines else str(path)


def _tell(error: BaseException) -> str:
    return f"{type(error).__name__}: {_told(str(error))}"


def _told(text: str) -> str:
    """Words of a file's, for whoever tries it out; where the silo has an owner, others hear of errors too."""
    return text if fence_here() is None else "(not told)"
