"""Ten small breakages, each of which a law must notice in one run; `bench/faults/mutants.py` tries all that are listed.

A breakage is made in this process: functions get the code that they would have, were the file changed.
"""

import inspect
from collections.abc import Iterator
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any
from zlib import crc32

import pytest

from bench.faults.breakages import ROOT, Mutant, suites
from tests.laws.corners import corners
from tests.laws.kinds import configuration
from tests.laws.law import laws
from tests.laws.watched import CASES, NAMES, run

MUTANTS = {mutant.name: mutant for mutant in suites()["deciding"].mutants}


def functions_in(code: CodeType) -> Iterator[CodeType]:
    """The code of every function and method of a module."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            if not each.co_flags & inspect.CO_OPTIMIZED:  # a class body
                yield from functions_in(each)


def replaced(mutant: Mutant) -> list[tuple[FunctionType, CodeType]]:
    """The functions that a mutant changes, and their other code."""
    module = import_module(mutant.file.removesuffix(".py").replace("/", "."))
    path = str(ROOT / mutant.file)
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    before, after = (functions_in(compile(source, path, "exec")) for source in (text, mutant.source()))
    found = []
    for old, new in zip(before, after, strict=True):
        if old != new and new.co_flags & inspect.CO_OPTIMIZED:
            place: Any = module
            for name in new.co_qualname.split("."):
                place = inspect.getattr_static(place, name)
            function = getattr(place, "fget", None) or getattr(place, "__func__", place)
            found.append((function, new))
    return found


def broken(case: str, corner: str) -> str:
    """The first law that a run of a case through a corner breaks, or its own end; empty if it keeps them all."""
    chosen = corners(crc32(case.encode()))[corner]
    config = configuration(CASES[NAMES.index(case)], dict(chosen.stop), chosen.min_silos)
    try:
        seen = run(config, chosen)
    except Exception as error:
        return repr(error)
    for law in laws():
        if not law.unless(config):
            try:
                law.check(seen)
            except Exception:
                return law.name
    return ""


@pytest.mark.parametrize(
    ("name", "case", "corner"),
    [
        ("asp-never-releases-one-again", "asp", "quiet"),
        ("a-bsp-never-releases-one-again", "a-bsp-0.6-0.3", "quiet"),
        ("bsp-never-asks-one-again-that-failed", "bsp", "failing"),
        ("bsp-leaves-late-updates-out-of-every-commit", "quorum-0.5-{'kind': 'bsp'}", "lying"),
        ("asp-never-commits-what-is-old", "asp", "quiet"),
        ("ssp-waits-for-silos-that-are-gone", "ssp-1", "comings"),
        ("sampled-draws-otherwise-in-a-replay", "sampled-2-1", "quiet"),
        ("weights-go-to-the-wrong-silos", "fedavg-examples", "quiet"),
        ("every-order-of-a-silo-has-the-same-seed", "bsp", "alone"),
        ("ssp-overlooks-that-the-slowest-has-come-on", "ssp-1", "quiet"),
    ],
)
def test_laws_bite(name: str, case: str, corner: str) -> None:
    changes = replaced(MUTANTS[name])
    assert changes
    kept = [(function, function.__code__) for function, _ in changes]
    try:
        for function, code in changes:
            function.__code__ = code
        assert broken(case, corner)
    finally:
        for function, code in kept:
            function.__code__ = code
