"""A pytest plugin for `mutants.py` and `mutation_score.py`: which test runs which line, and which notices a mutant.

It reads its task from the JSON file that `BREAKAGE` names, and writes its results into the file beside it:

- asked: ``trace``, files whose lines are watched; ``only``, usual seconds of the tests to run, in this order, or null
  for all tests; ``part``, number and count of the equal parts into which all tests are divided; ``enough``, the number
  of different killers that ends the session.
- seen: ``tests``, seconds and killers of each; ``lines``, by file and line the tests that ran it, "" for imports;
  ``unread``, errors of test files that could not be collected.

A test that takes much longer than usual is interrupted, and fails. A *killer* is the law that the notes of the
failure's exceptions name as ``broken: <law>``, else the test's function.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from coverage import Coverage

ASKED = "BREAKAGE"


def seen_beside(asked: Path) -> Path:
    """Where a session writes what it has seen."""
    return asked.with_suffix(".seen.json")


class Watch:
    """What one session is asked and sees."""

    def __init__(self, asked: Path) -> None:
        self._asked = asked
        ask = json.loads(asked.read_text(encoding="utf-8"))
        self._only: dict[str, float] | None = ask["only"]
        self._part: tuple[int, int] = ask["part"]
        self._enough: int = ask["enough"]
        self._coverage = Coverage(data_file=None, include=ask["trace"], config_file=False) if ask["trace"] else None
        self._tests: dict[str, dict[str, Any]] = {}
        self._unread: dict[str, str] = {}
        self._laws: set[str] = set()
        if self._coverage is not None:
            self._coverage.start()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._only is not None:
            places = {name: place for place, name in enumerate(self._only)}
            items[:] = sorted((item for item in items if item.nodeid in places), key=lambda item: places[item.nodeid])
        place, count = self._part
        items[:] = items[place::count]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._unread[report.nodeid] = report.longreprtext[-2000:]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        if self._coverage is not None:
            self._coverage.switch_context(item.nodeid)
        if self._only is not None:
            limit_s = 20.0 + 20.0 * self._only[item.nodeid]
            signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> None:
        self._laws = set() if call.excinfo is None else set(broken_laws(call.excinfo.value))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._tests.setdefault(report.nodeid, {"seconds": 0.0, "killers": []})
        test["seconds"] += report.duration
        if report.failed:
            function = report.nodeid.split("[")[0]
            test["killers"] = sorted(self._laws) or [function]

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        killers = {killer for test in self._tests.values() for killer in test["killers"]}
        if self._enough and len(killers) >= self._enough:
            item.session.shouldstop = f"{len(killers)} killers are enough"

    def pytest_sessionfinish(self) -> None:
        lines: dict[str, dict[int, list[str]]] = defaultdict(dict)
        if self._coverage is not None:
            self._coverage.stop()
            data = self._coverage.get_data()
            for file in data.measured_files():
                lines[str(Path(file).relative_to(Path.cwd()))] = data.contexts_by_lineno(file)
        seen = {"tests": self._tests, "lines": lines, "unread": self._unread}
        seen_beside(self._asked).write_text(json.dumps(seen), encoding="utf-8")


def broken_laws(error: BaseException) -> Iterator[str]:
    """Names of the laws that an exception, and those inside it, are noted to break; more may stand behind it."""
    for note in getattr(error, "__notes__", []):
        if found := re.match(r"broken: ([^(;\n]+)", note):
            yield found[1].strip()
    for inner in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        yield from broken_laws(inner)


def _too_long(number: int, frame: object) -> None:
    raise TimeoutError("takes much longer than usual")


def pytest_configure(config: pytest.Config) -> None:
    if ASKED in os.environ:
        signal.signal(signal.SIGALRM, _too_long)
        config.pluginmanager.register(Watch(Path(os.environ[ASKED])))
