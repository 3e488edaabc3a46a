"""Candidates on a twin: which there are, which is best, and the file of the best."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedsync.common.errors import ConfigError, FedSyncError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.extras.tuning import search
from fedsync.extras.tuning.records import read_record
from fedsync.extras.tuning.search import (
    FINAL_DRAWS,
    FINALISTS,
    Candidate,
    Ranked,
    by_throughput,
    by_time_to,
    candidates,
    shipped,
    strategy_file,
)
from fedsync.extras.tuning.twin import Twin
from fedsync.simulation.run import run_virtual
from fedsync.simulation.timing_only import run_timing
from tests.commands.call import call
from tests.simulation.fake import machines


def silent(what: str) -> None: ...


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    """Speeds 300 and 100, half a second of overhead each; LB-BSP ran on them."""
    out = tmp_path_factory.mktemp("run")
    silos = ClusterConfig(silos=machines(*({"speed": speed, "overhead_s": 0.5} for speed in (300.0, 100.0))))
    run_timing(StrategyConfig.load("lb-bsp", ["stop={rounds: 12}"]), silos, out)
    return Twin.of(read_record(out))


def test_all_that_does_not_encrypt_is_tried() -> None:
    names = shipped()
    assert {"fedavg", "lb-bsp", "a-bsp", "fsp", "asp"} <= set(names)
    assert not [name for name in names if name.endswith("-he")]


def test_a_candidate_has_the_strategys_policies_and_the_runs_task(twin: Twin) -> None:
    base = StrategyConfig.load("lb-bsp", ["seed=3", "local.learning_rate=0.05", "task.partition.classes_per_silo=3"])
    (one,), left = candidates(twin, base, ["a-bsp"], [5], ["fedavgm"])
    assert left == []
    assert (one.config.barrier.kind, one.config.local.steps, one.config.local.learning_rate) == ("a-bsp", 5, 0.05)
    assert (one.config.seed, one.config.task) == (3, base.task)
    assert one.config.server_optimizer is not None and one.config.server_optimizer.kind == "fedavgm"
    assert one.config.name == "a-bsp-tuned"
    own = StrategyConfig.load("lb-bsp", ["task={kind: silo-app, file: app.py}"])
    (one,), left = candidates(twin, own, ["fedasync"], [5], [""])
    assert (one.config.local.proximal, left) == (0.0, []), "a loop of one's own has no proximal term"


def test_a_candidate_keeps_the_runs_privacy_and_what_watches_over_it(twin: Twin) -> None:
    """The file of the best is for the same federation: without its noise, the run would be open."""
    privacy, export = "privacy={kind: dp-sgd, clip: 1.0, noise_multiplier: 1.1}", "export={csv: true}"
    base = StrategyConfig.load("lb-bsp", [privacy, export, "min_silos=2", "on_lost_silo=fail"])
    (one,), left = candidates(twin, base, ["fedavg"], [5], [""])
    assert left == [] and one.config.privacy is not None and one.config.privacy == base.privacy
    assert (one.config.export, one.config.on_lost_silo, one.config.min_silos) == (base.export, "fail", 2)
    (ranked,) = by_throughput(twin, [one], silent)
    assert ranked.problem == "" and "noise_multiplier: 1.1" in strategy_file(ranked, "played")


def test_rounds_of_a_set_time_fit_the_steps(twin: Twin) -> None:
    """Ten steps of 32 samples take 1.067 and 3.2 s, in the middle 2.13; and 0.5 s of overhead."""
    (one,), _ = candidates(twin, twin.config, ["fsp"], [10], [""])
    assert one.interval_s == 2.63
    assert one.config.model_dump(mode="json")["barrier"]["interval"] == {"kind": "fixed", "interval_s": 2.63}


@pytest.mark.parametrize(
    ("kind", "bounds"), [("elastic", ("floor", "lookahead")), ("fedcompass", ("min_steps", "max_steps"))]
)
def test_steps_are_also_those_of_a_barrier_that_bounds_them(twin: Twin, kind: str, bounds: tuple[str, str]) -> None:
    found, _ = candidates(twin, twin.config, [kind], [10, 40], [""])
    shipped = StrategyConfig.load(kind)
    for one in found:
        for bound in bounds:
            assert getattr(one.config.barrier, bound) == getattr(shipped.barrier, bound) * one.steps // 20


def test_steps_are_also_those_of_a_barrier_in_a_barrier(twin: Twin, tmp_path: Path) -> None:
    own = StrategyConfig.load("elastic", ["barrier={kind: fraction, share: 0.5, inner: {kind: elastic, floor: 4}}"])
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(own.model_dump(mode="json")))
    (one,), _ = candidates(twin, twin.config, [str(tmp_path / "mine.yaml")], [40], [""])
    assert one.config.barrier.innermost.floor == 8  # type: ignore[attr-defined]


def test_a_candidate_keeps_the_plugin_of_its_own_policies(twin: Twin, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    sections = "stop: {rounds: 3}\nbalancer: {kind: fixed}\nbarrier: {kind: bsp}\ntask: {kind: digits}\n"
    (tmp_path / "mine.yaml").write_text(f"name: mine\nplugin: mine.py\n{sections}")
    (one,), _ = candidates(twin, twin.config, [str(tmp_path / "mine.yaml")], [20], [""])
    assert one.config.plugin == str(tmp_path / "mine.py")


def test_finalists_get_at_least_the_time_of_the_run(twin: Twin) -> None:
    (one,), _ = candidates(twin, twin.config, ["fedavg"], [12], [""])
    toy = Toy()
    by_time_to(0.9, twin, [one], toy, silent)
    assert toy.played[-1] == (12, twin.horizon_s)


def test_what_does_not_go_together_is_left_out_with_its_reason(twin: Twin) -> None:
    """FedAsync moves towards whole models, which no server optimizer takes; what encrypts masks only full rounds."""
    found, left = candidates(twin, twin.config, ["fedasync", "fedavg"], [5, 10], ["fedavgm"])
    assert [one.strategy for one in found] == ["fedavg", "fedavg"]
    assert len(left) == 1 and left[0].startswith("fedasync: ")
    masked = StrategyConfig.load("fedavg", ["cipher={kind: masked}"])
    found, left = candidates(twin, masked, ["fedavg", "asp"], [5], [""])
    assert [(one.strategy, one.config.cipher.kind) for one in found] == [("fedavg", "masked")]
    assert len(left) == 1 and left[0].startswith("asp: ")


def test_without_training_what_gets_through_most_is_first(twin: Twin) -> None:
    """FedAvg of 20 steps waits for 6.4 s a round for 1280 samples, LB-BSP 3.2 s; and 0.5 s of overhead."""
    field, _ = candidates(twin, twin.config, ["fedavg", "lb-bsp"], [20], [""])
    ranked = by_throughput(twin, field, silent)
    assert [one.candidate.strategy for one in ranked] == ["lb-bsp", "fedavg"]
    predicted = ranked[1].predicted
    assert predicted is not None
    assert predicted.samples_a_second == pytest.approx(1280 / 6.9, rel=0.01)
    assert predicted.round_s.mean == pytest.approx(6.9, rel=0.01)


def test_a_round_that_is_longer_than_the_run_is_predicted_too(twin: Twin) -> None:
    """As above: the run ends after 4 s, before FedAvg's first round does."""
    predicted = replace(twin, horizon_s=4.0, rounds=1).predict(StrategyConfig.load("fedavg"))
    assert predicted.round_s.mean == pytest.approx(6.9, rel=0.01)
    assert predicted.samples_a_second == pytest.approx(1280 / 6.9, rel=0.01)


