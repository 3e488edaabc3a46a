"""Every aggregation through every corner, and what the laws of `promises` say of it; see `tests.laws.law`."""

import pytest

from tests.laws.law import keep
from tests.laws.watched import cases_of


@pytest.mark.slow
@cases_of("aggregation")
def test_laws(case: int, some: bool) -> None:
    keep(case, some)
