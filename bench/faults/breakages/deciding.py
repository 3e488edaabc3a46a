"""Mutants of everything that decides, in `fedsync/core` and `fedsync/policies`; the laws alone are to notice them."""

from __future__ import annotations

from bench.faults.breakages import Mutant

TESTS = ("tests/laws",)

_SSP = "fedsync/policies/barrier/kinds/ssp.py"

MUTANTS = (
    Mutant(
        "asp-never-releases-one-again",
        _SSP,
        "        idle = view.idle\n        failures = failed(state, idle, view)\n",
        "        idle = tuple(name for name in view.idle if name != 'silo-1' or not view.silos[name].clock)\n"
        "        failures = failed(state, idle, view)\n",
    ),
)
