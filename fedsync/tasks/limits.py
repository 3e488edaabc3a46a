"""Range checks of options, for tasks that are built without a checked strategy file."""

from __future__ import annotations

from typing import get_type_hints

from annotated_types import Ge, Gt

from fedsync.common.errors import ConfigError


def check_bounds(task: object) -> None:
    """Raise `ConfigError` unless each option of a task is within the bounds of its annotation."""
    for name, hint in get_type_hints(type(task), include_extras=True).items():
        for bound in getattr(hint, "__metadata__", ()):
            match bound:
                case Ge(ge=limit):
                    at_least(f"task.{name}", getattr(task, name), limit)  # type: ignore[arg-type]  # a number
                case Gt(gt=limit) if not getattr(task, name) > limit:
                    problem = f"{getattr(task, name)} is not above {limit}"
                    raise ConfigError(f"task.{name}", problem, f"Write more than {limit}")


def at_least(place: str, value: float, limit: float) -> None:
    if not value >= limit:
        raise ConfigError(place, f"{value} is below {limit}", f"Write {limit} or more")
