"""What a law is: a promise to users, and a function that looks whether a finished run kept it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules

from fedsync.config.strategy import StrategyConfig
from tests.laws import promises
from tests.laws.watched import CASES, Run, configured, runs

Check = Callable[[Run], int]
"""Raises if a run broke the law, and returns how often the run put it to the test."""


@dataclass(frozen=True)
class Law:
    """A promise.

    Args:
        check: looks at a run.
        least: how often the runs of a case must put it to the test, together.
        unless: why it says nothing about a strategy, by what the strategy's policies say of themselves; empty if it
            does.
    """

    check: Check
    least: int
    unless: Callable[[StrategyConfig], str]

    @property
    def name(self) -> str:
        return self.check.__name__.replace("_", " ")

    @property
    def promise(self) -> str:
        """In a sentence."""
        return " ".join((self.check.__doc__ or "").split("\n\n")[0].split())


_LAWS: list[Law] = []


def law(least: int, unless: Callable[[StrategyConfig], str] = lambda _: "") -> Callable[[Check], Check]:
    """Decorator of a law in a module of `promises`; see `Law`. The first paragraph of its docstring is the promise."""

    def decorate(check: Check) -> Check:
        _LAWS.append(Law(check, least, unless))
        return check

    return decorate


def laws() -> list[Law]:
    for module in iter_modules(promises.__path__, f"{promises.__name__}."):
        import_module(module.name)
    return _LAWS


@dataclass(frozen=True, slots=True)
class Broken:
    """A law that a run broke, or a run that could not be made."""

    law: str
    corner: str
    error: Exception


def kept(case: int, some: bool = False) -> tuple[Mapping[str, int], list[Broken]]:
    """Number of times that each law of a case was put to the test, by name; and the broken ones. See `runs`."""
    config = configured(case)
    exposures = {each.name: 0 for each in laws() if not each.unless(config)}
    broken: list[Broken] = []
    for corner, run in runs(case, some).items():
        if isinstance(run, Exception):
            broken.append(Broken("policies do not crash", corner, run))
            continue
        for each in laws():
            if each.name in exposures:
                try:
                    exposures[each.name] += each.check(run)
                except Exception as error:  # a crash breaks a law too
                    broken.append(Broken(each.name, corner, error))
    return exposures, broken


def keep(case: int, some: bool) -> None:
    """Fail with all that is broken, by name, or with the laws that all runs of the case put to the test too seldom."""
    exposures, broken = kept(case, some)
    for each in broken:
        each.error.add_note(f"broken: {each.law} (in the corner {each.corner!r} of {CASES[case]})")
    if broken:
        raise ExceptionGroup("laws are broken", [each.error for each in broken])
    seldom = not some and {
        each.name: exposures[each.name] for each in laws() if exposures.get(each.name, each.least) < each.least
    }
    assert not seldom, f"put to the test too seldom: {seldom}"
