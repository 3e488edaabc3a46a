"""The page of a run: who gets to see it, who gets to change something, and what a hostile silo makes of it."""

import http.client
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsync.cli import app
from fedsync.common.errors import ConfigError
from fedsync.core.coordinator import Coordinator
from fedsync.core.events import OperatorAsked, WorkFailed
from fedsync.core.journal import JOURNAL, JournalWriter
from fedsync.core.operator.operator_commands import DropSilo, OperatorQuestion, PauseRun
from fedsync.core.stopping import StopRules
from fedsync.extras.page.page_server import HEADERS, MOST_BYTES, PageServer
from fedsync.extras.page.run_view import MOST_DECISIONS, MOST_SPANS, RunView
from tests.core.make import answer, joined, orders, policies

HOSTILE = '<img src=x onerror="alert(1)">'


def write(folder: Path, rounds: int = 2) -> None:
    """A run of BSP: rounds of a second; then a silo fails with a reason of its own, and somebody pauses."""
    header = {"runtime": "local", "config": {"name": "mine", "stop": {"rounds": 90}}, "model_bytes": 40}
    writer, coordinator = JournalWriter(folder / JOURNAL, header), Coordinator(policies())
    entry = coordinator.handle(joined("a", HOSTILE), 0.0)
    writer.append(entry)
    for number in range(1, rounds + 1):
        entry = coordinator.handle([answer(n, o, float(number)) for n, o in orders(entry).items()], float(number))
        writer.append(entry)
    failed = orders(entry)["a"].update_id
    writer.append(coordinator.handle([WorkFailed(rounds + 1.0, "a", failed, HOSTILE)], rounds + 1.0))
    writer.append(coordinator.handle([OperatorAsked(rounds + 2.0, "1", PauseRun())], rounds + 2.0))
    writer.close()


class Asked:
    def __init__(self) -> None:
        self.questions: list[OperatorQuestion] = []

    def __call__(self, folder: Path, question: OperatorQuestion) -> None:
        if question == DropSilo("x"):
            raise ConfigError(str(folder), "no silo is called 'x'", "Nothing was changed")
        self.questions.append(question)


@pytest.fixture
def asked() -> Asked:
    return Asked()


@contextmanager
def served(folder: Path, *, daemon: bool = True, **options: Any) -> Iterator[PageServer]:
    with PageServer(folder, **options) as made:
        thread = threading.Thread(target=made.serve_forever, daemon=daemon)
        thread.start()
        try:
            yield made
        finally:
            made.shutdown()
            thread.join(20)


@pytest.fixture
def server(tmp_path: Path, asked: Asked) -> Iterator[PageServer]:
    write(tmp_path)
    with served(tmp_path, asks=asked) as made:
        yield made


Answered = tuple[int, http.client.HTTPMessage, Any]


def call(server: PageServer, path: str, body: Any = None, /, method: str = "", **headers: str) -> Answered:
    """Status, headers and content; ``Host`` and ``Origin`` are the page's own unless ``headers`` say otherwise."""
    line = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    own = f"127.0.0.1:{server.server_port}"
    told = {"Host": own, **({} if body is None else {"Origin": f"http://{own}", "Content-Type": "application/json"})}
    told |= {name.replace("_", "-"): value for name, value in headers.items()}
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    line.putrequest(method or ("GET" if body is None else "POST"), path, skip_host=True)
    for name, value in {**told, **({} if data is None else {"Content-Length": str(len(data))})}.items():
        line.putheader(name, value)
    line.endheaders(data)
    answer = line.getresponse()
    content = answer.read()
    line.close()
    kind = answer.getheader("Content-Type", "")
    return answer.status, answer.headers, json.loads(content) if "json" in kind else content.decode()


def token_of(server: PageServer) -> str:
    return server.link.partition("#")[2]


def enter(server: PageServer) -> dict[str, str]:
    status, headers, told = call(server, "/enter", {"token": token_of(server)})
    assert status == 200
    return {"Cookie": headers["Set-Cookie"].partition(";")[0], "X_FedSync_Key": told["key"]}


def test_who_opens_the_link_sees_the_run(server: PageServer) -> None:
    status, _, run = call(server, "/run", **enter(server))
    assert status == 200
    assert (run["title"], run["state"], run["rounds"], run["stop"]) == ("mine", "paused", 2, {"rounds": 90})
    assert [silo["name"] for silo in run["silos"]] == sorted(["a", HOSTILE])
    assert [point[0] for point in run["points"]] == [1.0, 2.0]
    assert run["operator"] == [[4.0, "paused the run", ""]]
    assert run["steers"] is False, "nobody is at work in this folder"
    first = next(silo for silo in run["silos"] if silo["name"] == "a")
    # Orders of 4 steps of 8 samples at 100 samples/s, a second apart; the third failed after one.
    assert first["spans"] == [[0.0, 0.32, 1.0], [1.0, 0.32, 2.0], [2.0, None, 3.0]]
    assert (first["orders"], first["failures"], first["bytes_up"]) == (2, 1, 80)


