"""YAML text to plain values, and validation errors to one clear message with file, line and remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from fedsync.config.section import Section, near_miss
from fedsync.core.errors import ConfigError

Model = TypeVar("Model", bound=Section)

_NUMBER_AS_TEXT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")


class YamlFile:
    """A parsed file that knows on which line each value stands.

    Args:
        name: how messages call it.
        text: its content.

    Raises:
        ConfigError: not YAML, not a mapping, or a key twice.
    """

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self._overridden: set[tuple[str, ...]] = set()
        try:
            self._root = yaml.compose(text, Loader=yaml.SafeLoader)
            self.data: dict[str, Any] = yaml.safe_load(text) or {}
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise ConfigError(f"{name}, line {line}", f"not YAML: {error.problem}", "Check the indentation") from error
        except (yaml.YAMLError, ValueError) as error:
            raise ConfigError(name, f"not YAML: {error}", "Save it as UTF-8 text") from error
        if not isinstance(self.data, dict):
            raise ConfigError(name, "not a mapping", "Write `key: value` lines")
        self._refuse_duplicates(self._root)

    @classmethod
    def read(cls, path: Path) -> YamlFile:
        """Read and parse a file.

        Raises:
            ConfigError: it is missing or unreadable, or as the constructor.
        """
        try:
            return cls(str(path), path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(str(path), f"cannot be read: {error}", "Check the path and the encoding") from error

    def override(self, assignments: Iterable[str]) -> None:
        """Apply ``a.b=value`` assignments; values are YAML.

        Raises:
            ConfigError: an assignment is malformed.
        """
        for assignment in assignments:
            key, equals, text = assignment.partition("=")
            path = tuple(key.strip().split("."))
            if not equals or not all(path):
                raise ConfigError(f"--set {assignment}", "not an assignment", "Write --set section.key=value")
            target = self.data
            for part in path[:-1]:
                inner = target.setdefault(part, {})
                if not isinstance(inner, dict):
                    raise ConfigError(f"--set {assignment}", f"{part!r} is not a section", f"Set {part!r} itself")
                target = inner
            try:
                target[path[-1]] = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ConfigError(f"--set {assignment}", f"{text!r} is not YAML", "Quote it") from error
            self._overridden.add(path)

    def validate(self, model: type[Model]) -> Model:
        """The data as ``model``.

        Raises:
            ConfigError: the first thing that is wrong, with its place and the remedy.
        """
        try:
            return model.model_validate(self.data)
        except ValidationError as error:
            raise self._explain(error.errors(include_url=False)[0]) from None

    def place(self, path: tuple[str, ...]) -> str:
        """``file, line N, a.b`` for a path into the data."""
        dotted = ".".join(path)
        if any(path[: len(done)] == done for done in self._overridden):
            return f"--set {dotted}"
        return ", ".join(part for part in (self.name, f"line {self._line(path)}", dotted) if part)

    def _line(self, path: tuple[str, ...]) -> int:
        node, line = self._root, 1
        for part in path:
            if isinstance(node, yaml.MappingNode):
                pairs = {key.value: (key, value) for key, value in node.value}
                if part not in pairs:
                    break
                key, node = pairs[part]
                line = key.start_mark.line + 1
            elif isinstance(node, yaml.SequenceNode) and part.isdigit() and int(part) < len(node.value):
                node = node.value[int(part)]
                line = node.start_mark.line + 1
        return line

    def _refuse_duplicates(self, node: yaml.Node | None) -> None:
        if isinstance(node, yaml.SequenceNode):
            for item in node.value:
                self._refuse_duplicates(item)
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in node.value:
                if key.value in seen:
                    place = f"{self.name}, line {key.start_mark.line + 1}"
                    raise ConfigError(place, f"the key {key.value!r} stands twice", "Remove one of the two")
                seen.add(key.value)
                self._refuse_duplicates(value)

    def _explain(self, error: ErrorDetails) -> ConfigError:
        path = self._data_path(error["loc"])
        context, found = error.get("ctx", {}), error.get("input")
        match error["type"]:
            case "unknown_key":
                path = (*path, str(context["key"]))
                return ConfigError(self.place(path), "unknown key", str(context["hint"]))
            case "union_tag_invalid":
                path = (*path, "kind")
                tags = re.findall(r"'([^']*)'", str(context["expected_tags"]))
                return ConfigError(
                    self.place(path), f"unknown kind {context['tag']!r}", near_miss(context["tag"], tags)
                )
            case "union_tag_not_found":
                return ConfigError(self.place(path), "no kind is chosen", "Write `kind: ...` in this section")
            case "missing":
                return ConfigError(self.place(path), "missing", "Add this key")
            case "value_error" | "impossible":
                return ConfigError(self.place(path), str(context.get("error", error["msg"])), "Change one of the two")
        if isinstance(found, str) and _NUMBER_AS_TEXT.fullmatch(found.strip()):
            remedy = f"YAML reads {found!r} as text: write {float(found)!r}, with a decimal point"
            return ConfigError(self.place(path), f"{found!r} is text, not a number", remedy)
        return ConfigError(self.place(path), f"{_shown(found)} is not allowed", f"{error['msg']}")

    def _data_path(self, location: tuple[int | str, ...]) -> tuple[str, ...]:
        """Pydantic's location without the tags of unions, which do not stand in the file."""
        path: list[str] = []
        node: Any = self.data
        for part in location:
            if isinstance(node, Mapping) and part not in node and node.get("kind") == part:
                continue
            path.append(str(part))
            if isinstance(node, Mapping):
                node = node.get(part)
            elif isinstance(node, list) and isinstance(part, int) and part < len(node):
                node = node[part]
        return tuple(path)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
