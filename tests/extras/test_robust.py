"""Aggregations that look at updates: what they make of wrong ones, by hand, and where they are refused."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsync
from fedsync.common.errors import ConfigError, PolicyError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.compatibility import adds_regions, too_few
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit
from fedsync.core.protocols import Weigher
from fedsync.core.silo_weight import Solver
from fedsync.extras.robust import Krum, Median, RobustPolicy, TrimmedMean
from fedsync.model.commit_updates import Combiner, CommitUpdates, Rows
from fedsync.model.layout import Vector
from fedsync.model.plain_aggregator import PlainAggregator
from fedsync.model.server_optimizer import HeavyBall
from fedsync.observe.quality.kept_models import LAST
from fedsync.policies.aggregate.weighers import WeightedMean
from fedsync.simulation.run import run_virtual
from tests.model.stores import vector

HONEST = {"a": (1, 10), "b": (2, 11), "c": (3, 12), "d": (4, 13)}
WRONG = {**HONEST, "e": (-1000, 1000)}


def combined(combiner: Combiner, updates: dict[str, tuple[float, ...]], **more: Any) -> PlainAggregator:
    """After one commit of the updates, all of which count the same."""
    size = len(next(iter(updates.values())))
    store = PlainAggregator(np.ones(size, np.float32), combiner=combiner, **more)
    for silo, values in updates.items():
        store.put(silo, f"{silo}/1", vector(*values))
    store.commit(Commit(1, {f"{silo}/1": 1 / len(updates) for silo in updates}))
    return store


@pytest.mark.parametrize(
    ("policy", "change"),
    [
        (Median(), (2, 12)),  # the middle one of each column
        (TrimmedMean(0.2), (2, 12)),  # mean of 1, 2, 3 and of 11, 12, 13
        (TrimmedMean(0.4), (2, 12)),
        (Krum(malicious=1), (2, 11)),  # b: its nearest two are at 2 and 2; so are those of c, which comes later
        (Krum(malicious=1, keep=4), (2.5, 11.5)),
    ],
)
def test_a_wrong_update_does_not_steer(policy: RobustPolicy, change: tuple[float, float]) -> None:
    store = combined(policy.combiner(), WRONG)
    np.testing.assert_allclose(store.model, np.add(change, 1), rtol=1e-6)


def test_trimmed_at_either_end_by_the_share_rounded_down_and_by_one_at_least() -> None:
    ten = {f"s{i}": (float(i**2),) for i in range(10)}  # 0, 1, 4, ... 81
    assert combined(TrimmedMean(0.39).combiner(), ten).model[0] == 1 + (9 + 16 + 25 + 36) / 4
    assert combined(TrimmedMean(0.0).combiner(), {"a": (0,), "b": (1,), "c": (80,)}).model[0] == 1 + 1
    assert combined(TrimmedMean(0.4).combiner(), {"a": (0,), "b": (4,)}).model[0] == 1 + 2, "two are none too many"


def test_coefficients_count_before_updates_are_compared() -> None:
    """n c_i u_i: 3 x 0.5 x 2 = 3, 3 x 0.25 x 4 = 3, 3 x 0.1 x 10 = 3."""
    store = PlainAggregator(vector(0), combiner=Median().combiner())
    for silo, value in {"a": 2, "b": 4, "c": 10}.items():
        store.put(silo, f"{silo}/1", vector(value))
    store.commit(Commit(1, {"a/1": 0.5, "b/1": 0.25, "c/1": 0.1}))
    np.testing.assert_allclose(store.model, [3], rtol=1e-6)


def test_a_server_optimizer_steps_along_what_was_made_of_the_updates() -> None:
    store = combined(Median().combiner(), WRONG, optimizer=HeavyBall(0.0, 0.5))
    np.testing.assert_allclose(store.model, [1 + 0.5 * 2, 1 + 0.5 * 12], rtol=1e-6)


def test_the_result_does_not_depend_on_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    updates = {f"s{i}": tuple(rng.normal(size=50)) for i in range(7)}
    policies = (Median(), TrimmedMean(0.3), Krum(2, keep=2))
    whole = [combined(policy.combiner(), updates).model for policy in policies]
    monkeypatch.setattr("fedsync.model.chunked_arrays.SPAN_BYTES", 4 * 7 * 3)
    parts = [combined(policy.combiner(), updates).model for policy in policies]
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_krum_measures_as_the_paper_does() -> None:
    """Against all distances worked out one by one."""
    rng = np.random.default_rng(5)
    for malicious in (0, 1, 2):
        rows = rng.normal(size=(8, 20)).astype(np.float32)
        nearest = [
            sum(
                sorted(float(((row - other) ** 2).sum()) for j, other in enumerate(rows) if j != i)[: 8 - malicious - 2]
            )
            for i, row in enumerate(rows)
        ]
        store = combined(Krum(malicious).combiner(), {f"s{i}": tuple(row) for i, row in enumerate(rows)})
        np.testing.assert_allclose(store.model - 1, rows[int(np.argmin(nearest))], rtol=1e-5, atol=1e-5)


def test_running_statistics_are_as_sent_and_krum_does_not_measure_them() -> None:
    """Columns: a weight, a variance, a counter of steps. By its counter, a is the furthest; by its weight, the best."""
    updates = {"a": (2, -0.9, 900), "b": (1, -0.5, 2), "c": (3, -0.5, 1), "d": (9, 0, 3)}
    store = combined(Krum(malicious=1).combiner(), updates, statistics=((1, 3),))
    np.testing.assert_allclose(store.model, [3, 0.1, 901], rtol=1e-6)

    store = PlainAggregator(vector(1, 1, 1), combiner=Median().combiner(), statistics=((1, 3),))
    for silo in "abc":
        store.put(silo, f"{silo}/1", vector(*updates[silo]))
    store.commit(Commit(1, {"a/1": 0.05, "b/1": 1.0, "c/1": 1.0}))  # FedNova: b and c made fewer steps
    np.testing.assert_allclose(store.model, [1 + 3, 0.5, 3], rtol=1e-6)


def test_the_result_says_whose_updates_were_left_out_also_after_a_crash() -> None:
    store = combined(Krum(malicious=1, keep=4).combiner(), WRONG)
    again = PlainAggregator(vector(0, 0), combiner=Krum(malicious=1, keep=4).combiner())
    again.restore(pickle.loads(pickle.dumps(store.state())))
    for silo in "ab":
        again.put(silo, f"{silo}/2", vector(1, 1))
    again.commit(Commit(2, {"a/2": 0.5, "b/2": 0.5}))
    assert again.notes() == [
        "1 of 2 commits had fewer than the 5 updates that krum needs",
        "krum left out updates in 2 commits: e 1 times",
    ]
    assert PlainAggregator(vector(0)).notes() == []


@dataclass(frozen=True)
class Largest(fedsync.AggregationPolicy):
    """A user's own: the value that is furthest from zero."""

    def weigher(self, solver: Solver) -> Weigher:
        return WeightedMean()

    def combiner(self) -> Combiner:
        return Furthest()


