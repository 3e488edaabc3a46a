"""Every shipped way to synchronise, encrypted, in virtual time: real keys and real ciphertexts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsync.common.errors import ConfigError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.locate import shipped_folder
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit
from fedsync.simulation import run as runs
from fedsync.simulation.run import run_virtual
from tests.simulation.sealed import actions

QUICK = ["local.steps=2", "local.batch_size=8", "stop.patience=null", "stop.target_accuracy=null"]
# A thousand values are trained in no time; ten thousand, the default, are sealed by the suites below.
SMALL = "task={kind: mlp, hidden: [32], data: {kind: blobs, samples: 600}}"
SILOS = ClusterConfig.model_validate(
    {"silos": [{"name": name, "speed": speed} for name, speed in (("a", 90), ("b", 70), ("c", 40))]}
)
NAMES = sorted(path.stem for path in shipped_folder().glob("*.yaml"))


IMPOSSIBLE = {name for name in NAMES if not StrategyConfig.load(name).aggregation.additive}


def config(name: str, *overrides: str) -> StrategyConfig:
    """A shipped strategy with few rounds, and without what only a server that sees the updates can do."""
    shipped = StrategyConfig.load(name)
    mended = ["aggregation.staleness={kind: constant}"] * (
        shipped.aggregation.discounts and shipped.aggregation.additive
    )
    mended += ["barrier.late=next"] * shipped.barrier.innermost.needs_discount
    rounds = 8 if shipped.barrier.mixes_rounds else 3
    return StrategyConfig.load(name, [*QUICK, f"stop.rounds={rounds}", *mended, *overrides])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in IMPOSSIBLE])
def test_silos_end_with_one_model_under_every_strategy(name: str, tmp_path: Path, models: list[np.ndarray]) -> None:
    """The pad seals fastest; what is sealed makes no difference to stores, grids and versions."""
    summary = run_virtual(config(name, SMALL, "cipher={kind: pad, bits: 16, examples: 300}"), SILOS, tmp_path)
    assert summary["sealed_share"] == 1.0
    assert summary["rounds"] >= 3
    assert summary["accuracy"] is not None
    assert len(models) == 3, "all were told of the last version"
    for model in models:
        np.testing.assert_array_equal(model, models[0])


@pytest.mark.parametrize("name", sorted(IMPOSSIBLE))
def test_what_needs_to_see_updates_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"cipher.kind 'pad' hides them"):
        config(name, "cipher={kind: pad}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cipher"),
    [
        ("fedavg", "{kind: bfv}"),
        ("lb-bsp", "{kind: bfv, bits: 8, metrics: plain}"),
        ("fsp", "{kind: bfv, bits: 12, examples: 300}"),
        ("lb-bsp", "{kind: masked, inner: {kind: bfv}}"),
        ("a-bsp", "{kind: masked}"),
        ("lb-bsp", "{kind: bfv, only: ['*.weight']}"),
    ],
)
def test_suites_bits_and_layers(name: str, cipher: str, tmp_path: Path, models: list[np.ndarray]) -> None:
    weight = ["aggregation.weight=silo"] if "only" in cipher else []  # the server adds what is left in the clear
    summary = run_virtual(config(name, f"cipher={cipher}", *weight), SILOS, tmp_path)
    assert (summary["sealed_share"] < 1) == ("only" in cipher)
    assert summary["accuracy"] > 0
    for model in models:
        np.testing.assert_array_equal(model, models[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fedavgm", "fedadam"])
def test_momentum_takes_silos_where_it_takes_the_server(
    kind: str, tmp_path: Path, models: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same run in the clear and encrypted: apart by what rounding loses, which is far less than momentum brings."""
    plain: list[np.ndarray] = []
    for name, overrides in {
        "sealed": [f"server_optimizer={{kind: {kind}}}", "cipher={kind: pad}"],
        "plain": [f"server_optimizer={{kind: {kind}}}"],
        "without": [],
    }.items():
        with monkeypatch.context() as patch:
            if name != "sealed":
                patch.setattr(runs, "final_model", lambda aggregator, _: plain.append(aggregator.model) or plain[-1])
            run_virtual(config("lb-bsp", *overrides), SILOS, tmp_path / name)
    with_it, without = plain
    assert np.abs(models[0] - with_it).mean() < 0.05 * np.abs(without - with_it).mean()
    for model in models:
        np.testing.assert_array_equal(model, models[0])


@pytest.mark.slow
def test_a_run_that_goes_on_takes_snapshots_and_a_newcomer_starts_from_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: list[np.ndarray]
) -> None:
    """With few links kept, the silo that joins late cannot begin from version 0."""
    from fedsync.cipher.server import sealed_aggregator as aggregator

    monkeypatch.setattr(aggregator, "MAX_LINKS", 4)
    taken: list[int] = []
    put = aggregator.EncryptedAggregator.put_snapshot

    def counting(self, silo, version, snapshot):  # type: ignore[no-untyped-def]
        taken.append(version)
        put(self, silo, version, snapshot)

    monkeypatch.setattr(aggregator.EncryptedAggregator, "put_snapshot", counting)
    late = SILOS.model_copy(update={"silos": [*SILOS.silos[:2], SILOS.silos[2].model_copy(update={"joins_at_s": 5.0})]})
    loaded = config("fedavg", "cipher={kind: pad}", "min_silos=2", "aggregation.weight=examples")
    loaded = loaded.model_copy(update={"stop": loaded.stop.model_copy(update={"rounds": 40})})
    run_virtual(loaded, late, tmp_path)
    assert taken
    assert len(models) == 3
    for model in models:
        np.testing.assert_array_equal(model, models[0])


def test_masks_need_commits_of_one_round() -> None:
    for name in ("asp", "pssp", "fsp"):
        with pytest.raises(ConfigError, match="decrypts sums of one round only"):
            config(name, "cipher={kind: masked}")
    config("fsp", "cipher={kind: masked, inner: {kind: bfv, examples: 300}}", "barrier.late=drop")


@pytest.mark.parametrize(
    "away", [{"faults": [{"at_s": 1.0, "down_s": 30.0}]}, {"presence": {"for_s": 1, "every_s": 31}}]
)
def test_a_run_waits_while_fewer_silos_are_there_than_a_sum_needs(
    away: dict[str, Any], tmp_path: Path, models: list[np.ndarray], caplog: pytest.LogCaptureFixture
) -> None:
    """An order takes a fifth of a second; alone the other would have made versions that nobody opens, hundreds."""
    silos = ClusterConfig.model_validate({"silos": [{"name": "a", "speed": 90}, {"name": "b", "speed": 90, **away}]})
    chosen = config("bsp", SMALL, "stop.rounds=12", "cipher={kind: pad, bits: 16, members: 2}")
    summary = run_virtual(chosen, silos, tmp_path)
    commits = actions(tmp_path, Commit)
    assert {tuple(sorted(name.split("/")[0] for name in commit.weights)) for commit in commits} == {("a", "b")}
    assert "the run waits" in (tmp_path / "journal.jsonl").read_text()
    assert summary["rounds"] == 12 and summary["seconds"] > 30
    assert "made it invalid" not in caplog.text
    np.testing.assert_array_equal(models[0], models[1])