def test_the_link_opens_once_and_its_cookie_is_for_this_page_alone(server: PageServer) -> None:
    link = token_of(server)
    _, headers, told = call(server, "/enter", {"token": link})
    flags = [part.strip() for part in headers["Set-Cookie"].split(";")[1:]]
    assert flags == ["HttpOnly", "SameSite=Strict", "Path=/"]
    assert told["key"] not in headers["Set-Cookie"]
    status, headers, told = call(server, "/enter", {"token": link})
    assert status == 401
    assert "Set-Cookie" not in headers
    assert "key" not in told


@pytest.mark.parametrize("token", ["", "x", "None", None, "ü"])
def test_another_token_opens_nothing(server: PageServer, token: str | None) -> None:
    assert call(server, "/enter", {"token": token})[0] == 401
    assert call(server, "/enter", {"token": token_of(server)})[0] == 200, "nor does it use up the link"


@pytest.mark.parametrize("without", ["Cookie", "X_FedSync_Key", "both"])
@pytest.mark.parametrize("path", ["/run", "/ask"])
def test_cookie_and_key_are_needed_for_all_of_a_run(server: PageServer, asked: Asked, path: str, without: str) -> None:
    """Cookies go to every port of this machine, and to every page that another of its users serves."""
    known = enter(server)
    told = {name: value for name, value in known.items() if without not in (name, "both")}
    status, _, content = call(server, path, {"type": "PauseRun"} if path == "/ask" else None, **told)
    assert status == 401
    assert "mine" not in json.dumps(content)
    spoiled = {**known, (without if without != "both" else "Cookie"): "fedsync=x"}
    assert call(server, path, {"type": "PauseRun"} if path == "/ask" else None, **spoiled)[0] == 401
    assert asked.questions == []


def test_nothing_is_shown_before_the_link_was_opened(server: PageServer) -> None:
    secrets = {"Cookie": f"{server.cookie_name}={server._cookie}", "X_FedSync_Key": server._key}
    assert call(server, "/run", **secrets)[0] == 401


def test_a_name_that_leads_here_is_not_this_server(server: PageServer) -> None:
    known, port = enter(server), server.server_port
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", "127.0.0.1:1", f"[::1]:{port}", ""):
        for path in ("/", "/run", "/page.js"):
            assert call(server, path, **{**known, "Host": host})[0] == 403, (host, path)


@pytest.mark.parametrize("path", ["/enter", "/ask"])
def test_another_page_changes_nothing(server: PageServer, asked: Asked, path: str) -> None:
    known, port = enter(server), server.server_port
    for origin in ("http://evil.example", "null", "", "http://127.0.0.1:1", f"https://127.0.0.1:{port}"):
        assert call(server, path, {"type": "PauseRun"}, **{**known, "Origin": origin})[0] == 403, origin
    assert asked.questions == []


def test_a_form_of_another_page_is_no_question(server: PageServer, asked: Asked) -> None:
    """Which a browser sends to other origins without asking: as text, or as a form."""
    known = enter(server)
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        assert call(server, "/ask", {"type": "PauseRun"}, **{**known, "Content_Type": kind})[0] == 400
    assert asked.questions == []


def test_what_is_asked_is_handed_on_and_a_refusal_comes_back(server: PageServer, asked: Asked) -> None:
    known = enter(server)
    assert call(server, "/ask", {"type": "PauseRun"}, **known)[::2] == (200, {"done": "paused the run"})
    told = call(server, "/ask", {"type": "DropSilo", "silo": "x"}, **known)
    assert told[::2] == (409, {"problem": "no silo is called 'x'"})
    assert asked.questions == [PauseRun()]


def test_the_end_of_the_page_waits_for_no_answer_of_the_run(tmp_path: Path) -> None:
    """The command serves in its main thread, and Python's end waits for all threads but daemons."""
    daemons: list[bool] = []

    def asks(folder: Path, question: OperatorQuestion) -> None:
        daemons.append(threading.current_thread().daemon)

    write(tmp_path)
    with served(tmp_path, daemon=False, asks=asks) as server:
        assert call(server, "/ask", {"type": "PauseRun"}, **enter(server))[0] == 200
    assert daemons == [True]


def test_what_is_no_question_is_refused(server: PageServer, asked: Asked) -> None:
    known = enter(server)
    unknown = ({"type": "Stop", "reason": "x"}, {"type": "PauseRun", "more": 1}, {})
    of_another_type = ({"type": "ChangeStop", "rounds": "3"}, {"type": "ChangeStop", "rounds": 1.5})
    for body in (b"", b"[]", b"{", b"[" * 4000, *unknown, *of_another_type):
        assert call(server, "/ask", body, **known)[0] == 400, body
    assert asked.questions == []


