"""Descriptions of classes and fields for YAML users: the docstring, and the string below each field.

The source is parsed on demand. Pydantic's ``use_attribute_docstrings`` makes imports a quarter slower.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise


def meaning(owner: type) -> str:
    return _one_line(inspect.cleandoc(owner.__doc__ or "").split("\n\n")[0])


def meanings(owner: type) -> dict[str, str]:
    """Return the description of each key, on one line; a missing description comes from a base class."""
    found: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        if base.__module__.partition(".")[0] not in sys.stdlib_module_names | {"pydantic"}:
            found |= _fields_in(base.__module__).get(base.__name__, {})
    spelled: Mapping[str, str] = getattr(owner, "spelled", {})
    return {spelled.get(name, name): about for name, about in found.items()}


@cache
def _fields_in(module: str) -> Mapping[str, dict[str, str]]:
    source = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: dict(_keys(node)) for node in source.body if isinstance(node, ast.ClassDef)}


def _keys(owner: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for pair in pairwise(owner.body):
        match pair:
            case (
                ast.AnnAssign(target=ast.Name(id=key)) | ast.Assign(targets=[ast.Name(id=key)]),
                ast.Expr(value=ast.Constant(value=str(meaning))),
            ):
                yield key, _one_line(meaning)


def _one_line(text: str) -> str:
    return " ".join(text.split())
