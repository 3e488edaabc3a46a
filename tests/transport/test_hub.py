"""The hub and a silo's line over TLS: questions, answers, large bytes, cut lines, restarts."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from fedsync.common.backoff import Backoff
from fedsync.common.errors import ConfigError, PolicyError, ProtocolError
from fedsync.model.chunked_arrays import SPAN_BYTES, map_file
from fedsync.model.transfer import Payload
from fedsync.transport import hub_line
from fedsync.transport.hub import door
from fedsync.transport.hub.hub import Hub
from fedsync.transport.hub.sessions import MOST_QUEUED
from fedsync.transport.hub_line import JoinRefused, Over, ReceivedQuestion
from fedsync.transport.join import new_secret
from fedsync.transport.port import BESIDE_BYTES, Blob, SiloQuestion
from tests.memory import resident
from tests.transport.hubs import Served, asked, served


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path) as found:
        yield found


def large(size: int = 3 * BESIDE_BYTES, seed: int = 1) -> Payload:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def test_a_request_is_held_until_a_question_or_for_its_time(up: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    line = up.joined("a")
    threading.Timer(0.3, up.hub.send, ["a", SiloQuestion("late")]).start()
    begin_s = time.monotonic()
    question = asked(line)
    assert question.text == "late" and 0.2 < time.monotonic() - begin_s < 5
    line.answer(question, "here")
    monkeypatch.setattr(door, "HOLD_S", 0.1)
    assert line.asked(question.number) is None


def test_questions_are_answered_in_any_order_and_each_once(up: Served) -> None:
    line = up.joined("a")
    names = [up.hub.send("a", SiloQuestion(text)) for text in ("train", "how far", "halt")]
    first = asked(line)
    assert asked(line) == first, "the line broke, and it is asked for again"
    second = asked(line, first.number)
    third = asked(line, second.number)
    for question in (third, first, second, third):
        line.answer(question, question.text)
    assert [each.name for each in up.hub.receive(5)] == [names[2], names[0], names[1]]


def test_large_bytes_both_ways_and_only_for_whom_they_were_sent_to(up: Served, tmp_path: Path) -> None:
    line, other, model = up.joined("a"), up.joined("b"), large()
    blob = up.hub.publish(model)
    assert up.hub.publish(model.copy()) == blob, "the same bytes once"
    up.hub.send("a", SiloQuestion("train", blob, most=2 * model.nbytes))
    question = asked(line)
    assert question.payload == blob
    for who, what in ((other, blob), (line, Blob("0" * 64, 5))):
        with pytest.raises(ProtocolError, match="404"):
            who.fetch(what, tmp_path / "none")
    line.fetch(blob, tmp_path / "model")
    assert (tmp_path / "model").read_bytes() == bytes(model)
    line.answer(question, "done", large(seed=4))
    (delivery,) = up.hub.receive(5)
    assert delivery.payload is not None and bytes(delivery.payload) == bytes(large(seed=4))
    del delivery
    assert not list((tmp_path / "hub" / "uploads").iterdir()), "the file goes with its map"
    up.hub.keep([])
    with pytest.raises(ProtocolError, match="404"):
        line.fetch(blob, tmp_path / "again")


@pytest.mark.slow
def test_a_large_model_passes_in_spans_and_never_fills_memory(up: Served, tmp_path: Path) -> None:
    """Pages of a mapped file count as memory until they are given back: the server needed a model for each silo."""
    line, size, before, most, over = up.joined("a"), 24 * SPAN_BYTES, resident(), [0], threading.Event()
    (tmp_path / "model.f4").write_bytes(bytes(large(size)))

    def watch() -> None:
        while not over.wait(0.002):
            most.append(resident() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        blob = up.hub.publish(map_file(tmp_path / "model.f4"))
        up.hub.send("a", SiloQuestion("train", blob, most=size))
        question = asked(line)
        line.fetch(blob, tmp_path / "fetched")
        line.answer(question, "done", map_file(tmp_path / "fetched"))
    finally:
        over.set()
        watcher.join()
    assert len(most) > 20
    assert max(most) < size / 3


def test_a_transfer_goes_on_where_it_was_cut(up: Served, tmp_path: Path) -> None:
    line, model = up.joined("a"), large(5_000_000)
    blob = up.hub.publish(model)
    up.hub.send("a", SiloQuestion("train", blob, most=model.nbytes))
    question = asked(line)
    (tmp_path / "model.part").write_bytes(bytes(model[:3_000_000]))
    line.fetch(blob, tmp_path / "model")
    assert (tmp_path / "model").read_bytes() == bytes(model)
    head = {"authorization": f"Bearer {line._secret}"}
    place = f"/uploads/{question.ticket}"
    told = {"upload-offset": "0", "upload-length": "5000000", "upload-sha256": blob.digest, "content-length": "5000000"}

    def cut() -> Iterator[bytes]:
        yield bytes(model[:2_000_000])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        line._http.put(place, content=cut(), headers={**head, **told})
    there = 0
    for _ in range(100):
        there = int(line._http.head(place, headers=head).headers["upload-offset"])
        if there:
            break
        time.sleep(0.02)
    assert 1_000_000 <= there <= 2_000_000
    line.answer(question, "done", model)
    (delivery,) = up.hub.receive(5)
    assert delivery.payload is not None and bytes(delivery.payload) == bytes(model)


def test_what_is_whole_already_is_not_uploaded_again(up: Served) -> None:
    """Its response was lost."""
    line, model = up.joined("a"), large()
    up.hub.send("a", SiloQuestion("train", most=model.nbytes))
    question = asked(line)
    assert line.upload(question.ticket, model) and line.upload(question.ticket, model)


@pytest.mark.parametrize(
    ("offsets", "status", "expected"),
    [
        (["0", ""], 404, None),  # given up between the two requests
        (["0", "1"], 409, httpx.TransportError),  # for ever, without progress
        (["9" * 5000], 204, ProtocolError),
        (["-1"], 204, ProtocolError),
        (["99999999"], 204, ProtocolError),
    ],
    ids=["no longer expected", "to and fro", "too long a number", "negative", "past the end"],
)
def test_an_upload_ends_whatever_its_hub_says(
    up: Served, monkeypatch: pytest.MonkeyPatch, offsets: list[str], status: int, expected: type[Exception] | None
) -> None:
    line, said = up.joined("a"), list[httpx.Response]()

    def say(method: str, *_: object) -> httpx.Response:
        offset = offsets[len(said) // 2 % len(offsets)]
        said.append(httpx.Response(200 if offset else 404, headers={"upload-offset": offset}))
        assert len(said) < 100
        return said[-1] if method == "HEAD" else httpx.Response(status)

    monkeypatch.setattr(line, "_said", say)
    monkeypatch.setattr(hub_line, "_PAUSES", Backoff(0.001, 0.001))
    if expected is None:
        assert not line.upload("ticket", large())
    else:
        with pytest.raises(expected):
            line.upload("ticket", large())


def test_a_damaged_part_is_noticed_and_fetched_anew(up: Served, tmp_path: Path) -> None:
    line, model = up.joined("a"), large()
    blob = up.hub.publish(model)
    up.hub.send("a", SiloQuestion("train", blob))
    asked(line)
    (tmp_path / "model.part").write_bytes(bytes(100))
    with pytest.raises(ProtocolError, match="it has the digest"):
        line.fetch(blob, tmp_path / "model")
    line.fetch(blob, tmp_path / "model")
    assert (tmp_path / "model").read_bytes() == bytes(model)


def test_a_server_that_is_started_again_has_its_silos_back(tmp_path: Path) -> None:
    with served(tmp_path) as first:
        join = first.invited("a")
        secret = new_secret()
        line = first.line(join, secret)
        line.join()
        first.hub.send("a", SiloQuestion("one"))
        question = asked(line)
        line.answer(question, "1")
        assert first.hub.receive(5)
        port = first.port
        first.hub.close(over=False)
        with pytest.raises(httpx.TransportError):
            line.asked(question.number)
        with served(tmp_path, port) as second:
            assert second.hub.returns("a") and not second.hub.peers()
            again = second.line(join, secret)
            threading.Timer(0.2, second.hub.send, ["a", SiloQuestion("two")]).start()
            behind = asked(again, question.number)
            assert behind.number > question.number and behind.text == "two", "numbers go on"
            assert list(second.hub.peers()) == ["a"]
            second.hub.close(over=False)
        with served(tmp_path, port) as third:
            again = third.line(join, secret)
            again.join()
            third.hub.send("a", SiloQuestion("three"))
            assert asked(again).number > behind.number, "also for a silo that says nothing of earlier questions"


def test_silos_are_told_that_all_is_over(up: Served) -> None:
    line, ends = up.joined("a"), list[BaseException]()

    def wait() -> None:
        try:
            line.asked(0)
        except Over as error:
            ends.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.3)
    up.hub.close()
    thread.join(5)
    assert len(ends) == 1


def test_a_later_request_takes_the_place_of_the_one_that_is_held(up: Served) -> None:
    line, found = up.joined("a"), list[ReceivedQuestion | None]()
    thread = threading.Thread(target=lambda: found.append(line.asked(0)))
    thread.start()
    time.sleep(0.3)
    threading.Timer(0.3, up.hub.send, ["a", SiloQuestion("train")]).start()
    assert asked(line).text == "train"
    thread.join(5)
    assert found == [None]


def test_a_join_is_used_once_and_by_one_alone(up: Served) -> None:
    join, secret = up.invited("a"), new_secret()
    with pytest.raises(JoinRefused):
        up.line(join, secret).asked(0)
    up.line(join, secret).join()
    up.line(join, secret).join()  # its answer was lost
    with pytest.raises(JoinRefused):
        up.line(join).join()
    newer = up.invited("a")
    up.hub.send("a", SiloQuestion("still asked"))
    assert asked(up.line(join, secret)).text == "still asked", "until the new join is used"
    before = up.hub.peers()["a"]
    fresh = up.line(newer)
    fresh.join()
    assert up.hub.peers()["a"] != before
    up.hub.send("a", SiloQuestion("fresh"))
    assert asked(fresh).text == "fresh", "what another process was asked is not for this one"
    with pytest.raises(JoinRefused):
        up.line(join, secret).asked(0)


def test_who_is_struck_off_is_turned_away_at_once(up: Served) -> None:
    line = up.joined("a")
    up.hub.send("a", SiloQuestion("train"))
    up.hub.strike_off("a")
    with pytest.raises(JoinRefused):
        line.asked(0)
    assert not up.hub.peers() and up.hub.send("a", SiloQuestion("train")) is None


def test_what_is_forgotten_is_acknowledged_and_not_delivered(up: Served) -> None:
    line = up.joined("a")
    name = up.hub.send("a", SiloQuestion("train", most=10 * BESIDE_BYTES))
    assert name is not None
    question = asked(line)
    up.hub.forget(name)
    line.answer(question, "late")
    line.answer(question, "late", large())
    assert up.hub.receive(0.2) == []


def test_the_server_s_own_mistakes_are_told(up: Served, tmp_path: Path) -> None:
    up.joined("a")
    with pytest.raises(PolicyError, match="publish them as a blob"):
        up.hub.send("a", SiloQuestion("train", large()))
    for _ in range(MOST_QUEUED):
        up.hub.send("a", SiloQuestion("train"))
    with pytest.raises(PolicyError, match="wait for an answer"):
        up.hub.send("a", SiloQuestion("train"))
    with pytest.raises(ConfigError, match=r"cannot listen at .*Address already in use\. .* raise hub\.runs"):
        Hub(tmp_path / "second").start(port=up.port)
    (tmp_path / "server.pem").write_text("damaged")
    with pytest.raises(ConfigError, match=r"cannot listen at .*PEM.* correct host or certificates in server\.yaml"):
        Hub(tmp_path / "damaged").start(certificate=tmp_path / "server.pem", key=tmp_path / "server.pem")
    with pytest.raises(ConfigError, match=r"path too long\. Name a writable folder with a short path in hub\.sockets"):
        Hub(tmp_path / "third").start(socket=tmp_path / ("x" * 100))


def test_only_the_named_authority_is_trusted(up: Served, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with served(tmp_path / "other") as other:
        join = other.hub.invite("a", [up.address], other.authority)
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            up.line(join).join()
