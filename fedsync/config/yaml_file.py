"""YAML files with line numbers, and validation errors as messages with file, line and remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from fedsync.common.errors import ConfigError
from fedsync.common.names import near_miss
from fedsync.config.sections.section import Section

Model = TypeVar("Model", bound=Section)

_TAKEN_FOR = {
    "tag:yaml.org,2002:int": "a whole number",
    "tag:yaml.org,2002:float": "a number",
    "tag:yaml.org,2002:bool": "true or false",
    "tag:yaml.org,2002:timestamp": "a date",
}
_SLIPS = (ValueError, ArithmeticError, LookupError, AttributeError, TypeError)
"""Exceptions of PyYAML, without line or cause, for text that does not fit the type that PyYAML assumed."""
_AS_IT_LOOKS = {
    "tag:yaml.org,2002:int": re.compile(r"[+-]?(0|[1-9][0-9]*)"),
    "tag:yaml.org,2002:float": re.compile(r"[^:_]*"),
    "tag:yaml.org,2002:bool": re.compile(r"true|false", re.IGNORECASE),
}
"""Spellings that are not misread: YAML reads 010 as 8, 1:30 as 90, and no as false."""
_MERGE, _TEXT = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:str"
_PLAIN = "Quote it, or write a plain value"
_MOST_UNKNOWN = 100
"""Maximum number of unknown keys of one section that are found."""
_QUOTED = re.compile(r"'([^']*)'")
_DOTTED_KEY = re.compile(r"\b[a-z_]+\.[a-z_]+\b")
_PLAIN_TYPES = ("bool", "int", "float", "str")
_SECTION_EXPECTED = ("model_type", "model_attributes_type", "dataclass_type", "dict_type")
_REMEDIES = {
    "int": "Write a whole number",
    "float": "Write a number",
    "bool": "Write true or false",
    "string_type": "Write text, in quotes if need be",
    "string_pattern_mismatch": "Write text of the form {pattern}",
    "list": "Write a list: [...]",
    "finite_number": "Write a finite number",
    "greater_than": "Write a number greater than {gt}",
    "greater_than_equal": "Write a number of at least {ge}",
    "less_than": "Write a number less than {lt}",
    "less_than_equal": "Write a number of at most {le}",
    "too_short": "Write a list of at least {min_length} entries",
    "too_long": "Write a list of at most {max_length} entries",
}
"""Remedy by type of pydantic error, or by its prefix; the longest matching prefix applies."""


class _NoValueError(yaml.MarkedYAMLError):
    """Well-formed YAML with a value that cannot be converted."""


class _Loader(yaml.SafeLoader):
    """Safe loader with text keys that refuses values that YAML would misread, and names their line."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                key.tag = _TEXT
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int):
                str(value)  # Python reads any number in base 16, but writes at most 4300 digits in base 10
        except _SLIPS as error:
            found = _shown(node.value) if isinstance(node, yaml.ScalarNode) else "this"
            problem = f"YAML takes {found} for {_TAKEN_FOR.get(node.tag, 'something else')}, and can make nothing of it"
            raise _NoValueError(problem=problem, problem_mark=node.start_mark) from error
        looks = _AS_IT_LOOKS.get(node.tag)
        if looks is not None and not looks.fullmatch(node.value):
            meant = str(value).lower() if isinstance(value, bool) else value
            raise _NoValueError(problem=f"YAML takes {_shown(node.value)} for {meant}", problem_mark=node.start_mark)
        return value


# YAML 1.1 reads these numbers as text.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+$"), list("+-.0123456789")
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[+-]?0[oO][0-7]+$"), list("+-0"))


def _parsed(text: str) -> tuple[yaml.Node | None, Any]:
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        # Construction replaces merge keys in the nodes, so such a text is parsed again for its values.
        whole = root is not None and "<<" not in text
        return root, loader.construct_document(root) if whole else yaml.load(text, Loader=_Loader)
    except RecursionError as error:
        raise _NoValueError(problem="nested too deeply", problem_mark=loader.get_mark()) from error
    except _SLIPS as error:
        raise _NoValueError(problem=f"not YAML: {error}", problem_mark=loader.get_mark()) from error


