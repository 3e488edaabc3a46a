"""What the keys of a section mean: the string below each of them in the source.

It is read when somebody asks. Pydantic's ``use_attribute_docstrings`` finds the same, but at every import, which would
take a quarter longer.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise

from pydantic import BaseModel


def meanings(section: type[BaseModel]) -> dict[str, str]:
    """What each key of a section means, on one line.

    Where a section does not say it, its bases do. ``kind`` chooses the section, and means what the section is: the
    first paragraph of its docstring.
    """
    found: dict[str, str] = {}
    for owner in reversed(section.__mro__):
        if issubclass(owner, BaseModel) and owner is not BaseModel:
            found |= _told(owner.__module__).get(owner.__name__, {})
    if "kind" in section.model_fields:
        found["kind"] = _one_line((section.__doc__ or "").split("\n\n")[0])
    return found


@cache
def _told(module: str) -> Mapping[str, dict[str, str]]:
    """What the source of a module says: class -> key -> meaning."""
    source = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: dict(_keys(node)) for node in source.body if isinstance(node, ast.ClassDef)}


def _keys(section: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for pair in pairwise(section.body):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(value=ast.Constant(value=str(meaning))):
                yield key, _one_line(meaning)


def _one_line(text: str) -> str:
    return " ".join(text.split())