class Furthest(Combiner):
    def combine(self, rows: Rows) -> Vector:
        places = np.abs(rows).argmax(axis=0)
        return rows[places, np.arange(rows.shape[1])]


class Odd(Combiner):
    def __init__(self, change: Any, chosen: Sequence[Any] = (0,)) -> None:
        self.change, self.chosen = change, chosen

    def choose(self, updates: CommitUpdates) -> Sequence[int]:
        return self.chosen

    def combine(self, rows: Rows) -> Vector:
        return np.asarray(self.change, np.float32)


@pytest.mark.parametrize(
    ("combiner", "told"),
    [
        (Odd([1.0]), r"Odd makes shape \(1,\) of \(1, 2\) values"),
        (Odd([1.0, np.nan]), r"Odd makes values that are not finite of \(1, 2\) values"),
        (Odd([1.0, 2.0], chosen=()), r"Odd chooses \[\] of 5 updates"),
        (Odd([1.0, 2.0], chosen=(0, 5)), r"Odd chooses \[0, 5\] of 5 updates"),
        (Odd([1.0, 2.0], chosen=(0.0, 1.0)), r"Odd chooses \[0.0, 1.0\] of 5 updates; return their positions"),
        (Odd([1.0, 2.0], chosen=(True, True, False)), r"Odd chooses \[False, True\] of 5 updates; return their pos"),
    ],
)
def test_what_a_user_s_own_makes_is_looked_at(combiner: Combiner, told: str) -> None:
    with pytest.raises(PolicyError, match=told):
        combined(combiner, WRONG)


