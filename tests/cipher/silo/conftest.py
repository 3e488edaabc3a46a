"""Three versions that tests share."""

import pytest

from tests.cipher.make import Federation, plan
from tests.cipher.silo.chains import THREE, a_round


@pytest.fixture(scope="module")
def three_rounds(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """Three versions, the last of which all silos hold; nobody is to change it."""
    federation = Federation(plan("pad"), tmp_path_factory.mktemp("rounds"), THREE)
    for version in range(3):
        a_round(federation, version)
    for name in "abc":
        federation.begin(name, 3)
    return federation
