"""A strategy file under encryption: what cannot be sealed or added up is refused before a run."""

import pytest

from fedsync.common.errors import ConfigError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig


@pytest.mark.parametrize("balancer", ["proportional", "equalise"])
def test_masks_need_one_learning_rate(balancer: str) -> None:
    """Masks bind the rate, so none would come off: every round would bring nothing."""
    scaled = [f"balancer={{kind: {balancer}, scale: learning_rate}}"]
    with pytest.raises(ConfigError, match=r"masks .* all have the same rate.*[Ww]rite balancer\.scale: batch"):
        StrategyConfig.load("lb-bsp", ["cipher={kind: masked}", *scaled])
    StrategyConfig.load("lb-bsp", ["cipher={kind: bfv}", *scaled])


@pytest.mark.parametrize(
    ("name", "barrier", "most"),
    [
        ("asp", "{kind: asp}", 1),
        ("ssp", "{kind: ssp, staleness: 3}", 1),
        ("pssp", "{kind: sampled, sample_size: 2, staleness: 2}", 1),
        ("asp", "{kind: capped, cap_s: 60, inner: {kind: asp}}", 1),
        ("asp", "{kind: buffered, size: 3}", 3),
    ],
)
def test_a_version_cannot_add_more_updates_than_the_barrier_commits(name: str, barrier: str, most: int) -> None:
    common = [f"barrier={barrier}", "aggregation={kind: fedavg}"]
    with pytest.raises(ConfigError, match=rf"commits {most} at a time.*[Ww]rite members: {most}, or choose a barrier"):
        StrategyConfig.load(name, [f"cipher={{kind: bfv, members: {most + 1}}}", *common])
    StrategyConfig.load(name, [f"cipher={{kind: bfv, members: {most}}}", *common])


@pytest.mark.parametrize(
    ("cipher", "most"),
    [
        ("{kind: plain}", 0),
        ("{kind: bfv, metrics: plain}", 0),
        ("{kind: bfv}", 200),
        ("{kind: bfv, bits: 12}", 15),
        ("{kind: pad}", 32),
        ("{kind: masked}", 200),
    ],
)
def test_as_many_silos_score_the_last_version_as_one_sum_holds(cipher: str, most: int) -> None:
    """As the table of parameters in docs/assurance/encryption.md says; none where each silo tells its own."""
    assert StrategyConfig.load("bsp", [f"cipher={cipher}"]).policies().tally == most


@pytest.mark.parametrize("kind", ["bfv", "pad"])
def test_bits_in_the_clear_are_refused_where_updates_are_encrypted(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"wire is for runs in the clear.* cipher\.bits: 8, 12 or 16"):
        StrategyConfig.load("lb-bsp", [f"cipher={{kind: {kind}, members: 2}}", "wire={up: int8}"])
    with pytest.raises(ConfigError, match=r"cipher\.inner\.bits: 8, 12 or 16"):
        StrategyConfig.load("lb-bsp", ["cipher={kind: masked}", "wire={top_k: 0.1}"])
    assert not StrategyConfig.load("lb-bsp", [f"cipher={{kind: {kind}}}", "wire={up: fp32}"]).wire.set


@pytest.mark.parametrize("wire", ["{up: int9}", "{down: top-k}", "{top_k: 0}", "{top_k: 0.51}", "{sideways: bf16}"])
def test_formats_that_do_not_exist_are_refused(wire: str) -> None:
    with pytest.raises(ConfigError, match="wire"):
        StrategyConfig.load("lb-bsp", [f"wire={wire}"])


ALL = {"{kind: bsp}": 5, "{kind: a-bsp}": 5, "{kind: elastic}": 5, "{kind: asp}": 1, "{kind: buffered, size: 3}": 1}


@pytest.mark.parametrize("barrier", ALL)
def test_a_version_has_all_silos_where_the_barrier_waits_for_them(barrier: str) -> None:
    """Unless the strategy says how many; else its barrier's fewest."""
    config = StrategyConfig.load("fedavg", [f"barrier={barrier}", "cipher={kind: bfv}", "min_silos=5"])
    assert RunSpec.of(config, None, 5).cipher.members == ALL[barrier]  # type: ignore[union-attr]
    said = StrategyConfig.load("fedavg", [f"barrier={barrier}", "cipher={kind: bfv, members: 1}", "min_silos=5"])
    assert RunSpec.of(said, None, 5).cipher.members == 1  # type: ignore[union-attr]


def test_validate_refuses_machines_that_masks_cannot_add_up() -> None:
    from tests.commands.call import call

    masked = StrategyConfig.load("lb-bsp", ["cipher={kind: masked}"])
    slow = {silo.name: silo.speed for silo in ClusterConfig.load("one-slow").silos}
    with pytest.raises(ConfigError, match=r"^cipher\.work_ratio: .*10 times as fast as silo-7.*kind: fixed"):
        masked.check_machines(slow)
    with pytest.raises(ConfigError, match="10 times"):
        RunSpec.of(masked, ClusterConfig.load("one-slow"), 8)
    masked.check_machines({"a": 100.0, "b": 300.0})
    StrategyConfig.load("fedavg", ["cipher={kind: masked}"]).check_machines(slow)
    StrategyConfig.load("lb-bsp", ["cipher={kind: masked, work_ratio: 10}"]).check_machines(slow)
    assert "no errors" in call("validate", "lb-bsp", "--silos", "one-slow")
