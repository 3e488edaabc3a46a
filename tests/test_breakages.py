"""The lists of `bench/faults/breakages` fit the code as it is, and what runs them runs them."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from bench.faults import mutants as runner
from bench.faults.breakages import ROOT, Mutant, suites

SUITES = suites()
EVERY = [mutant for suite in SUITES.values() for mutant in suite.mutants]


@pytest.mark.parametrize("suite", SUITES)
def test_every_mutant_is_a_change_of_the_code_as_it_is(suite: str) -> None:
    """One place, still Python, and not only another comment."""
    same = []
    for mutant in SUITES[suite].mutants:
        before = (ROOT / mutant.file).read_text(encoding="utf-8")
        if ast.dump(ast.parse(mutant.source())) == ast.dump(ast.parse(before)):
            same.append(mutant.name)
    assert same == []
    assert SUITES[suite].mutants
    assert all((ROOT / test).exists() for test in SUITES[suite].tests if not test.startswith("-"))


def test_names_are_unique_and_words() -> None:
    assert [name for name, count in Counter(mutant.name for mutant in EVERY).items() if count > 1] == []
    assert [mutant.name for mutant in EVERY if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", mutant.name)] == []


def test_a_mutant_that_fits_no_more_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.faults.breakages.ROOT", tmp_path)
    (tmp_path / "some.py").write_text("one = 1\ntwo = 1\n")
    with pytest.raises(ValueError, match="occurs 2 times"):
        Mutant("a-b", "some.py", "1", "2").source()
    with pytest.raises(ValueError, match="no Python"):
        Mutant("a-b", "some.py", "one = 1", "one = (").source()
    assert Mutant("a-b", "some.py", "two = 1", "two = 2").source() == "one = 1\ntwo = 2\n"
    assert list(Mutant("a-b", "some.py", "1\ntwo = 1", "2").lines()) == [1, 2]


CODE = "def larger(a, b):\n    return max(a, b)\n\n\ndef loop(n):\n    while n > 0:\n        n -= 1\n    return n\n"
TESTS = """
from fedsync.code import larger, loop

def test_larger():
    assert larger(1, 2) == 2

def test_law():
    try:
        assert larger(3, 4) == 4
    except AssertionError as error:
        error.add_note("broken: the_larger_wins")
        raise

def test_loop():
    assert loop(3) == 0
"""


def test_the_runner_tells_killers_survivors_and_broken_mutants_and_leaves_the_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a repository of two files: what two notice, what only one does, what nobody does, and what cannot run."""
    for folder in ("bench/faults", "fedsync", "tests"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "fedsync/__init__.py").touch()
    (tmp_path / "fedsync/code.py").write_text(CODE)
    (tmp_path / "tests/test_code.py").write_text(TESTS)
    (tmp_path / "bench/faults/watching.py").write_text((ROOT / "bench/faults/watching.py").read_text())
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr("bench.faults.breakages.ROOT", tmp_path)
    file = "fedsync/code.py"
    fates = runner.run_all(
        [
            Mutant("least-wins", file, "max(a, b)", "min(a, b)"),
            Mutant("stops-at-one", file, "while n > 0", "while n > 1"),
            Mutant("nobody-looks", file, "return max(a, b)", "return max(a, b) + 0"),
            Mutant("no-name", file, "def larger", "nobody\n\n\ndef larger"),
        ],
        ["tests"],
        jobs=2,
    )
    assert fates["least-wins"].killers == ("tests/test_code.py::test_larger", "the_larger_wins")
    assert fates["stops-at-one"].killers == ("tests/test_code.py::test_loop",)
    assert (fates["nobody-looks"].killers, fates["nobody-looks"].error) == ((), "")
    assert "NameError" in fates["no-name"].error
    assert (tmp_path / file).read_text() == CODE


@pytest.mark.full
def test_tests_that_fail_without_a_mutant_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bench/faults").mkdir(parents=True)
    (tmp_path / "bench/faults/watching.py").write_text((ROOT / "bench/faults/watching.py").read_text())
    (tmp_path / "test_some.py").write_text("def test_some():\n    assert False\n")
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="fail without a mutant"):
        runner.run_all([], ["test_some.py"], jobs=1)
