"""Three versions that tests share."""

import pytest

from tests.cipher.make import Federation, plan
from tests.cipher.silo.chains import THREE


@pytest.fixture(scope="module")
def three_rounds(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """Three versions, the last of which all silos hold; nobody is to change it."""
    federation = Federation(plan("pad"), tmp_path_factory.mktemp("rounds"), THREE)
    for version in range(3):
        federation.run_round(version)
    federation.begin_all("abc", 3)
    return federation
