"""Whatever a silo writes, the server reads it or says which silo wrote nonsense; nothing else comes of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from math import isfinite
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from fedsync.core import codec
from fedsync.core.checks import check_evaluation, check_facts, check_report, sound
from fedsync.core.errors import ProtocolError
from fedsync.core.events import Progressed, SiloJoined, UpdateArrived
from fedsync.core.journal import JournalEntry
from fedsync.core.layout import Layout
from fedsync.core.orders import UpdateMeta, WorkOrder
from fedsync.flower import messages
from fedsync.flower.messages import shortened
from tests.flower.grid import run_identity

ORDER = WorkOrder("a/1", 3, 1, batch_size=8, max_steps=4, learning_rate=0.1, seed=1)
LAYOUT = Layout(("w",), ((3,),))

REPORT = {"base_version": 3, "steps": 1, "samples": 8, "compute_s": 0.1, "loss": 0.5}
EVALUATION = {"loss": 1.0, "correct": 1.0, "samples": 1}
PLAIN: dict[str, dict[str, Any]] = {
    "hello": {"silo": "a", "facts": {"examples": 10, "memory_samples": 5, "declared_speed": 1.0}, "holds": 0},
    "report": {
        **REPORT, "overhead_s": {"load": 0.1}, "windows": [{"speed": 1.0, "cpu": 0.5, "memory": 0.5}],
        "peak_memory": 1, "batch_cap": 4, "evaluation": EVALUATION,
    },
    "progress": {"steps": 1, "samples": 8},
    "evaluation": EVALUATION,
}  # fmt: skip
"""What an honest silo writes, by key."""

HUGE = [10**19, -(10**19), 10**30, 10**308, 10**400, -(10**4000), 10**5000]
ODD: SearchStrategy[Any] = st.one_of(
    st.sampled_from(
        [*HUGE, 2**63, 2**64, -1, 0, 1, True, None, "", "NaN", 5e-324, 1.7e308, float("nan"), float("inf")]
    ),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["\x1b[2J", "\n", "\ud800", "x" * 70_000]),
    st.just([{"speed": 1.0}] * 5000),
    st.dictionaries(st.text(max_size=3), st.floats(), max_size=3),
)


@pytest.fixture(autouse=True, scope="module")
def _identity() -> Iterator[None]:
    with run_identity():
        yield


def paths(value: object, here: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Where in a JSON value something could be put."""
    inside: list[tuple[str | int, ...]] = []
    if isinstance(value, dict):
        inside = [path for key, each in value.items() for path in paths(each, (*here, key))]
    elif isinstance(value, list):
        inside = [path for index, each in enumerate(value) for path in paths(each, (*here, index))]
    return [here, *inside]


def with_odd(value: Any, path: tuple[str | int, ...], odd: object) -> Any:
    """A JSON value with one part replaced."""
    if not path:
        return odd
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = with_odd(copy[path[0]], path[1:], odd)
    return copy


@st.composite
def spoilt(draw: st.DrawFn) -> tuple[str, str]:
    """A key and its text, one to three parts of which are not what they should be."""
    key = draw(st.sampled_from(sorted(PLAIN)))
    value: Any = PLAIN[key]
    for _ in range(draw(st.integers(1, 3))):
        value = with_odd(value, draw(st.sampled_from(paths(value))), draw(ODD))
    return key, written(value)


def written(value: object) -> str:
    """JSON, also of whole numbers that Python does not like to write."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**300:
        return f"{'-' if value < 0 else ''}1{'0' * (5000 if abs(value) > 10**4500 else 400)}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{written(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


def reply(**texts: Any) -> Message:
    """An answer with these texts."""
    return Message(RecordDict({"fedsync": ConfigRecord(texts)}), dst_node_id=1, message_type="train")


def use(key: str, message: Message) -> None:
    """What the driver and the coordinator do with an answer; writes the journal's entry of it too."""
    event: Any = None
    if key == "hello":
        hello = messages.read_hello(message, "a")
        event = SiloJoined(0.0, hello.silo, hello.facts)
        assert -messages.MAX_WHOLE < hello.holds < messages.MAX_WHOLE
        check_facts("a", hello.facts)
        assert isfinite(1.0 / (hello.facts.declared_speed or 1.0))
    elif key == "progress":
        progress = messages.read_progress(message, "a")
        assert progress is not None
        event = Progressed(0.0, "a", "a/1", progress.steps, progress.samples)
    elif key == "evaluation":
        check_evaluation("a", messages.read_evaluation(message, "a"))
    else:
        report = messages.read_report(message, "a")
        meta = UpdateMeta("a/1", "a", 3, report.steps, report.samples, 10, 12, report.loss)
        event = UpdateArrived(0.0, meta, report)
        written_down(event)  # also of one that fails the checks
        sound(ORDER, meta, report)
        check_report("a", ORDER, meta, report)
        assert isfinite(report.loss * report.samples) and isfinite(report.compute_s / report.samples)
    if event is not None:
        written_down(event)