@pytest.mark.slow
def test_a_user_s_own_runs_by_its_class(tmp_path: Path) -> None:
    config = StrategyConfig.load("bsp", ["stop.rounds=3"]).with_policies({"aggregation": Largest()})
    cluster = ClusterConfig.model_validate({"silos": [{"name": name, "speed": 500} for name in "abc"]})
    assert run_virtual(config, cluster, tmp_path / "own")["rounds"] == 3
    run_virtual(StrategyConfig.load("bsp", ["stop.rounds=3"]), cluster, tmp_path / "mean")
    assert (tmp_path / "own" / LAST).read_bytes() != (tmp_path / "mean" / LAST).read_bytes()


@pytest.mark.slow
def test_a_run_with_krum_says_what_it_did(tmp_path: Path) -> None:
    cluster = ClusterConfig.model_validate({"silos": [{"name": name, "speed": 500} for name in "abcde"]})
    config = StrategyConfig.load("bsp", ["stop.rounds=3", "aggregation={kind: krum, malicious: 1, keep: 4}"])
    notes = run_virtual(config, cluster, tmp_path / "run")["notes"]
    assert any(note.startswith("krum left out updates in 3 commits: ") for note in notes)


@pytest.mark.parametrize("kind", ["median", "trimmed-mean", "krum"])
@pytest.mark.parametrize("strategy", ["lb-bsp-he", "bsp", "fsp-he"])
def test_encryption_refuses_them_by_name(kind: str, strategy: str) -> None:
    sealed = ["cipher.kind=masked", "cipher.inner={kind: bfv}"] if strategy == "bsp" else []
    told = rf"aggregation\.kind: '{kind}' .*needs a server that sees the updates.*Choose fedavg or fednova"
    with pytest.raises(ConfigError, match=told):
        StrategyConfig.load(strategy, [*sealed, f"aggregation={{kind: {kind}}}"])


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["aggregation={kind: median, inner: {kind: fedasync}}"], "inner.kind 'fedasync' gives no coefficients"),
        (["aggregation={kind: median, inner: {kind: krum}}"], "inner.kind 'krum' gives no coefficients"),
        (["aggregation={kind: trimmed-mean, share: 0.5}"], "less than 0.5"),
        (["aggregation={kind: median}", "barrier={kind: asp}"], "compares 3 updates or more"),
        (["aggregation={kind: krum, keep: 9}", "silos=[a, b, c, d, e]"], "needs 10 updates"),
        (["aggregation={kind: median}", "server_optimizer={kind: scaffold}"], "Write aggregation: {kind: fednova}"),
        (["aggregation={kind: krum, malicious: 2}", "silos=[a, b, c, d, e, f]", "min_silos=6"], "needs 7 updates"),
        (["aggregation={kind: median}", "silos=[a, b]"], "needs 3 updates"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        StrategyConfig.load("bsp", overrides)
    assert told in str(caught.value)


def test_regions_are_not_added_up_and_enough_silos_are_asked_for() -> None:
    config = StrategyConfig.load("bsp", ["aggregation={kind: krum, malicious: 1}"])
    assert not adds_regions(config)
    assert too_few(config, 5, "silos.yaml") is None
    part = "barrier={kind: fraction, share: 0.4, inner: {kind: bsp}}"
    drawn = StrategyConfig.load("bsp", ["aggregation={kind: krum, malicious: 1}", part])
    found = too_few(config, 4, "silos.yaml")
    assert found is not None and found[1] == "needs 5 updates as configured, and silos.yaml has 4 silos"
    found = too_few(drawn, 10, "silos.yaml")
    assert found is not None and found[1].endswith("configured, and a round has 4 of the 10 silos in silos.yaml")
    assert too_few(drawn, 13, "silos.yaml") is None
    assert StrategyConfig.load("bsp", ["aggregation={kind: median, inner: {kind: fednova}}"]).aggregation.normalises
