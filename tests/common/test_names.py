"""Names of silos."""

import pytest

from fedsync.common.errors import ConfigError
from fedsync.common.names import check_silo_name


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", ".hidden", "a b", "ä", "a\n", "x" * 65])
def test_names_that_are_no_file_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="silo name"):
        check_silo_name(name)


@pytest.mark.parametrize("name", ["a", "silo-0", "st.mary", "_", "-", "x" * 64])
def test_names_that_are_file_names_are_fine(name: str) -> None:
    assert check_silo_name(name) == name
