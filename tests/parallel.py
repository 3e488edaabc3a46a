"""Parallel runs with pytest-xdist in which a process imports and collects only the test files that it runs.

pytest-xdist has each process collect every test first, and hands out tests only then. Here a file counts as one item
until its turn comes, so that the cost of collecting is shared like the tests' own. Loaded with ``-p tests.parallel``.
"""

import gc
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# Files whose tests fork, for PyTorch's workers: while nothing else has been here whose threads a child would lack.
_FORKING = (
    "tests/client/test_own_loop.py",
    "tests/client/test_lasting.py",
    "tests/client/test_steps.py",
    "tests/train/test_batches.py",
)

# Files that take longest, by the time that they took, those first that mostly wait for processes of Flower.
_LONG = (
    "tests/e2e/test_recovery.py",
    "tests/e2e/test_strangers.py",
    "tests/e2e/",
    "tests/server/test_region_clients.py",
    "tests/silo/test_resident_trainer.py",
    "tests/silo/",
    "tests/attacks/test_real_processes.py",
    "tests/laws/test_barriers",
    "tests/docs/",
    "tests/test_bench.py",
    "tests/laws/",
)


def turn(item: pytest.Item) -> int:
    """Place of a test's file in the order: files that fork, then long ones in their order, then all others."""
    if item.nodeid.startswith(_FORKING):
        return 0
    return next((n for n, begin in enumerate(_LONG, 1) if item.nodeid.startswith(begin)), 1 + len(_LONG))


@contextmanager
def long_lived() -> Iterator[None]:
    """Collecting tests makes millions of objects that all stay: garbage collection leaves them out from here on."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class _WholeFile(pytest.Item):
    """All tests of a file that is not imported yet."""

    def runtest(self) -> None:
        raise NotImplementedError("pytest_runtest_protocol() runs its tests")

    def collected(self) -> list[pytest.Item]:
        """Its tests, without those that the command line deselects."""
        assert self.parent is not None and self.parent.parent is not None
        module = pytest.Module.from_parent(self.parent.parent, path=self.path)
        with long_lived():
            tests = list(self.session.genitems(module))
        self.config.hook.pytest_collection_modifyitems(session=self.session, config=self.config, items=tests)
        return tests


class _LaterModule(pytest.Module):
    """A test file that is not imported yet, with one item in the place of its tests."""

    def collect(self) -> list[pytest.Item]:
        return [_WholeFile.from_parent(self, name="all")]


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return _LaterModule.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Options such as ``-m`` are for tests: they deselect no file."""
    files = [item for item in items if isinstance(item, _WholeFile)]
    yield
    if files:
        items[:] = sorted(files, key=turn)


_internal_errors = list[str]()


def pytest_internalerror(excrepr: object) -> None:
    """A process that ends with such an error, as when a file calls sys.exit(), leaves its other files undone."""
    _internal_errors.append(str(excrepr))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """pytest-xdist prints such errors of its processes, but the run would end as if all were well."""
    if _internal_errors:
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Runs a file's tests, each of which takes the file's place among the session's items meanwhile."""
    if not isinstance(item, _WholeFile):
        return None
    session, place = item.session, item.session.items.index(item)
    # What a session shares lives on, except after its last file; what belongs to a file or its folder does not.
    end = None if nextitem is None else _WholeFile.from_parent(session, name="end", nodeid="end")
    tests = item.collected()
    if not tests and nextitem is None:
        session._setupstate.teardown_exact(None)  # an error while the session ends would show nowhere
    for test, following in zip(tests, [*tests[1:], end], strict=False):
        session.items[place] = test
        item.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
        if session.shouldfail or session.shouldstop:
            break
    session.items[place] = item
    return True
