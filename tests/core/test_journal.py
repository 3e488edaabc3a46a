"""What was written reads back exactly, and a file that is no journal says on which line."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsync.core.actions import Action, Commit, Stop
from fedsync.core.coordinator import Coordinator
from fedsync.core.errors import FedSyncError
from fedsync.core.events import Event, TimerFired, UpdateArrived, WorkFailed
from fedsync.core.journal import JournalEntry, JournalWriter, decode, encode, read_journal, replay
from tests.core.make import answer, begin, joined, policies, scored

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
    plain = {float: FINITE, int: st.integers(), str: st.text(max_size=8), bool: st.booleans(), type(None): st.none()}
    return plain[hint]


@given(values_of(JournalEntry))
def test_an_entry_survives_the_way_through_json(entry: JournalEntry) -> None:
    text = json.dumps(encode(entry), allow_nan=False)
    assert decode(JournalEntry, json.loads(text)) == entry


@pytest.mark.parametrize("kind", [*typing.get_args(Event), *typing.get_args(Action)])
@given(data=st.data())
def test_every_event_and_action_keeps_its_type(kind: type, data: st.DataObject) -> None:
    value = data.draw(values_of(kind))
    union = Event if kind in typing.get_args(Event) else Action
    back = decode(union, json.loads(json.dumps(encode(value))))
    assert type(back) is kind
    assert back == value


@pytest.mark.parametrize("number", [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 2.0**53 + 2, 6.4])
def test_floats_read_back_bit_by_bit(number: float) -> None:
    back = decode(Event, json.loads(json.dumps(encode(TimerFired(number)))))
    assert back.at_s.hex() == number.hex()


def test_the_order_of_weights_is_kept() -> None:
    commit = Commit(3, {"b/2": 0.25, "a/10": 0.25, "a/9": 0.5})
    back = decode(Action, json.loads(json.dumps(encode(commit))))
    assert list(back.weights) == ["b/2", "a/10", "a/9"]


def a_run() -> list[JournalEntry]:
    """Two rounds of three silos: one is late, one fails, one is lost."""
    coordinator, first = begin("a", "b", "c")
    entries = [Coordinator(policies()).handle(joined("a", "b", "c"), 0.0)]
    batches: list[tuple[float, list[Event]]] = [
        (1.0, [answer("a", first["a"], 1.0, evaluation=scored(0.1)), WorkFailed(1.0, "b", "b/1", "disk full")]),
        (2.0, [answer("c", first["c"], 2.0, overhead_s={"load": 0.1 + 0.2})]),
        (3.0, [answer("a", first["a"], 3.0)]),  # a duplicate
        (3.5, []),
    ]
    return entries + [coordinator.handle(events, at_s) for at_s, events in batches]


def write(path: Path, entries: list[JournalEntry]) -> Path:
    writer = JournalWriter(path, {"seed": 7})
    for entry in entries:
        writer.append(entry)
    writer.close()
    return path


def test_a_file_gives_back_header_and_entries(tmp_path: Path) -> None:
    entries = a_run()
    header, back = read_journal(write(tmp_path / "journal.jsonl", entries))
    assert header == {"seed": 7}
    assert list(back) == entries


def test_an_entry_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "journal.jsonl", {})
    for count, entry in enumerate(a_run(), start=1):
        writer.append(entry)
        assert len(list(read_journal(tmp_path / "journal.jsonl")[1])) == count
    writer.close()


def test_a_replay_decides_the_same_and_another_coordinator_does_not(tmp_path: Path) -> None:
    entries = a_run()
    _, back = read_journal(write(tmp_path / "journal.jsonl", entries))
    recorded = list(back)
    assert list(replay(recorded, Coordinator(policies()))) == entries
    assert list(replay(recorded, Coordinator(policies(seed=8)))) != entries


@pytest.mark.parametrize(
    "bad",
    [
        {"loss": math.nan},
        {"loss": math.inf},
        {"compute_s": -math.inf},
        {"evaluation": scored(math.nan)},
        {"overhead_s": {"load": math.nan}},
    ],
)
def test_a_refused_report_with_numbers_that_json_lacks_can_be_written_and_replayed(
    tmp_path: Path, bad: dict[str, Any]
) -> None:
    """Otherwise one silo's NaN ends the server's run, in the recorder."""
    coordinator, first = begin("a", "b")
    entries = [Coordinator(policies()).handle(joined("a", "b"), 0.0)]
    entries.append(coordinator.handle([answer("a", first["a"], **bad)], 1.0))
    path = write(tmp_path / "journal.jsonl", entries)
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    recorded = list(read_journal(path)[1])
    assert list(replay(recorded, Coordinator(policies()))) == recorded
    (event,) = recorded[1].events
    assert isinstance(event, UpdateArrived)
    assert repr(event) == repr(entries[1].events[0])


GOOD = '{"at_s":0.0,"events":[],"actions":[],"reason":""}'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 3"),
        (GOOD[:-9], "line 3"),  # cut off in the middle, as by a full disk
        ("", "line 3"),
        ("[1, 2]", "line 3"),
        ("{}", "line 3"),
        ('{"at_s":0.0,"events":[{"type":"Nonsense"}],"actions":[],"reason":""}', "line 3"),
        ('{"at_s":0.0,"events":[{"type":"TimerFired"}],"actions":[],"reason":""}', "line 3"),
        ('{"at_s":0.0,"events":7,"actions":[],"reason":""}', "line 3"),
    ],
)
def test_a_corrupt_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text("\n".join(['{"seed":7}', GOOD, line, GOOD]) + "\n")
    header, entries = read_journal(path)
    assert header == {"seed": 7}
    with pytest.raises(FedSyncError, match=rf"journal\.jsonl, {said}: not a journal line"):
        list(entries)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"seed":7}\n\xff\xfe\n')
    with pytest.raises(FedSyncError, match=r"journal\.jsonl"):
        list(read_journal(path)[1])


@pytest.mark.parametrize("text", ["", "[]\n", "7\n", "PNG\n"])
def test_a_file_without_a_header_is_no_journal(tmp_path: Path, text: str) -> None:
    path = tmp_path / "picture.png"
    path.write_text(text)
    with pytest.raises(FedSyncError, match=r"picture\.png.*not a journal"):
        read_journal(path)


def test_encoding_leaves_nothing_but_json() -> None:
    entry = replace(a_run()[0], actions=(Stop("done", failed=True),))
    assert encode(entry)["actions"] == [{"type": "Stop", "reason": "done", "failed": True}]
    assert encode(entry)["events"][0] == {
        "type": "SiloJoined",
        "at_s": 0.0,
        "silo": "a",
        "facts": {"examples": 1000, "memory_samples": None, "declared_speed": None, "device": "cpu"},
    }
