"""Whatever a silo writes, the server reads it or says which silo wrote nonsense; nothing else comes of it."""

import json
from collections.abc import Iterator
from math import isfinite
from typing import Any, get_args

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from fedsync.common import codec
from fedsync.common.codec import MAX_WHOLE
from fedsync.common.errors import ProtocolError
from fedsync.core.events import Progressed, SiloJoined, UpdateArrived
from fedsync.core.journal import JournalEntry
from fedsync.core.orders import Evaluation, UpdateMeta, WorkOrder, WorkReport
from fedsync.core.report_checks import MAX_COUNT, check_evaluation, check_facts, check_report, sound
from fedsync.flower import flower_messages as messages
from fedsync.flower.flower_messages import shortened
from fedsync.flower.payloads import read_model
from fedsync.model.transfer import VersionMismatch
from fedsync.silo.owner.refusals import explained
from fedsync.silo.protocol import (
    MAX_TEXT,
    AskModel,
    AskSnapshot,
    Collect,
    Describe,
    EvaluateModel,
    Hello,
    InitialModel,
    InProgress,
    Question,
    Refused,
    Reply,
    Request,
    Snapshot,
    Train,
    read_reply,
    read_request,
)
from fedsync.transport.port import Blob, SiloQuestion
from tests.flower.grid import posing, run_identity

ORDER = WorkOrder("a/1", 3, 1, batch_size=8, max_steps=4, learning_rate=0.1, seed=1)

REPORT = {"base_version": 3, "steps": 1, "samples": 8, "compute_s": 0.1, "loss": 0.5}
EVALUATION = {"loss": 1.0, "correct": 1.0, "samples": 1}
PLAIN: dict[str, dict[str, Any]] = {
    "Hello": {"silo": "a", "facts": {"examples": 10, "memory_samples": 5, "declared_speed": 1.0}, "holds": 0},
    "WorkReport": {
        **REPORT, "overhead_s": {"load": 0.1}, "windows": [{"speed": 1.0, "cpu": 0.5, "memory": 0.5}],
        "batch_cap": 4, "evaluation": EVALUATION, "metrics": {"energy_j": 1.0},
    },
    "InProgress": {"steps": 1, "samples": 8},
    "Evaluation": EVALUATION,
    "VersionMismatch": {"holds": -1},
    "Snapshot": {"version": 2},
    "InitialModel": {"layout": {"names": ["w"], "shapes": [[2, 3]]}},
    "Refused": {"code": "memory", "text": "out of it"},
}  # fmt: skip
"""Replies that an honest silo writes, by their type."""


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
def spoilt(draw: st.DrawFn) -> str:
    """A text, one to three parts of which are not what they should be."""
    kind = draw(st.sampled_from(sorted(PLAIN)))
    value: Any = {"type": kind, **PLAIN[kind]}
    for _ in range(draw(st.integers(1, 3))):
        value = with_odd(value, draw(st.sampled_from(paths(value))), draw(ODD))
    return written(value)


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


def use(message: Message) -> None:
    """What the driver and the coordinator do with an answer; writes the journal's entry of it too."""
    found = read_reply(messages.read_answer(message, "a", 100)[0], "a")
    match found:
        case Hello(silo, facts, holds):
            written_down(SiloJoined(0.0, silo, facts))
            assert -MAX_WHOLE < holds < MAX_WHOLE
            check_facts("a", facts)
            assert isfinite(1.0 / (facts.declared_speed or 1.0))
        case InProgress(steps, samples):
            assert 0 <= steps <= MAX_COUNT and 0 <= samples <= MAX_COUNT
            written_down(Progressed(0.0, "a", "a/1", steps, samples))
        case VersionMismatch(version) | Snapshot(version):
            assert -1 <= version <= MAX_COUNT
        case Evaluation():
            check_evaluation("a", found)
        case Refused():
            assert len(explained("a", found)) < 5000
        case InitialModel(layout):
            read_model(layout, np.zeros(24, np.uint8), "a")
        case WorkReport():
            meta = UpdateMeta("a/1", "a", 3, found.steps, found.samples, 10, 12, found.loss)
            written_down(UpdateArrived(0.0, meta, found))  # also of one that fails the checks
            sound(ORDER, meta, found)
            check_report("a", ORDER, meta, found)
            assert isfinite(found.loss * found.samples) and isfinite(found.compute_s / found.samples)


def written_down(event: Any) -> None:
    codec.dumps(JournalEntry(0.0, (event,), (), "")).encode()


