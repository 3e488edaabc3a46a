"""The page in a real browser, where there is one: it shows a run, steers it, and no hostile name becomes a script."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.browser import Browser, find
from fedsync.common.locks import wait_until
from fedsync.core.actions import Note
from fedsync.core.coordinator import Coordinator
from fedsync.core.events import OperatorAsked
from fedsync.core.journal import JOURNAL, JournalEntry, JournalWriter
from fedsync.extras.page.page_server import PageServer
from fedsync.server.operator_requests import OperatorRequests
from tests.core.make import answer, joined, orders, policies
from tests.extras.page.test_page import served

PROGRAM = find()
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
WITHIN_S = 60.0


class LiveJournal:
    """A run of two silos that stands still, and does what is asked of it."""

    def __init__(self, folder: Path) -> None:
        header = {"runtime": "local", "config": {"name": "mine", "stop": {"rounds": 90}}, "model_bytes": 40}
        self._writer, self._coordinator = JournalWriter(folder / JOURNAL, header), Coordinator(policies())
        self._desk, self._over = OperatorRequests(folder), threading.Event()
        entry = self._tell(joined("a", "b", HOSTILE), 0.0)
        entry = self._tell([answer(n, o, 1.0) for n, o in orders(entry).items()], 1.0)
        self._writer.append(JournalEntry(1.5, (), (Note(HOSTILE),), HOSTILE))
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _tell(self, events: list[Any], at_s: float) -> JournalEntry:
        entry = self._coordinator.handle(events, at_s)
        self._writer.append(entry)
        return entry

    def _listen(self) -> None:
        at_s = 2.0
        while not self._over.wait(0.02):
            for event in self._desk.events(at_s):
                assert isinstance(event, OperatorAsked)
                self._desk.on_saved(self._tell([event], at_s))
                at_s += 1.0

    def close(self) -> None:
        self._over.set()
        self._thread.join(20)
        self._desk.close()
        self._writer.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PageServer]:
    run = LiveJournal(tmp_path)
    with served(tmp_path) as made:
        yield made
    run.close()


def until(browser: Browser, expression: str) -> None:
    true = wait_until(lambda: browser.value(expression), WITHIN_S, 0.05)
    assert true, (expression, browser.value("document.body.innerText"))


@pytest.mark.skipif(PROGRAM is None, reason="no Chromium or Chrome on this machine")
def test_a_run_is_looked_at_and_steered(server: PageServer) -> None:
    assert PROGRAM is not None
    with Browser(PROGRAM) as browser:
        browser.ask("Page.navigate", url=server.link)
        until(browser, "document.title === 'running: mine'")
        assert browser.value("location.href") == f"http://127.0.0.1:{server.server_port}/", "the token is not kept"
        names = "[...document.querySelectorAll('#silos th')].map(cell => cell.textContent).sort().join()"
        assert browser.value(names) == ",".join(sorted(["a", "b", HOSTILE]))
        assert browser.value("document.images.length + document.querySelectorAll('body script').length") == 0
        assert browser.value("document.querySelectorAll('#timeline rect.compute').length") == 3

        browser.value("document.getElementById('pause').click()")
        until(browser, "document.title === 'paused: mine'")
        assert browser.value("document.getElementById('answer').textContent") == "Done: paused the run"
        browser.value("window.confirm = () => true")
        browser.value("document.querySelector('[aria-label=\"Drop b\"]').click()")
        until(browser, "document.querySelector('[aria-label=\"Readmit b\"]') !== null")
        fills = "[...document.querySelectorAll('#timeline rect.absence')].map(one => one.getAttribute('fill'))"
        until(browser, f"{fills}.includes('url(#hatch-dropped)')")
        browser.value("document.querySelector('[name=rounds]').value = '0'")
        browser.value("document.getElementById('stop').dispatchEvent(new Event('submit', {cancelable: true}))")
        until(browser, "document.getElementById('answer').textContent.startsWith('Refused: 0 rounds are none')")
        browser.value("void ask({ type: 'DropSilo', silo: 'b' })")
        asked = "[...document.querySelectorAll('#operator li')].map(one => one.children[1].textContent).join()"
        until(browser, f"{asked}.includes('refused')")
        assert browser.value(asked) == "refused: drop b,dropped b,paused the run"

        for width in (1280, 400):
            browser.resize(width)
            assert browser.value("document.documentElement.scrollWidth") <= width, "nothing is wider than the page"
        browser.ask("Page.reload")
        until(browser, "document.title === 'paused: mine'")
        assert browser.value("document.cookie") == "", "no script has it"


@pytest.mark.skipif(PROGRAM is None, reason="no Chromium or Chrome on this machine")
def test_a_browser_that_did_not_open_the_link_sees_nothing(server: PageServer) -> None:
    assert PROGRAM is not None
    with Browser(PROGRAM) as browser:
        browser.ask("Page.navigate", url=f"http://127.0.0.1:{server.server_port}/#guess")
        until(browser, "!document.getElementById('trouble').hidden")
        assert "the link was used already" in browser.value("document.getElementById('trouble').textContent")
        assert "mine" not in browser.value("document.body.innerText")
