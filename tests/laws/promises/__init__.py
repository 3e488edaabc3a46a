"""The laws of runs. A module with a function that `tests.laws.law.law` decorates is in; nothing else lists it."""
