"""What was written reads back exactly, defaults are left out, and what a peer wrote is read strictly."""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsync.common.codec import MAX_WHOLE, DecodeError, dumps, encode, loads
from fedsync.core.actions import Action, Commit, Stop
from fedsync.core.events import Event, TimerFired
from fedsync.core.journal import JournalEntry
from fedsync.core.orders import Evaluation

FINITE = st.floats(allow_nan=False, allow_infinity=False)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of a type hint of the core types, so that new events and fields are covered by themselves."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values_of, arguments))
    if origin is tuple:
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    if origin is Mapping:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=3)
    if dataclasses.is_dataclass(hint):
        return st.builds(hint, **{name: values_of(part) for name, part in typing.get_type_hints(hint).items()})
    if issubclass(hint, StrEnum):
        return st.sampled_from(hint)
    plain = {float: FINITE, int: st.integers(), str: st.text(max_size=8), bool: st.booleans(), type(None): st.none()}
    return plain[hint]


@given(values_of(JournalEntry))
def test_an_entry_survives_the_way_through_json(entry: JournalEntry) -> None:
    text = dumps(entry)
    assert loads(JournalEntry, text, own=True) == entry


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*typing.get_args(Event), *typing.get_args(Action)])
@settings(max_examples=30)  # of each type: entries of all of them are drawn above
@given(data=st.data())
def test_every_event_and_action_keeps_its_type(kind: type, data: st.DataObject) -> None:
    value = data.draw(values_of(kind))
    union = Event if kind in typing.get_args(Event) else Action
    back = loads(union, dumps(value, union), own=True)
    assert type(back) is kind
    assert back == value


@pytest.mark.parametrize("number", [0.0, 1.0, -3.0, 2.0**53 - 1, -0.0, 0.5, 2.0**53, 1e300, 5e-324, math.inf])
def test_counts_are_written_in_short_and_read_back_bit_by_bit(number: float) -> None:
    text = dumps(Evaluation(1.0, 2.0, 3, sums={"hits/1": (number,)}))
    (back,) = loads(Evaluation, text, own=True).sums["hits/1"]
    assert type(back) is float and back.hex() == number.hex()
    written = json.loads(text)
    assert isinstance(written["sums"]["hits/1"][0], int) == (number in (1.0, -3.0, 2.0**53 - 1) or str(number) == "0.0")
    assert isinstance(written["loss"], float), "elsewhere numbers are written as they were"


@pytest.mark.parametrize("entry", ["true", '"3"', "null", "[1]", "1e999", "NaN", "1" + "0" * 400])
def test_a_peer_s_counts_are_read_as_strictly_as_any_number(entry: str) -> None:
    text = '{"loss":1.0,"correct":2.0,"samples":3,"sums":{"hits/1":[%s]}}'
    assert loads(Evaluation, text % "7").sums == {"hits/1": (7.0,)}
    with pytest.raises(DecodeError, match="sums"):
        loads(Evaluation, text % entry)


@pytest.mark.parametrize("number", [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 2.0**53 + 2, 6.4])
def test_floats_read_back_bit_by_bit(number: float) -> None:
    back = loads(TimerFired, dumps(TimerFired(number)))
    assert back.at_s.hex() == number.hex()


def test_the_order_of_weights_is_kept() -> None:
    commit = Commit(3, {"b/2": 0.25, "a/10": 0.25, "a/9": 0.5})
    back = loads(Commit, dumps(commit))
    assert list(back.weights) == ["b/2", "a/10", "a/9"]


@dataclass(frozen=True)
class Inner:
    size: int
    share: float = 1.0


@dataclass(frozen=True)
class Other:
    name: str


@dataclass(frozen=True)
class Outer:
    """One field of each type."""

    name: str
    inner: Inner
    any: Inner | Other
    on: bool = False
    count: int = 0
    ratio: float = 0.0
    parts: tuple[Inner, ...] = ()
    nested: tuple[tuple[int, ...], ...] = ()
    by_name: Mapping[str, float] = field(default_factory=dict)
    maybe: Inner | None = None
    either: Inner | Other | None = None


LEAST = {"name": "a", "inner": {"size": 1}, "any": {"type": "Other", "name": "b"}}


