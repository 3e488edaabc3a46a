"""JSON codec for dataclasses: one format for the journal, Flower's wire, the trainer's socket and the disk.

The type hints of a frozen dataclass are its schema. A dataclass becomes an object and a tuple a list. In a union of
dataclasses, the object carries its class name as ``type``. A field equal to its default is omitted, so a new optional
field does not change existing files. Floats survive bit by bit; NaN and the infinities are written as text.

Reading is strict, because peers are untrusted: no unknown fields, no missing fields, no number instead of a text. A
peer's numbers are finite and below 2^64, and its texts are printable. Only input that this program wrote itself
(``own``) may hold more: a journal holds the NaN of a rejected report, and error texts of several lines.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache
from typing import Annotated, Any

MAX_WHOLE = 2**64
"""Bound of a peer's integers; their meaning is checked where they are used."""

_TAG = "type"
_NO_JSON = {"nan", "inf", "-inf"}

Coder = Callable[[Any], Any]

Sum = Annotated[float, "whole numbers in short"]
"""Float that is mostly a count: written as 3, not 3.0."""

_EXACT = 2.0**53
"""Every integer below is a float exactly."""


class DecodeError(ValueError):
    """Value that does not fit its type. ``problem`` is short and printable; ``place`` has field names, outer first."""

    def __init__(self, problem: str, place: tuple[str, ...] = ()) -> None:
        super().__init__(problem, place)
        self.problem, self.place = problem, place

    def __str__(self) -> str:
        return f"{'.'.join(self.place)}: {self.problem}" if self.place else self.problem

    def inside(self, name: object) -> DecodeError:
        return DecodeError(self.problem, (f"{name!r:.40}".strip("'"), *self.place))


_to_json = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def dumps(value: Any, kind: Any = None) -> str:
    return _to_json(encode(value, kind))


