"""Every barrier around others through every corner, and what the laws of `promises` say of it; see `tests.laws.law`."""

import pytest

from tests.laws.law import keep
from tests.laws.watched import cases_of


@pytest.mark.slow
@cases_of("barrier", wraps=True)
def test_laws(case: int, some: bool) -> None:
    keep(case, some)
