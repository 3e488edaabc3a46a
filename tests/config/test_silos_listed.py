"""A strategy that names its silos."""

import pytest

from fedsync.config.strategy import StrategyConfig
from fedsync.core.errors import ConfigError


def load(*overrides: str) -> StrategyConfig:
    return StrategyConfig.load("fedavg", overrides)


def test_listed_silos_are_waited_for_and_share_the_data() -> None:
    listed = load("silos=[berlin, paris, rome]")
    assert (listed.quorum(), listed.shares) == (3, 3)
    fewer = load("silos=[berlin, paris, rome]", "min_silos=2")
    assert (fewer.quorum(), fewer.shares) == (2, 3)
    assert (load().quorum(), load().shares) == (2, 2)
    assert (load("min_silos=4").quorum(), load("min_silos=4").shares) == (4, 4)
    assert listed.quorum(5) == 5, "a silo file counts"


def test_a_silo_file_has_to_fit_the_list() -> None:
    load().check_silos(["anybody"])
    listed = load("silos=[berlin, paris]")
    listed.check_silos(["paris"])
    with pytest.raises(
        ConfigError, match=r"silos: the silo file has 'pariss', which is not listed\. Did you mean 'paris'"
    ):
        listed.check_silos(["berlin", "pariss"])


@pytest.mark.parametrize(
    ("overrides", "problem", "remedy"),
    [
        (["silos=[a, b, a]"], "names 'a' twice", "Name each silo once"),
        (["silos=[a, b]", "min_silos=3"], "min_silos 3 of 2 silos can never join", "Lower it"),
        (["silos=[]"], "is not allowed", "at least 1"),
        (["silos=[a b]"], "'a b' is not allowed", "of the form"),
        (["silos=a"], "'a' is not allowed", "Write a list"),
    ],
)
def test_a_list_that_cannot_be(overrides: list[str], problem: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    assert problem in caught.value.problem and remedy in caught.value.remedy, caught.value