@settings(max_examples=50, deadline=None)
@given(spoilt())
@example('{"type":"Hello","silo":"a","facts":{"examples":1' + "0" * 5000 + "}}")
@example('{"type":"Hello","silo":"a","facts":{"examples":1' + "0" * 400 + "}}")
@example("[" * 60_000)
@example('{"a":' * 10_000)
@example('{"type":"Evaluation","loss":1e999,"correct":0.0,"samples":1}')
@example('{"type":"Evaluation","loss":NaN,"correct":0.0,"samples":1}')
@example('{"type":"Evaluation","loss":1.0,"correct":-1e300,"samples":100}')
@example('{"type":"VersionMismatch","holds":-2}')
@example('{"type":"VersionMismatch","holds":-' + "9" * 50 + "}")
@example('{"type":"Hello","silo":"\\ud800","facts":{"examples":10}}')
@example('{"type":"Refused","code":"CONFIG"}')
@example('{"type":"Refused","code":["config"]}')
def test_json_of_any_kind_is_read_or_a_protocol_error(text: str) -> None:
    try:
        use(reply(text=text))
    except ProtocolError as error:
        assert len(str(error)) < 2000 and str(error).isprintable()


@pytest.mark.parametrize("kind", PLAIN)
def test_what_an_honest_silo_writes_is_read(kind: str) -> None:
    use(reply(text=json.dumps({"type": kind, **PLAIN[kind]})))


def test_every_reply_is_among_what_honest_silos_write() -> None:
    assert {each.__name__ for each in get_args(Reply)} == {*PLAIN, "Answer", "Attestation"}


@pytest.mark.parametrize("texts", [{}, {"text": 1}, {"text": b"{}"}, {"text": [1, 2]}, {"text": "x" * (MAX_TEXT + 1)}])
def test_what_is_no_text_or_too_long_a_one_is_no_answer(texts: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match=r"no 'text'|65537 characters, at most 65536"):
        read_reply(messages.read_answer(reply(**texts), "a", 100)[0], "a")


ANSWERED = '{"type":"Answer"}'


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({"fedsync": ArrayRecord(), "payload": ConfigRecord()}),
        RecordDict({"payload": ArrayRecord()}),
        RecordDict({"fedsync": ConfigRecord({"text": ANSWERED}), "payload": ArrayRecord()}),
        RecordDict({"fedsync": ConfigRecord({"text": ANSWERED, "payload": bytes(101)})}),
    ],
)
def test_records_of_any_kind_are_the_silos_problem(content: RecordDict) -> None:
    with pytest.raises(ProtocolError) as caught:
        messages.read_answer(Message(content, dst_node_id=1, message_type="train"), "a", 100)
    assert caught.value.sender == "a"


@pytest.mark.parametrize("payload", ["x", 1.0, [1]])
def test_what_is_beside_a_text_and_no_bytes_is_nothing(payload: Any) -> None:
    assert messages.read_answer(reply(text=ANSWERED, payload=payload), "a", 100) == (ANSWERED, None)


@pytest.mark.parametrize(
    "request_",
    [Describe(), AskModel(), Train(ORDER, 0.5), Collect("a/1", 1.0, True), EvaluateModel(3), Question(), AskSnapshot()],
)
def test_a_request_reaches_the_trainer_as_it_was_asked(request_: Request) -> None:
    spec, text, payload = messages.read_request(posing(request_, np.frombuffer(b"abc", np.uint8)))
    assert (spec, read_request(text), payload is not None and payload.tobytes()) == ("{}", request_, b"abc")


@pytest.mark.parametrize("text", ['{"type":"Quit"}', '{"type":"Hello"}', "[]", '{"type":"Score","version":true}'])
def test_the_server_can_ask_nothing_else(text: str) -> None:
    with pytest.raises(ProtocolError, match="the server failed the check 'message'"):
        read_request(text)


def test_a_request_is_of_its_kind_and_goes_to_its_node_for_its_time() -> None:
    asked = messages.request(7, SiloQuestion("", kind="train", ttl_s=9.0)).metadata
    assert (asked.dst_node_id, asked.message_type, asked.ttl) == (7, "train", 9.0)
    with pytest.raises(TypeError, match="no blob"):
        messages.request(7, SiloQuestion("", Blob("0" * 64, 1)))


def test_a_join_is_no_question_and_no_question_is_a_join() -> None:
    joined = messages.join(7, "in here", 9.0)
    assert (joined.metadata.dst_node_id, joined.metadata.message_type, joined.metadata.ttl) == (7, "query", 9.0)
    assert messages.read_join(joined) == "in here" and messages.read_join(posing(Describe())) is None
    with pytest.raises(ProtocolError, match="the server failed the check 'message'"):
        messages.read_request(joined)


@pytest.mark.parametrize("content", [RecordDict(), RecordDict({"fedsync": ConfigRecord({"join": 1})})])
def test_what_is_no_text_is_no_join(content: RecordDict) -> None:
    assert messages.read_join(Message(content, dst_node_id=1, message_type="query")) is None


def test_a_reason_is_short_and_prints() -> None:
    assert shortened(None) == ""
    assert shortened("out\n of\t memory") == "out of memory"
    assert shortened("\x1b[2J\x07red") == "\\x1b[2J\\x07red"
    long = shortened("b" + " x" * 2**22 + "e")
    assert len(long) <= 605 and long.startswith("b x x") and long.endswith("x xe")
