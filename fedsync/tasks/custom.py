"""A user's own task, from one Python file of theirs."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from fedsync.core.errors import ConfigError
from fedsync.tasks.protocol import Task


def load_task(path: Path, options: Mapping[str, object]) -> Task:
    """Run the file at ``path`` and make the one task that it defines.

    The file is code of this silo's owner, run with this process's rights: never one that came by wire.

    Args:
        path: a Python file with exactly one subclass of `Task`.
        options: keyword arguments of its constructor.

    Raises:
        ConfigError: no such file, it does not run, it defines no task or several, the options do not
            fit, or the constructor fails. Names the file, and the line where there is one.
    """
    task_class = _only_task(_run(path), path)
    try:
        inspect.signature(task_class).bind(**options)
    except TypeError as error:
        raise ConfigError(
            f"{path}, class {task_class.__name__}",
            f"the options {sorted(options)} do not fit: {error}",
            f"It takes {inspect.signature(task_class)}; mend task.options",
        ) from error
    try:
        return task_class(**options)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            _place(path, error),
            f"making a {task_class.__name__} failed: {_tell(error)}",
            "Mend the file or its options",
        ) from error


def _run(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(str(path), "there is no such file", "Mend task.file; it is relative to the YAML file")
    name = f"fedsync_task_{zlib.crc32(str(path.resolve()).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(str(path), "this is not a Python file", "Give it a name that ends in .py")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look a class's module up there.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(_place(path, error), f"running the file failed: {_tell(error)}", "Mend the file") from error
    return module


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
            f"one subclass of fedsync.tasks.protocol.Task is wanted, found: {names}",
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
    return f"{type(error).__name__}: {error}"
