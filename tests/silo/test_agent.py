"""The agent against a real hub: questions, large bytes, restarts of both sides, other hubs, the end of a run."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from fedsync.common.locks import wait_until
from fedsync.common.sandbox.path_sandbox import ALLOWED
from fedsync.model.transfer import Payload
from fedsync.silo.agent import agent, answers
from fedsync.silo.agent.agent import AgentSession
from fedsync.silo.agent.joins import JoinedRun
from fedsync.silo.owner.refusals import last_refusals
from fedsync.transport.hub_line import HubLine, ReceivedQuestion
from fedsync.transport.join import Join
from fedsync.transport.port import BESIDE_BYTES, SiloAnswer, SiloQuestion
from tests.transport.hubs import Served, served

Trainer = Callable[[str, Payload | None], tuple[str, Payload | None]]
Put = Callable[[Trainer], None]


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "server") as found:
        yield found


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Put:
    """Puts a function in the place of the trainer."""
    monkeypatch.setenv("FEDSYNC_STATE", str(tmp_path / "state"))
    (tmp_path / "state").mkdir(mode=0o700)
    monkeypatch.setattr(agent, "_PAUSES", agent.Backoff(0.05, 0.2))

    def put(found: Trainer) -> None:
        monkeypatch.setattr(answers, "connect", lambda identity: found)

    put(lambda text, payload: (f"echo {text}", payload))
    return put


def begun(join: Join, file: Path, node: dict[str, str] | None = None) -> AgentSession:
    """A session that serves, by a join that was handed over."""
    session = AgentSession(file)
    session.invite(JoinedRun(join.dump(), node or {}, {}, "1 2"))
    threading.Thread(target=session.serve, daemon=True).start()
    return session


def until(holds: Callable[[], object], seconds: float = 20.0) -> None:
    assert wait_until(holds, seconds, 0.01)


def sent(up: Served, text: str, payload: object = None, most: int = BESIDE_BYTES) -> str:
    until(lambda: "a" in up.hub.peers())
    name = up.hub.send("a", SiloQuestion(text, payload, most, spec="{}"))  # type: ignore[arg-type]
    assert name is not None
    return name


def answered(up: Served, count: int = 1) -> dict[str, SiloAnswer]:
    found = dict[str, SiloAnswer]()
    until(lambda: len(found) >= count or found.update({each.name: each for each in up.hub.receive(0.1)}))
    return found


def answered_after(up: Served) -> SiloAnswer:
    sent(up, "train")
    (answer,) = answered(up).values()
    return answer


def followed(session: AgentSession, up: Served) -> None:
    """The session gets a join to this hub, and serves it."""
    session.invite(JoinedRun(up.invited("a").dump(), {}, {}, "1 2"))
    answered_after(up)


def test_models_and_updates_go_as_files_and_a_damaged_one_is_fetched_again(
    up: Served, trainer: Put, tmp_path: Path
) -> None:
    model = np.random.default_rng(1).integers(0, 255, 3_000_000, np.uint8)
    begun(up.invited("a"), tmp_path / "s.session")
    for change in (0, 0, 1):  # the second is the model of which the silo's file was damaged
        other = model ^ np.uint8(change)
        name = sent(up, "train", up.hub.publish(other), most=model.nbytes)
        came = answered(up)[name]
        assert came.payload is not None and bytes(came.payload) == bytes(other)
        (file,) = (tmp_path / "state").glob(f"*/*{agent.WHOLE}")  # a model goes when the next one comes
        file.chmod(0o600)
        file.write_bytes(bytes(model.nbytes))


def test_an_empty_payload_is_not_a_missing_one(up: Served, trainer: Put, tmp_path: Path) -> None:
    """As a model that a silo trains for itself has both ways."""
    begun(up.invited("a"), tmp_path / "s.session")
    names = [sent(up, "train", payload) for payload in (None, np.empty(0, np.uint8))]
    came = answered(up, 2)
    assert [None if (found := came[name].payload) is None else found.nbytes for name in names] == [None, 0]


def test_an_agent_that_was_killed_goes_on_and_answers_what_it_had_not(up: Served, trainer: Put, tmp_path: Path) -> None:
    file, never = tmp_path / "s.session", threading.Event()
    trainer(lambda text, payload: (str(never.wait(60)), None))
    dead = begun(up.invited("a"), file)
    before = up.hub.peers()
    first = sent(up, "train")
    until(lambda: dead._room._value < agent.MOST_AT_WORK - 1)
    trainer(lambda text, payload: ("done", None))
    threading.Thread(target=AgentSession(file).serve, daemon=True).start()
    assert answered(up)[first].text == "done"
    assert before in ({}, up.hub.peers()), "the session is the same"


def test_questions_are_answered_side_by_side_and_a_line_that_breaks_has_none_done_twice(
    up: Served, trainer: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, asked, begun_at = threading.Event(), HubLine.asked, list[str]()

    def slow(text: str, payload: Payload | None) -> tuple[str, Payload | None]:
        begun_at.append(text)
        return ("here" if text == "halt" else f"slow {go_on.wait(60)}"), None

    def breaks(line: HubLine, after: int) -> ReceivedQuestion | None:
        if after and len(broken) < 3:
            broken.append(after)
            raise httpx.ReadError("cut")
        return asked(line, after)

    broken: list[int] = []
    trainer(slow)
    monkeypatch.setattr(HubLine, "asked", breaks)
    begun(up.invited("a"), tmp_path / "s.session")
    name = sent(up, "train")
    until(lambda: len(broken) == 3)
    other = sent(up, "halt")
    assert answered(up)[other].text == "here", "an order in work holds up no other question"
    go_on.set()
    assert answered(up)[name].text == "slow True" and begun_at == ["train", "halt"]


def test_a_hub_that_comes_back_has_its_silos_and_goes_on(trainer: Put, tmp_path: Path) -> None:
    with served(tmp_path / "server") as first:
        begun(first.invited("a"), tmp_path / "s.session")
        answered_after(first)
        port, sessions = first.port, first.hub.peers()
        first.hub.close(over=False)
    with served(tmp_path / "server", port) as second:
        answered_after(second)
        assert second.hub.peers() == sessions


def test_an_answer_from_before_a_restart_is_not_that_of_a_new_question(trainer: Put, tmp_path: Path) -> None:
    """The server was killed while its first question was in work, and the next process asks its first question."""
    go_on, begun_at = threading.Event(), list[str]()

    def slow(text: str, payload: Payload | None) -> tuple[str, Payload | None]:
        begun_at.append(text)
        return f"{text} {text == 'new' or go_on.wait(20)}", None

    trainer(slow)
    with served(tmp_path / "server") as first:
        begun(first.invited("a"), tmp_path / "s.session")
        sent(first, "old")
        until(lambda: begun_at)
        port = first.port
        first.hub.close(over=False)
    with served(tmp_path / "server", port) as second:
        name = sent(second, "new")
        go_on.set()
        assert answered(second)[name].text == "new True"


@pytest.mark.parametrize("same", [False, True], ids=["another address", "another authority"])
def test_a_join_to_another_hub_takes_the_place_of_one_that_is_gone(trainer: Put, tmp_path: Path, same: bool) -> None:
    """Or the server's certificates were made anew, and the hub listens on its port again."""
    with served(tmp_path / "one") as first:
        session = begun(first.invited("a"), tmp_path / "s.session")
        answered_after(first)
        port = first.port if same else 0
        first.hub.close(over=False)
    with served(tmp_path / "two", port) as second:
        followed(session, second)