class YamlFile:
    """Parsed YAML file that knows the line of each value; ``name`` is its name in errors.

    Raises `ConfigError` if the text is not YAML or not a mapping, a value cannot be converted, or a key occurs twice.
    """

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self._given: dict[tuple[str, ...], str] = {}
        try:
            self._root, data = _parsed(text)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            place, problem = f"{name}, line {line}", f"{error.problem}"
            if isinstance(error, _NoValueError):
                raise ConfigError(place, problem, _PLAIN) from error
            raise ConfigError(place, f"not YAML: {problem}", "Check indentation, quotes and brackets") from error
        except yaml.YAMLError as error:
            problem = " ".join(f"not YAML: {error}".split())
            raise ConfigError(name, problem, "Save it as UTF-8 text") from error
        self.data: dict[str, Any] = data or {}
        if not isinstance(self.data, dict):
            raise ConfigError(name, "not a mapping", "Write `key: value` lines")
        self._refuse_duplicates(self._root)

    @classmethod
    def read(cls, path: Path) -> YamlFile:
        try:
            return cls(str(path), path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(str(path), f"cannot be read: {error}", "Check the path and the encoding") from error

    def override(self, assignments: Iterable[str]) -> None:
        """Apply ``a.b=value`` assignments, whose values are YAML; raises `ConfigError` for a malformed one."""
        for assignment in [assignments] if isinstance(assignments, str) else assignments:
            key, equals, text = assignment.partition("=")
            path, place = tuple(key.strip().split(".")), f"--set {_short(assignment)}"
            if not equals or not all(path):
                raise ConfigError(place, "not an assignment", "Write --set section.key=value")
            try:
                self._put(path, _parsed(text)[1], place, "--set")
            except _NoValueError as error:
                raise ConfigError(place, str(error.problem), _PLAIN) from error
            except yaml.YAMLError as error:
                raise ConfigError(place, f"{_shown(text)} is not YAML", _PLAIN) from error

    def put(self, key: str, value: object, place: str) -> None:
        self._put(tuple(key.split(".")), value, place, place)

    def _put(self, path: tuple[str, ...], value: object, place: str, origin: str) -> None:
        target = self.data
        for depth, part in enumerate(path[:-1], 1):
            if part not in target:
                self._given[path[:depth]] = origin
            if not isinstance(inner := target.get(part, {}), dict):
                raise ConfigError(place, f"{part!r} is not a section", f"Set {part!r} itself")
            target[part] = target = dict(inner)  # an alias elsewhere in the file keeps its value
        target[path[-1]] = value
        self._given[path] = origin

    def validate(self, model: type[Model]) -> Model:
        """Return the data as ``model``; raises the first `ConfigError`, whose `others` are the other errors."""
        try:
            return model.model_validate(self.data)
        except ValidationError as error:
            first, *others = self._mistakes(model, error)
            first.others = tuple(others)
            raise first from None

    def _mistakes(self, model: type[Model], error: ValidationError) -> list[ConfigError]:
        """Return all errors in file order. Unknown keys hide other errors, so they are removed and the rest retried."""
        found: dict[str, ConfigError] = {}
        data = deepcopy(self.data)
        for _ in range(_MOST_UNKNOWN):
            errors = [each for each in error.errors(include_url=False) if each["type"] != "default_factory_not_called"]
            for mistake in (mistake for each in errors for mistake in self._explain(each)):
                found.setdefault(str(mistake), mistake)
            unknown = [each for each in errors if each["type"] == "unknown_key"]
            for each in unknown:
                section: Any = data
                for part in self._data_path(each["loc"]):
                    section = section[int(part) if isinstance(section, list) else part]
                del section[each["ctx"]["key"]]
            try:
                if not unknown or model.model_validate(data):
                    break
            except ValidationError as more:
                error = more
        return sorted(found.values(), key=self._order)

    @staticmethod
    def _order(mistake: ConfigError) -> tuple[bool, int]:
        line = re.search(r"line (\d+)", mistake.place)
        return mistake.problem == "missing", int(line[1]) if line else 0

    def place(self, path: tuple[str, ...]) -> str:
        """Return ``file, line N, a.b`` for a path into the data, or the other origin of the value, such as --set."""
        dotted = ".".join(path)
        for done, place in reversed(self._given.items()):
            if path[: len(done)] == done:
                return f"{place} {dotted}" if place == "--set" else place
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

    def _refuse_duplicates(self, node: yaml.Node | None, above: tuple[yaml.Node, ...] = ()) -> None:
        if not isinstance(node, yaml.CollectionNode):
            return
        if node in above:
            place = f"{self.name}, line {node.start_mark.line + 1}"
            raise ConfigError(place, "the value contains itself", "Remove the alias")
        seen: set[str] = set()
        for item in node.value:
            if isinstance(node, yaml.MappingNode):
                key, item = item
                if key.value in seen:
                    place = f"{self.name}, line {key.start_mark.line + 1}"
                    raise ConfigError(place, f"the key {key.value!r} occurs twice", "Remove one of the two")
                seen.add(key.value)
            self._refuse_duplicates(item, (*above, node))

    def _explain(self, error: ErrorDetails) -> list[ConfigError]:
        if error["type"] == "value_error":
            path, told = self._data_path(error["loc"]), str(error.get("ctx", {}).get("error", error["msg"]))
            return [self._disagreement(path, message) for message in told.splitlines()]
        return [self._explained(error)]

    def _explained(self, error: ErrorDetails) -> ConfigError:
        path = self._data_path(error["loc"])
        context, found, kind = error.get("ctx", {}), error.get("input"), error["type"]
        match kind:
            case "unknown_key":
                path = (*path, str(context["key"]))
                return ConfigError(self.place(path), "unknown key", str(context["hint"]))
            case "union_tag_invalid":
                tags = _QUOTED.findall(str(context["expected_tags"]))
                return self._unknown_kind((*path, "kind"), context["tag"], tags)
            case "literal_error" if path[-1:] == ("kind",):
                return self._unknown_kind(path, found, _QUOTED.findall(str(context["expected"])))
            case "union_tag_not_found":
                return self._no_kind(path)
            case "missing" if path[-1:] == ("kind",):
                return self._no_kind(path[:-1])
            case "missing":
                return ConfigError(self.place(path), "missing", "Add this key")
        if found is None:
            problem = "the value is empty"
        elif kind in _SECTION_EXPECTED:
            problem = f"a section is expected here, not {_shown(found)}"
        else:
            problem = f"{_shown(found)} is not allowed"
        one_of = error["loc"][-1] in _PLAIN_TYPES and path[-1:] != error["loc"][-1:]
        return ConfigError(self.place(path), problem, "Write a number or text" if one_of else _remedy(error, path))

    def _unknown_kind(self, path: tuple[str, ...], found: object, allowed: list[str]) -> ConfigError:
        remedy = near_miss(str(found), allowed) if allowed else "Name a plugin that registers it"
        return ConfigError(self.place(path), f"unknown kind {str(found)!r}", remedy)

    def _no_kind(self, path: tuple[str, ...]) -> ConfigError:
        return ConfigError(self.place(path), "no kind is chosen", "Write `kind: ...` in this section")

    def _disagreement(self, path: tuple[str, ...], message: str) -> ConfigError:
        """Parse a validator's message ``[key ]problem[; remedy]``; a key that is in the file gives the line."""
        problem, _, remedy = message.partition("; ")
        key, _, rest = problem.partition(" ")
        if not path and "." in key and key.split(".")[0] in self.data:
            path, problem = tuple(key.split(".")), rest
        if not remedy:
            remedy = "Change one of the two" if len(_DOTTED_KEY.findall(message)) > 1 else "Change it"
        return ConfigError(self.place(path), problem, remedy[0].upper() + remedy[1:])

    def _data_path(self, location: tuple[int | str, ...]) -> tuple[str, ...]:
        """Return pydantic's location without tags of unions: a ``kind``, a tag with ~, or the type of a plain value."""
        path: list[str] = []
        node: Any = self.data
        for part in location:
            section = node if isinstance(node, Mapping) else {}
            if str(part).startswith("~") or (part not in section and part in (section.get("kind"), *_PLAIN_TYPES)):
                continue
            path.append(str(part))
            if isinstance(node, Mapping):
                node = node.get(part)
            elif isinstance(node, list) and isinstance(part, int) and part < len(node):
                node = node[part]
        return tuple(path)


def _remedy(error: ErrorDetails, path: tuple[str, ...]) -> str:
    context, found, kind = error.get("ctx", {}), error.get("input"), error["type"]
    if kind in _SECTION_EXPECTED:
        key = "" if not path or path[-1].isdigit() else f"{path[-1]}: "
        content = f"kind: {found}" if isinstance(found, str) and _has_kind(error) else "key: value"
        return f"Write {key}{{{content}}}"
    if kind == "literal_error":
        return near_miss(str(found), _QUOTED.findall(context["expected"]) or re.split(", | or ", context["expected"]))
    fitting = [name for name in _REMEDIES if kind.startswith(name)]
    if not fitting:
        return error["msg"]
    return _REMEDIES[max(fitting, key=len)].format_map({name: _plain(value) for name, value in context.items()})


def _has_kind(error: ErrorDetails) -> bool:
    name = error.get("ctx", {}).get("class_name")
    sections = [section for section in Section.__subclasses__() if section.__name__ == name]
    return name is None or any("kind" in section.model_fields for section in sections)


def _plain(value: object) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).removeprefix("^").removesuffix("$")


def _shown(value: object) -> str:
    return _short(repr(value))


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
