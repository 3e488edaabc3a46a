"""Loader of a user's own Python file with one task."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from fedsync.common.errors import ConfigError
from fedsync.common.sandbox.named_code import place_of, run_file, tell, told
from fedsync.tasks.task_protocol import Task


def load_task(path: Path, options: Mapping[str, object]) -> Task:
    """Run the file at ``path``, which has exactly one subclass of `Task`, and make that task with ``options``.

    The file belongs to this silo's owner and runs with this process's rights; never load a file received over the
    network. Its folder is on the import path from then on. Raises `ConfigError` with the file, and the line if known.
    """
    task_class = _only_task(run_file(path, "task.file"), path)
    try:
        inspect.signature(task_class).bind(**options)
    except TypeError as error:
        problem = f"the options {sorted(options)} do not fit: {tell(error)}"
        remedy = f"It takes {told(str(inspect.signature(task_class)))}; correct task.options"
        raise ConfigError(f"{path}, class {told(task_class.__name__)}", problem, remedy) from error
    try:
        return task_class(**options)
    except ConfigError:
        raise
    except Exception as error:
        problem = f"making a {told(task_class.__name__)} failed: {tell(error)}"
        raise ConfigError(place_of(path, error), problem, "Correct the file or its options") from error


def _only_task(module: ModuleType, path: Path) -> type[Task]:
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Task) and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        names = ", ".join(value.__name__ for value in found) or "none"
        problem = f"one subclass of fedsync.tasks.task_protocol.Task is expected, found: {told(names)}"
        raise ConfigError(str(path), problem, "Define exactly one in the file; put others in a file of their own")
    return found[0]
