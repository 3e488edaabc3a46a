"""A strategy that names its silos."""

import pytest

from fedsync.common.errors import ConfigError
from fedsync.config.locate import shipped_folder
from fedsync.config.strategy import StrategyConfig


def load(*overrides: str) -> StrategyConfig:
    return StrategyConfig.load("fedavg", overrides)


def test_listed_silos_are_waited_for_and_share_the_data() -> None:
    listed = load("silos=[berlin, paris, rome]")
    assert (listed.quorum(), listed.shares) == (3, 3)
    fewer = load("silos=[berlin, paris, rome]", "min_silos=2")
    assert (fewer.quorum(), fewer.shares) == (2, 3)
    assert (load().quorum(), load().shares) == (2, 2)
    assert (load("min_silos=4").quorum(), load("min_silos=4").shares) == (4, 4)
    assert listed.quorum(5) == load().quorum(5) == 5, "a silo file counts"
    assert load("min_silos=3").quorum(5) == 3, "but less than what is said"


def test_a_silo_file_has_to_fit_the_list() -> None:
    load().check_silos(["anybody"])
    listed = load("silos=[berlin, paris]")
    load("silos=[berlin, paris]", "min_silos=1").check_silos(["paris"])
    with pytest.raises(
        ConfigError, match=r"silos: 'berlin' is listed, and the silo file does not have it\..*min_silos"
    ):
        listed.check_silos(["paris"])
    with pytest.raises(ConfigError, match=r"silo file has 'pariss', which is not listed\. Did you mean 'paris'"):
        listed.check_silos(["berlin", "pariss"])


def test_a_silo_that_moved_from_its_relay_to_the_server_counts_once() -> None:
    """The server's file may list it in both places, and a run with too few silos would wait for ever."""
    with pytest.raises(ConfigError, match=r"min_silos: 3, and the silo file has 2 silos"):
        load("min_silos=3").check_silos(["berlin", "berlin", "paris"])


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


TOO_MANY = [
    (["min_silos=3"], "min_silos: 3, and the silo file has 2 silos. Write at most 2"),
    (["barrier={kind: sampled, sample_size: 3}"], "barrier.sample_size: 3, and"),
    (["barrier={kind: quorum, count: 3, inner: {kind: bsp}}"], "barrier.count: 3, and"),
    (["barrier={kind: fraction, share: 0.5, least: 3, inner: {kind: bsp}}"], "barrier.least: 3, and"),
    (
        ["barrier={kind: capped, cap_s: 9.0, inner: {kind: quorum, count: 3, inner: {kind: bsp}}}"],
        "barrier.inner.count: 3, and",
    ),
    (
        ["barrier={kind: fraction, share: 0.5, inner: {kind: quorum, count: 2, inner: {kind: bsp}}}"],
        "barrier.inner.count: 2, and a round has 1 of the 2 silos in the silo file. Write at most 1",
    ),
    (
        ["min_silos=3", "barrier={kind: fraction, share: 0.5, inner: {kind: bsp}}"],
        "min_silos: 3, and the silo file has 2 silos. Write at most 2",
    ),
    (
        ["barrier={kind: fraction, share: 0.5, least: 3, inner: {kind: fraction, share: 0.3, inner: {kind: bsp}}}"],
        "barrier.least: 3, and the silo file has 2 silos. Write at most 2",
    ),
    (
        ["barrier={kind: fraction, share: 0.5, inner: {kind: bsp}}", "cipher={kind: bfv, members: 2}"],
        "cipher.members: 2, and a round has 1 of the 2 silos in the silo file",
    ),
    (
        [
            "barrier={kind: fsp, interval: {kind: fixed, interval_s: 9.0}, wait_for: {sample_size: 3}}",
            "aggregation={kind: fednova}",
        ],
        "barrier.wait_for.sample_size: 3, and",
    ),
    (["cipher={kind: bfv, members: 3}"], "cipher.members: 3, and"),
    (["cipher={kind: pad, colluding: 2}"], "cipher.colluding: 2 of 2 silos in the silo file would be no minority"),
    (["cipher={kind: masked}"], "cipher.kind: needs 3 silos as configured, and the silo file has 2"),
    (["cipher={kind: masked, inner: {kind: bfv, colluding: 2}}"], "cipher.kind: needs 4 silos as configured"),
]


@pytest.mark.parametrize(("overrides", "said"), TOO_MANY)
def test_a_silo_file_has_enough_silos_for_every_number_in_the_strategy(overrides: list[str], said: str) -> None:
    """Else the run would wait for ever, open nothing, or be another than the file says."""
    config = load("waiting.idle_s=5.0", *overrides)
    with pytest.raises(ConfigError) as caught:
        config.check_silos(["a", "b"])
    assert str(caught.value).startswith(said)
    config.check_silos(["a", "b", "c", "d", "e"])
    with pytest.raises(ConfigError):
        load("silos=[a, b]", *overrides)


@pytest.mark.parametrize("name", [path.stem for path in sorted(shipped_folder().glob("*.yaml"))])
def test_every_shipped_strategy_runs_on_two_silos(name: str) -> None:
    StrategyConfig.load(name).check_silos(["a", "b"])
