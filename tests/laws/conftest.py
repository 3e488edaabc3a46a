"""Choice of the cases for each test in ``make test``; in ``make full`` all go through all."""

from pathlib import Path

import pytest

from tests.laws.kinds import COMBINED, VARIANTS, name_of
from tests.laws.watched import CASES

FOLDER = Path(__file__).parent
NAMES = [name_of(case) for case in COMBINED]
IN_TURNS = (
    "test_whatever_a_driver_may_tell",
    "test_a_run_is_steered_under_every_barrier",
    "test_what_happens_later_is_decided_later",
    "test_permuted_silos_permute_the_actions_of_what_is_symmetric",
    "test_twice_the_speed_halves_the_times_of_what_is_scale_free",
    "test_two_runs_in_one_process_know_nothing_of_each_other_nor_of_the_world",
)
"""Of these, each variant goes through every third, and each has a third of the variants."""


def _waits(item: pytest.Item) -> bool:
    """Whether a test is for ``make full``: of a combination, or of a variant whose turn is another test's."""
    told = getattr(item, "callspec", None) if item.path.parent == FOLDER else None
    if told is None:
        return False
    case, name = told.params.get("case"), item.name.partition("[")[0]
    case = CASES[case] if isinstance(case, int) else case
    others = name in IN_TURNS and case in VARIANTS and (VARIANTS.index(case) + IN_TURNS.index(name)) % 3 != 0
    return others or any(name in told.id for name in NAMES)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in filter(_waits, items):
        item.add_marker(pytest.mark.full)