def test_an_authority_that_the_owner_replaces_is_trusted_at_the_next_connection(
    trainer: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "ca.crt"
    monkeypatch.setenv(ALLOWED, json.dumps({"hub_hosts": ["127.0.0.1"], "authority": str(installed)}))
    with served(tmp_path / "server") as first:
        installed.write_text(first.authority)
        begun(first.invited("a"), tmp_path / "s.session")
        answered_after(first)
        port = first.port
        first.hub.close(over=False)
    (tmp_path / "server" / "authority").rename(tmp_path / "replaced")
    with served(tmp_path / "server", port) as second:
        installed.write_text(second.authority)
        answered_after(second)


def test_a_second_join_of_the_same_hub_loses_no_question(up: Served, trainer: Put, tmp_path: Path) -> None:
    go_on = threading.Event()
    trainer(lambda text, payload: (str(go_on.wait(20)), None))
    session = begun(up.invited("a"), tmp_path / "s.session")
    name, before = sent(up, "train"), up.hub.peers()
    session.invite(JoinedRun(up.invited("a").dump(), {}, {}, "1 2"))
    sent(up, "collect")  # has the agent look
    go_on.set()
    assert name in answered(up, 2) and up.hub.peers() == before


def test_a_session_that_the_hub_has_lost_begins_anew_by_the_next_join(up: Served, trainer: Put, tmp_path: Path) -> None:
    file = tmp_path / "s.session"
    session = begun(up.invited("a"), file)
    answered_after(up)
    up.hub.strike_off("a")
    until(lambda: not file.exists())
    followed(session, up)


def test_the_end_of_a_run_ends_its_session(trainer: Put, tmp_path: Path) -> None:
    file = tmp_path / "s.session"
    with served(tmp_path / "server") as up:
        begun(up.invited("a"), file)
        answered_after(up)
        assert oct(file.stat().st_mode)[-3:] == "600"
        up.hub.close()
    until(lambda: not file.exists())


def test_a_hub_elsewhere_is_not_called(up: Served, trainer: Put, tmp_path: Path) -> None:
    file = tmp_path / "s.session"
    begun(replace(up.invited("a"), addresses=("https://10.0.0.1/v1/fedsync",)), file)
    until(lambda: not file.exists())
    assert up.hub.peers() == {}


def test_a_hub_that_never_answers_is_a_refusal_that_doctor_shows(
    up: Served, trainer: Put, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    up.hub.close(over=False)
    session = begun(up.invited("a"), tmp_path / "s.session")
    until(lambda: last_refusals(tmp_path / "state"))
    session.give_up()
    (note,) = last_refusals(tmp_path / "state")
    assert note.reason.startswith(f"{up.address}: the hub does not answer: ") and "Allow this port" in note.reason
    assert f"the hub {up.address} does not answer: " in caplog.text


def test_what_the_owner_says_of_the_node_counts(
    up: Served, trainer: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def asked(identity: answers.Identity) -> Trainer:
        seen.append(identity.name)
        return lambda text, payload: ("x", None)

    monkeypatch.setattr(answers, "connect", asked)
    monkeypatch.setenv("FEDSYNC_NODE", '{"silo-name": "berlin"}')
    begun(up.invited("a"), tmp_path / "s.session", {"silo-name": "paris", "relay": "/tmp/x"})
    answered_after(up)
    assert seen == ["berlin"]