def written_down(event: Any) -> None:
    codec.dumps(JournalEntry(0.0, (event,), (), "")).encode()


@settings(max_examples=50, deadline=None)
@given(spoilt())
@example(("hello", '{"silo":"a","facts":{"examples":1' + "0" * 5000 + "}}"))
@example(("hello", '{"silo":"a","facts":{"examples":1' + "0" * 400 + "}}"))
@example(("report", "[" * 60_000))
@example(("report", '{"a":' * 10_000))
@example(("evaluation", '{"loss":1e999,"correct":0.0,"samples":1}'))
@example(("evaluation", '{"loss":NaN,"correct":0.0,"samples":1}'))
@example(("evaluation", '{"loss":1.0,"correct":-1e300,"samples":100}'))
@example(("hello", '{"silo":"\\ud800","facts":{"examples":10}}'))
def test_json_of_any_kind_is_read_or_a_protocol_error(spoilt_text: tuple[str, str]) -> None:
    key, text = spoilt_text
    try:
        use(key, reply(**{key: text}))
    except ProtocolError as error:
        assert len(str(error)) < 2000 and str(error).isprintable()


@pytest.mark.parametrize("key", sorted(PLAIN))
def test_what_an_honest_silo_writes_is_read(key: str) -> None:
    use(key, reply(**{key: json.dumps(PLAIN[key])}))


@pytest.mark.parametrize(
    "texts",
    [{}, {"hello": 1}, {"hello": b"{}"}, {"hello": [1, 2]}, {"hello": "x" * (messages.MAX_JSON_BYTES + 1)}],
)
def test_what_is_no_text_or_too_long_a_one_is_no_hello(texts: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="hello"):
        messages.read_hello(reply(**texts), "a")


READERS: list[Callable[[Message], object]] = [
    lambda message: messages.read_initial_model(message, "a"),
    lambda message: messages.read_greeting(message, "a"),
    lambda message: messages.read_update(message, LAYOUT, 100, "a"),
    lambda message: messages.read_update(message, None, 100, "a"),
    lambda message: messages.read_holds(message, "a"),
    lambda message: messages.read_progress(message, "a"),
]


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({"fedsync": ArrayRecord(), "update": ConfigRecord(), "model": ConfigRecord()}),
        RecordDict({"update": ArrayRecord(), "model": ArrayRecord()}),
        RecordDict({"fedsync": ConfigRecord({"update": "x", "holds": 1.0, "progress": b""})}),
        RecordDict({"fedsync": ConfigRecord({"update": [1], "holds": "-" + "9" * 50, "progress": "{}"})}),
    ],
)
@pytest.mark.parametrize("read", READERS)
def test_records_of_any_kind_are_read_or_a_protocol_error(
    read: Callable[[Message], object], content: RecordDict
) -> None:
    try:
        found = read(Message(content, dst_node_id=1, message_type="train"))
    except ProtocolError as error:
        assert error.sender == "a"
    else:
        assert found is None or isinstance(found, ArrayRecord), "there is nothing in it"


def test_a_reason_is_short_and_prints() -> None:
    assert shortened(None) == ""
    assert shortened("out\n of\t memory") == "out of memory"
    assert shortened("\x1b[2J\x07red") == "?[2J?red"
    long = shortened("b" + " x" * 2**22 + "e")
    assert len(long) <= 605 and long.startswith("b x x") and long.endswith("x xe")