def loads(kind: Any, text: str | bytes, *, own: bool = False) -> Any:
    """Read a value written by `dumps`; raises `DecodeError` if the text is no JSON or does not fit the type."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also too many digits, or bytes that are no text
        raise DecodeError(f"not JSON: {type(error).__name__}: {str(error)[:80]}") from error
    return decode(kind, value, own=own)


def encode(value: Any, kind: Any = None) -> Any:
    """Convert a value for `json`; ``kind`` is its type if that is a union, else None, which writes no ``type``."""
    if kind is None:
        kind = type(value)
    return _encoder(kind)(value)


def decode(kind: Any, value: Any, *, own: bool = False) -> Any:
    """Convert what `json` read to a value of type ``kind``; raises `DecodeError`, naming the field, if it cannot."""
    return _decoder(kind, own)(value)


@cache
def _fields(kind: type) -> tuple[tuple[str, Any, Any], ...]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return tuple(
        (each.name, hints[each.name], each.default if each.default_factory is dataclasses.MISSING
         else each.default_factory())
        for each in dataclasses.fields(kind)
    )  # fmt: skip


def _members(kind: Any) -> tuple[list[Any], bool] | None:
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return None
    members = typing.get_args(kind)
    return [each for each in members if each is not types.NoneType], types.NoneType in members


@cache
def _encoder(kind: Any) -> Coder:
    union, origin, arguments = _members(kind), typing.get_origin(kind), typing.get_args(kind)
    if union is not None:
        members, optional = union
        if len(members) == 1:
            inner = _encoder(members[0])
            return lambda value: None if value is None else inner(value)
        tagged = {each: _object_encoder(each, {_TAG: each.__name__}) for each in members}
        return lambda value: None if optional and value is None else tagged[type(value)](value)
    if origin is tuple:
        item = _encoder(arguments[0])
        return lambda value: [item(each) for each in value]
    if origin is Mapping:
        part = _encoder(arguments[1])
        return lambda value: {key: part(each) for key, each in value.items()}
    if dataclasses.is_dataclass(kind):
        return _object_encoder(typing.cast(type, kind), {})
    if kind is Sum:
        return _in_short
    if kind is float:
        return lambda value: value if math.isfinite(value) else str(value)
    return lambda value: value


def _in_short(value: float) -> int | float | str:
    if -_EXACT < value < _EXACT and value == int(value) and (value or math.copysign(1, value) > 0):
        return int(value)
    return value if math.isfinite(value) else str(value)


def _object_encoder(kind: type, start: dict[str, Any]) -> Coder:
    parts = [(name, default, _encoder(hint)) for name, hint, default in _fields(kind)]

    def write(value: Any) -> dict[str, Any]:
        made = start.copy()
        for name, default, encoded in parts:
            each = getattr(value, name)
            # A value can be equal to the default and yet different: -0.0 and 0.0, 1 and True.
            if default is dataclasses.MISSING or each != default or not _same(each, default):
                made[name] = encoded(each)
        return made

    return write


def _same(value: Any, default: Any) -> bool:
    return value is default or (not isinstance(default, float | int)) or repr(value) == repr(default)


@cache
def _decoder(kind: Any, own: bool) -> Coder:
    union, origin, arguments = _members(kind), typing.get_origin(kind), typing.get_args(kind)
    if union is not None:
        return _union_decoder(*union, own)
    if kind is Sum:
        return _decoder(float, own)
    if origin is tuple:
        return _list_decoder(_decoder(arguments[0], own))
    if origin is Mapping:
        return _mapping_decoder(_decoder(arguments[0], own), _decoder(arguments[1], own))
    if dataclasses.is_dataclass(kind):
        return _object_decoder(typing.cast(type, kind), own)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return _word_decoder(kind)
    return _OWN[kind] if own else _PEERS[kind]


def _union_decoder(members: list[Any], optional: bool, own: bool) -> Coder:
    if len(members) == 1:
        inner = _decoder(members[0], own)
        return lambda value: None if value is None else inner(value)
    by_name = {each.__name__: _object_decoder(each, own, tagged=True) for each in members}

    def read(value: Any) -> Any:
        if optional and value is None:
            return None
        tag = _expect(dict, value).get(_TAG)
        part = by_name.get(tag) if isinstance(tag, str) else None
        if part is None:
            raise DecodeError(f"{_TAG} {tag!r:.40} is none of {', '.join(by_name)}")
        return part(value)

    return read


def _object_decoder(kind: type, own: bool, tagged: bool = False) -> Coder:
    parts = {name: _decoder(hint, own) for name, hint, _ in _fields(kind)}
    required = {name for name, _, default in _fields(kind) if default is dataclasses.MISSING}
    if tagged:
        parts[_TAG] = str

    def read(value: Any) -> Any:
        _expect(dict, value)
        made, name = {}, ""
        try:
            for name, each in value.items():
                made[name] = parts[name](each)
        except DecodeError as error:
            raise error.inside(name) from None
        except KeyError:
            raise DecodeError(f"unknown field {name!r:.40}") from None
        if not made.keys() >= required:
            raise DecodeError(f"no {min(required - made.keys())!r}")
        if tagged:
            del made[_TAG]
        return kind(**made)

    return read


def _word_decoder(kind: type[StrEnum]) -> Coder:
    words = {each.value: each for each in kind}

    def read(value: Any) -> Any:
        word = words.get(_expect(str, value))
        if word is None:
            raise DecodeError(f"{value!r:.40} is none of {', '.join(words)}")
        return word

    return read


def _list_decoder(item: Coder) -> Coder:
    def read(value: Any) -> Any:
        made: list[Any] = []
        _expect(list, value)
        try:
            for each in value:
                made.append(item(each))
        except DecodeError as error:
            raise error.inside(len(made)) from None
        return tuple(made)

    return read


def _mapping_decoder(of_key: Coder, of_value: Coder) -> Coder:
    def read(value: Any) -> Any:
        made, key = {}, ""
        _expect(dict, value)
        try:
            for key, each in value.items():
                made[of_key(key)] = of_value(each)
        except DecodeError as error:
            raise error.inside(key) from None
        return made

    return read


_NAMES = {
    bool: "true or false", int: "a whole number", str: "a text", bytes: "bytes", dict: "an object", list: "a list"
}  # fmt: skip


def _expect(kind: type, value: Any) -> Any:
    if type(value) is not kind:  # a bool is an int to Python
        raise DecodeError(f"{_NAMES[kind]} is due, not {type(value).__name__}")
    return value


def _number(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is not int:
        raise DecodeError(f"a number is due, not {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise DecodeError("a number far too large") from None


def _peers_number(value: Any) -> float:
    number = _number(value)
    if not math.isfinite(number):
        raise DecodeError("a number that is none")
    return number


def _own_number(value: Any) -> float:
    if type(value) is float:
        return value
    return float(value) if type(value) is str and value in _NO_JSON else _number(value)


def _peers_whole(value: Any) -> int:
    number: int = _expect(int, value)
    if not -MAX_WHOLE < number < MAX_WHOLE:
        raise DecodeError("a number far too large")
    return number


def _peers_text(value: Any) -> str:
    text: str = _expect(str, value)
    if not text.isprintable():
        raise DecodeError("a text that does not print")
    return text


_OWN: dict[Any, Coder] = {
    bool: lambda value: _expect(bool, value),
    int: lambda value: _expect(int, value),
    float: _own_number,
    str: lambda value: _expect(str, value),
    bytes: lambda value: _expect(bytes, value),  # JSON has no bytes: the caller stores them beside the JSON
}
_PEERS: dict[Any, Coder] = {bool: _OWN[bool], int: _peers_whole, float: _peers_number, str: _peers_text}