def test_defaults_are_left_out_and_come_back() -> None:
    value = Outer("a", Inner(1), Other("b"))
    assert encode(value) == LEAST
    assert loads(Outer, dumps(value)) == value
    full = Outer(
        "a", Inner(1, 0.5), Inner(2), True, 1, 0.5, (Inner(3),), ((1, 2), ()), {"x": 1.0}, Inner(4), Other("c")
    )
    assert loads(Outer, dumps(full)) == full
    assert dumps(Stop("done", failed=True), Action) == '{"type":"Stop","reason":"done","failed":true}'


def test_what_equals_its_default_and_is_not_it_is_written() -> None:
    assert encode(Outer("a", Inner(1), Other("b"), ratio=-0.0)) == {**LEAST, "ratio": -0.0}


ODD: list[tuple[Any, str]] = [
    ([], "an object is due, not list"),
    ({}, "no 'any'"),
    ({**LEAST, "more": 1}, "unknown field 'more'"),
    ({**LEAST, "\x1b" + "x" * 999: 1}, "unknown field '\\x1bxxx"),
    ({**LEAST, "type": "Outer"}, "unknown field 'type'"),
    ({**LEAST, "name": 1}, "name: a text is due, not int"),
    ({**LEAST, "name": "\x1b[2J"}, "name: a text that does not print"),
    ({**LEAST, "name": "\ud800"}, "name: a text that does not print"),
    ({**LEAST, "inner": {"size": 1.0}}, "inner.size: a whole number is due, not float"),
    ({**LEAST, "inner": {"size": True}}, "inner.size: a whole number is due, not bool"),
    ({**LEAST, "inner": {"size": MAX_WHOLE}}, "inner.size: a number far too large"),
    ({**LEAST, "inner": {"size": 1, "share": True}}, "inner.share: a number is due, not bool"),
    ({**LEAST, "inner": {"size": 1, "share": "nan"}}, "inner.share: a number is due, not str"),
    ({**LEAST, "inner": {"size": 1, "share": 10**400}}, "inner.share: a number far too large"),
    ({**LEAST, "inner": None}, "inner: an object is due, not NoneType"),
    ({**LEAST, "any": {"size": 1}}, "any: type None is none of Inner, Other"),
    ({**LEAST, "any": {"type": "Stop"}}, "any: type 'Stop' is none of Inner, Other"),
    ({**LEAST, "any": {"type": ["Inner"]}}, "any: type ['Inner'] is none of Inner, Other"),
    ({**LEAST, "any": {"type": "Inner"}}, "any: no 'size'"),
    ({**LEAST, "any": None}, "any: an object is due, not NoneType"),
    ({**LEAST, "on": 1}, "on: true or false is due, not int"),
    ({**LEAST, "parts": {}}, "parts: a list is due, not dict"),
    ({**LEAST, "parts": [{"size": 1}, {"size": "x"}]}, "parts.1.size: a whole number is due, not str"),
    ({**LEAST, "nested": [[1], [None]]}, "nested.1.0: a whole number is due, not NoneType"),
    ({**LEAST, "by_name": {"x": "y"}}, "by_name.x: a number is due, not str"),
    ({**LEAST, "by_name": {"\n": 1.0}}, "a text that does not print"),
]


@pytest.mark.parametrize(("value", "said"), ODD)
def test_what_does_not_fit_its_type_is_named_with_its_place(value: Any, said: str) -> None:
    with pytest.raises(DecodeError) as caught:
        loads(Outer, json.dumps(value))
    assert said in str(caught.value)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 200


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"a":' * 10_000, '{"size":1' + "0" * 5000 + "}", b"\xff"])
def test_what_is_no_json_is_said_so(text: str) -> None:
    with pytest.raises(DecodeError, match="not JSON"):
        loads(Inner, text)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_peer_s_numbers_are_finite(text: str) -> None:
    with pytest.raises(DecodeError, match=r"share: a number that is none"):
        loads(Inner, f'{{"size":1,"share":{text}}}')


def test_our_own_files_may_hold_what_peers_may_not() -> None:
    written = dumps(Outer("two\nlines", Inner(2**70, math.inf), Other("b"), ratio=math.nan))
    read = loads(Outer, written, own=True)
    assert (read.name, read.inner) == ("two\nlines", Inner(2**70, math.inf)) and math.isnan(read.ratio)
    with pytest.raises(DecodeError):
        loads(Outer, written)