class Toy:
    """Candidates reach the target after their steps times seven seconds, at an accuracy that grows until then."""

    def __init__(self) -> None:
        self.played: list[tuple[int, float]] = []

    def __call__(self, config: StrategyConfig, cluster: ClusterConfig, out: Path) -> dict[str, Any]:
        steps, budget_s = config.local.steps, config.stop.seconds or 0.0
        self.played.append((steps, budget_s))
        assert config.stop.target_accuracy == 0.9
        if steps == 13:
            raise ConfigError("local.steps", "unlucky", "Take another")
        needed_s = 7.0 * steps
        reached = needed_s <= budget_s
        return {"accuracy": min(budget_s / needed_s, 1.0) * 0.9, "seconds_to_target": needed_s if reached else None}


def test_the_best_of_a_toy_is_found_and_others_get_little_time(twin: Twin) -> None:
    """Of twelve, four go on and then three, of which those that do not get there in time are played once only.

    13 steps cannot be played and come last.
    """
    steps = [40, 16, 30, 20, 13, 12, 25, 18, 35, 45, 50, 60]
    field, _ = candidates(twin, twin.config, ["fedavg"], steps, [""])
    toy = Toy()
    ranked = by_time_to(0.9, twin, field, toy, silent)
    assert len(ranked) == 12
    assert [one.candidate.steps for one in ranked[:4]] == [12, 16, 18, 20]
    assert ranked[0].seconds is not None
    assert ranked[0].seconds.mean == pytest.approx(84.0)
    assert ranked[0].seconds.low < 84.0 < ranked[0].seconds.high
    assert (ranked[-1].candidate.steps, ranked[-1].problem) == (13, "local.steps: unlucky. Take another")
    budgets = sorted({budget_s for _, budget_s in toy.played})
    assert budgets == [pytest.approx(0.25 * twin.horizon_s * 3**rung) for rung in range(3)]
    played = [sum(budget_s == each for _, budget_s in toy.played) for each in budgets]
    assert played == [12, 4, FINAL_DRAWS + FINALISTS - 1]


