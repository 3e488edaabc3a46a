"""The lists of `bench/faults/breakages` fit the code as it is, and what runs them runs them."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from bench.faults import mutants as runner
from bench.faults import mutation_score, repository_copy
from bench.faults.breakages import ROOT, Mutant, suites
from bench.faults.watching import broken_laws

SUITES = suites()
EVERY = [mutant for suite in SUITES.values() for mutant in suite.mutants]


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_every_mutant_is_a_change_of_the_code_as_it_is(suite: str) -> None:
    """One place, still Python, and not only another comment."""
    files = {mutant.file for mutant in SUITES[suite].mutants}
    before = {file: ast.dump(ast.parse((ROOT / file).read_text(encoding="utf-8"))) for file in files}
    changed = {mutant: ast.dump(ast.parse(mutant.source())) for mutant in SUITES[suite].mutants}
    assert [mutant.name for mutant, after in changed.items() if after == before[mutant.file]] == []
    assert SUITES[suite].mutants
    assert all((ROOT / test).exists() for test in SUITES[suite].tests if not test.startswith("-"))


def test_names_are_unique_and_words() -> None:
    assert [name for name, count in Counter(mutant.name for mutant in EVERY).items() if count > 1] == []
    assert [mutant.name for mutant in EVERY if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", mutant.name)] == []


def test_a_mutant_that_fits_no_more_is_told(tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text("one = 1\ntwo = 1\n")
    with pytest.raises(ValueError, match="occurs 2 times"):
        Mutant("a-b", "some.py", "1", "2").source(tmp_path)
    with pytest.raises(ValueError, match="no Python"):
        Mutant("a-b", "some.py", "one = 1", "one = (").source(tmp_path)
    assert Mutant("a-b", "some.py", "two = 1", "two = 2").source(tmp_path) == "one = 1\ntwo = 2\n"
    assert list(Mutant("a-b", "some.py", "1\ntwo = 1", "2").lines(tmp_path)) == [1, 2]


CODE = "def larger(a, b):\n    return max(a, b)\n\n\ndef loop(n):\n    while n > 0:\n        n -= 1\n    return n\n"
TESTS = """
from fedsync.code import larger, loop

def test_larger():
    assert larger(1, 2) == 2

def test_law():
    try:
        assert larger(3, 4) == 4
    except AssertionError as error:
        error.add_note("broken: the larger wins (in some corner)")
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
    monkeypatch.setattr(repository_copy, "ROOT", tmp_path)
    monkeypatch.setattr(repository_copy, "IMPORTED", ("pytest", "coverage"))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    file = "fedsync/code.py"
    fates = runner.run_all(
        [
            Mutant("least-wins", file, "max(a, b)", "min(a, b)"),
            Mutant("stops-at-one", file, "while n > 0", "while n > 1"),
            Mutant("nobody-looks", file, "return max(a, b)", "return max(a, b) + 0"),
            Mutant("no-name", file, "def larger", "nobody\n\n\ndef larger"),
        ],
        ["tests"],
        jobs=1,
        kept=tmp_path / "results" / "kept.json",
    )
    assert fates["least-wins"].killers == ("tests/test_code.py::test_larger", "the larger wins")
    assert fates["stops-at-one"].killers == ("tests/test_code.py::test_loop",)
    assert (fates["nobody-looks"].killers, fates["nobody-looks"].error) == ((), "")
    assert "NameError" in fates["no-name"].error
    assert (tmp_path / file).read_text() == CODE


@pytest.mark.full
def test_tests_that_fail_without_a_mutant_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bench/faults").mkdir(parents=True)
    (tmp_path / "bench/faults/watching.py").write_text((ROOT / "bench/faults/watching.py").read_text())
    (tmp_path / "test_some.py").write_text("def test_some():\n    assert False\n")
    monkeypatch.setattr(repository_copy, "ROOT", tmp_path)
    monkeypatch.setattr(repository_copy, "IMPORTED", ("pytest", "coverage"))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    with pytest.raises(SystemExit, match="fail without a mutant"):
        runner.run_all([], ["test_some.py"], jobs=1, kept=tmp_path / "kept.json")


def test_a_share_has_wilsons_interval() -> None:
    """By hand, with z^2 = 3.8416: of 4 in 4 the middle is (1 + 0.4802) / 1.9604, and the upper end 1."""
    low, high = mutation_score.wilson(4, 4)
    assert (low, high) == (pytest.approx(2 * (1 + 3.8416 / 8) / (1 + 3.8416 / 4) - 1, abs=1e-4), pytest.approx(1.0))
    low, high = mutation_score.wilson(50, 100)
    assert low + high == pytest.approx(1.0)
    assert high - low == pytest.approx(2 * 1.96 / (100 + 3.8416) ** 0.5 / 2, abs=1e-5)


def test_the_statement_of_a_line_is_the_innermost_and_of_one_with_a_body_its_head() -> None:
    code = "def f(\n    a,\n):\n    if (\n        a\n    ):\n        g(\n            1,\n        )\n    return a\n"
    found = [mutation_score.statement(code, line) for line in range(1, 11)]
    assert found == [range(1, 4)] * 3 + [range(4, 7)] * 3 + [range(7, 10)] * 3 + [range(10, 11)]


def test_a_law_counts_once_whatever_stands_behind_its_name() -> None:
    one, other = AssertionError("no"), AssertionError("no")
    one.add_note("broken: nobody starves while others go on (in the corner 'quiet' of a case)")
    one.add_note("broken: nobody starves while others go on; to see it again:\nreplay(...)")
    other.add_note("broken: policies do not crash")
    other.add_note("of the broken: only what begins so")
    assert set(broken_laws(ExceptionGroup("laws are broken", [one, other]))) == {
        "nobody starves while others go on",
        "policies do not crash",
    }