def test_a_large_body_is_not_read(server: PageServer) -> None:
    known = enter(server)
    assert call(server, "/ask", b"x", **{**known, "Content_Length": str(MOST_BYTES + 1)})[0] == 400
    assert call(server, "/ask", b"x", **{**known, "Transfer_Encoding": "chunked"})[0] == 400


def test_a_page_that_only_shows_asks_nothing(tmp_path: Path, asked: Asked) -> None:
    write(tmp_path)
    with served(tmp_path, steers=False, asks=asked) as server:
        assert call(server, "/ask", {"type": "PauseRun"}, **enter(server))[0] == 403
    assert asked.questions == []


def test_every_answer_has_the_policy(server: PageServer) -> None:
    answers = [("DELETE", "/run", 405)]
    answers += [("GET", path, 200) for path in ("/", "/page.css", "/page.js")]
    answers += [("GET", path, 404) for path in ("/nothing", "/../server.py", "/page.html")] + [("GET", "/run", 401)]
    for method, path, expected in answers:
        status, headers, _ = call(server, path, method=method)
        assert status == expected, path
        assert {name: headers.get(name) for name in HEADERS} == HEADERS, path
        assert headers["Server"] == "FedSync"


def test_the_policy_lets_nothing_in_but_what_is_served_here() -> None:
    policy = dict(part.strip().partition(" ")[::2] for part in HEADERS["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert set(policy.values()) == {"'none'", "'self'"}


def test_the_page_has_no_script_of_its_own_and_writes_text_only() -> None:
    folder = files("fedsync.extras.page")
    html, script = (folder / "page.html").read_text(), (folder / "page.js").read_text()
    assert not re.search(r"<script>|<style|\sstyle=|\son\w+=|javascript:|https?://", html)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|Function\(|setAttribute\(\"on", script
    )
    assert re.findall(r"https?://[^\"]*", script) == ["http://www.w3.org/2000/svg"], "the name of SVG, not a place"


def test_nothing_secret_is_logged(server: PageServer, capfd: pytest.CaptureFixture[str]) -> None:
    known = enter(server)
    call(server, "/run", **known)
    call(server, "/enter", {"token": "x"})
    assert capfd.readouterr() == ("", "")


def test_an_order_that_the_operator_took_is_no_failure_and_what_was_refused_is_not_told_as_done(tmp_path: Path) -> None:
    coordinator = Coordinator(policies())
    writer = JournalWriter(tmp_path / JOURNAL, {"runtime": "local", "config": {"name": "x"}})
    first = coordinator.handle(joined("a", "b"), 0.0)
    writer.append(first)
    failed = orders(first)["b"].update_id
    writer.append(coordinator.handle([WorkFailed(1.0, "b", failed, "OUT OF MEMORY")], 1.0))
    for at_s, question in enumerate((DropSilo("a"), DropSilo("x")), start=2):
        writer.append(coordinator.handle([OperatorAsked(float(at_s), str(at_s), question)], float(at_s)))
    writer.close()
    look = RunView(tmp_path).look()
    assert [(silo["name"], silo["failures"]) for silo in look["silos"]] == [("a", 0), ("b", 1)]
    assert [text for _, text, _ in look["operator"]] == ["dropped a", "drop x"]


@pytest.mark.slow
def test_a_long_run_is_shown_in_bounded_space(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / JOURNAL, {"runtime": "local", "config": {"name": "x"}})
    view = RunView(tmp_path)
    assert view.look() == {"entries": 0, "title": tmp_path.name, "why": None}
    coordinator = Coordinator(policies(stop=StopRules(rounds=900)))
    entry = coordinator.handle(joined("a", "b"), 0.0)
    writer.append(entry)
    sizes = []
    for number in range(1, 801):
        entry = coordinator.handle([answer(n, o, float(number)) for n, o in orders(entry).items()], float(number))
        writer.append(entry)
        if number % 400 == 0:
            shown = view.look()
            assert shown["rounds"] == number, "each look goes on where the last ended"
            sizes.append(len(json.dumps(shown)))
    writer.close()
    assert len(shown["silos"][0]["spans"]) == MOST_SPANS
    assert len(shown["decisions"]) == MOST_DECISIONS
    assert sizes[1] < 1.1 * sizes[0]


def test_the_command_says_what_is_wrong(tmp_path: Path, server: PageServer) -> None:
    (tmp_path / "empty").mkdir()
    for words, problem in (
        (["none"], "no such folder"),
        (["empty"], "no run: journal.jsonl is not there"),
        (["", "--port", str(server.server_port)], "cannot be used"),
    ):
        result = CliRunner().invoke(app, ["page", str(tmp_path / words[0]), *words[1:]])
        assert problem in str(result.exception)
