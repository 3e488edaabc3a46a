"""Values that are built quickly: every order makes a dozen of them."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

V = TypeVar("V")

_ABSENT: Any = object()


def fast_dataclass(kind: type[V]) -> type[V]:
    """Give a frozen, slotted dataclass an ``__init__`` that does the same in half the time.

    What `dataclasses` writes for a frozen class sets each field by ``object.__setattr__``, which looks its slot up by
    name: 110 ns a field. This one calls the slots themselves: 60 ns. Frozen it is still.

    Args:
        kind: without ``__post_init__``, every field a parameter.
    """
    known: dict[str, Any] = {"_absent": _ABSENT}
    parameters, lines = ["self"], []
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]  # any dataclass, which no type can say
        name, value = field.name, field.name
        known[f"_set_{name}"] = getattr(kind, name).__set__
        if field.default_factory is not dataclasses.MISSING:
            known[f"_make_{name}"] = field.default_factory
            parameters.append(f"{name}=_absent")
            value = f"_make_{name}() if {name} is _absent else {name}"
        elif field.default is not dataclasses.MISSING:
            known[f"_default_{name}"] = field.default
            parameters.append(f"{name}=_default_{name}")
        else:
            parameters.append(name)
        lines.append(f"    _set_{name}(self, {value})")
    exec("\n".join([f"def __init__({', '.join(parameters)}):", *lines]), known)  # as `dataclasses` does
    made = known["__init__"]
    made.__qualname__ = f"{kind.__qualname__}.__init__"
    made.__annotations__ = kind.__init__.__annotations__
    type.__setattr__(kind, "__init__", made)
    return kind