@pytest.mark.parametrize("steps", [[13, 12], [13, 12, 16], [12, 16, 20, 30]])
def test_a_candidate_that_fails_is_last_in_the_ranking(twin: Twin, steps: list[int]) -> None:
    """Also one of few, and one that fails only as a finalist."""
    field, _ = candidates(twin, twin.config, ["fedavg"], steps, [""])
    toy, fails = Toy(), steps[0]

    def train(config: StrategyConfig, cluster: ClusterConfig, out: Path) -> dict[str, Any]:
        if config.local.steps == fails and config.seed >= twin.config.seed + 100:
            raise FedSyncError("it diverged")
        return toy(config, cluster, out)

    ranked = by_time_to(0.9, twin, field, train, silent)
    assert sorted(one.candidate.steps for one in ranked) == sorted(steps)
    assert [one.candidate.steps for one in ranked if one.problem] == [ranked[-1].candidate.steps] == [fails]


@pytest.mark.slow
def test_why_it_fails_is_shown_and_what_fails_is_not_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silos = ClusterConfig(silos=machines({"speed": 300.0}, {"speed": 100.0}))
    run_timing(StrategyConfig.load("lb-bsp", ["stop={rounds: 12}"]), silos, tmp_path)

    def fails(twin: Twin, candidate: Candidate) -> object:
        raise FedSyncError("it diverged")

    monkeypatch.setattr(search, "_predicted", fails)
    assert "Fails: fedavg, 5 steps: it diverged" in call("tune", tmp_path, "--strategies", "fedavg", "--steps", "5")
    with pytest.raises(ConfigError, match="no candidate can be run"):
        call("tune", tmp_path, "--strategies", "fedavg", "--apply", tmp_path / "best.yaml")


@pytest.mark.slow
def test_candidates_are_trained_to_the_target_in_virtual_time(twin: Twin) -> None:
    """On digits: with the same steps, LB-BSP's rounds take 3.7 s and those of FedAvg 6.9."""
    base = StrategyConfig.load("lb-bsp", ["task={kind: digits}", "local.learning_rate=0.1"])
    field, _ = candidates(twin, base, ["fedavg", "lb-bsp"], [20], [""])
    ranked = by_time_to(0.8, twin, field, run_virtual, silent)
    assert [one.candidate.strategy for one in ranked] == ["lb-bsp", "fedavg"]
    balanced, waiting = (one.seconds for one in ranked)
    assert balanced is not None and waiting is not None
    assert waiting.mean > balanced.mean


def test_where_nothing_can_be_trained_the_first_reason_is_given(twin: Twin) -> None:
    field, _ = candidates(twin, twin.config, ["fedavg"], [13], [""])
    with pytest.raises(FedSyncError, match="unlucky"):
        by_time_to(0.9, twin, field, Toy(), silent)


def test_the_file_of_the_best_is_whole_and_says_why(twin: Twin, tmp_path: Path) -> None:
    (one,), _ = candidates(twin, twin.config, ["fsp"], [10], ["fedavgm"])
    path = tmp_path / "best.yaml"
    path.write_text(strategy_file(Ranked(one), "first of them\nall: things"))
    config = StrategyConfig.load(path)
    assert config.model_dump() == one.config.model_dump()
    comment = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert comment == ["# fsp, 10 steps, rounds of 2.63 s, fedavgm", "# first of them", "# all: things"]
    odd = Candidate("a\nname: b", 1, None, "", one.config)
    assert yaml.safe_load(strategy_file(Ranked(odd), "why"))["name"] == "fsp-tuned"
    with pytest.raises(ConfigError, match="--apply: no candidate could be played: no silo"):
        strategy_file(Ranked(one, problem="no silo"), "why")
