"""A user's own policies: in a file beside the YAML, and ready ones that nobody registered."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from annotated_types import Gt, Le

import fedsync
from fedsync.common.errors import ConfigError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.core.protocols import Weigher
from fedsync.core.silo_weight import Solver
from fedsync.core.views import ClusterView, Verdict
from fedsync.model.layout import Layout
from fedsync.model.server_optimizer import Adaptive, HeavyBall, ServerOptimizer
from fedsync.observe.replay import replay
from fedsync.observe.run_builder import measuring
from fedsync.policies.aggregate.weighers import WeightedMean
from fedsync.policies.barrier.kinds.ssp import Ssp
from fedsync.policies.optimize.optimizer_policies import FedAdam, ServerOptimizerPolicy
from fedsync.policies.schema import kinds
from fedsync.simulation.run import run_virtual

FILE = '''\
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt, Le

import fedsync
from fedsync.core.views import Verdict


@fedsync.register("half")
@dataclass(frozen=True)
class Half(fedsync.BarrierPolicy):
    """Commit when a part of the silos is in; the others are in the next commit."""

    part: Annotated[float, Gt(0), Le(1)] = 0.5
    """Part of the silos."""

    def init(self):
        return None

    def decide(self, state, view):
        idle = tuple(name for name, silo in view.silos.items() if silo.order is None)
        if view.anyone_busy and len(view.pending) < self.part * len(view.silos):
            return None, Verdict(reason="waiting")
        return None, Verdict(commit=tuple(view.pending), release=idle, reason=f"{len(view.pending)} are in")
'''
YAML = """\
name: own
plugin: my_policies.py
stop: {rounds: 4}
local: {steps: 2, batch_size: 8}
balancer: {kind: fixed}
barrier: {kind: half, part: 0.3}
task: {kind: digits}
"""
SILOS = ClusterConfig.model_validate({"silos": [{"name": name, "speed": 40 * (i + 1)} for i, name in enumerate("abc")]})


@dataclass(frozen=True)
class Alone(fedsync.BarrierPolicy[None]):
    """Each update alone; nobody waits."""

    pause_s: Annotated[float, Gt(0), Le(9)] = 1.0
    """Unused."""

    def init(self) -> None:
        return None

    def decide(self, state: None, view: ClusterView) -> tuple[None, Verdict]:
        idle = tuple(name for name, silo in view.silos.items() if silo.order is None)
        return None, Verdict(commit=tuple(view.pending)[:1], release=() if view.pending else idle)


@dataclass(frozen=True)
class Plain(fedsync.AggregationPolicy):
    """All the same."""

    def weigher(self, solver: Solver) -> Weigher:
        return WeightedMean()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "my_policies.py").write_text(FILE, encoding="utf-8")
    (tmp_path / "own.yaml").write_text(YAML, encoding="utf-8")
    return tmp_path / "own.yaml"


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    from fedsync.policies import schema

    for section in schema._KINDS:
        kinds(section)
    monkeypatch.setattr(schema, "_KINDS", {section: dict(known) for section, known in schema._KINDS.items()})


def test_a_file_beside_the_strategy_registers_a_barrier_that_runs_and_replays(path: Path, tmp_path: Path) -> None:
    config = StrategyConfig.load(path)
    assert config.plugin == str(tmp_path / "my_policies.py"), "whoever reads what a run wrote finds it"
    summary = run_virtual(config, SILOS, tmp_path / "out")
    assert summary["rounds"] == 4
    assert any("1 are in" in entry.reason for entry in replay(tmp_path / "out" / "journal.jsonl"))
    assert StrategyConfig.load(tmp_path / "out" / "config.yaml") == measuring(config)


def test_an_installed_package_registers_a_barrier(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "hospital_policies"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "barriers.py").write_text(FILE, encoding="utf-8")
    (package / "broken.py").write_text("import no_such_thing", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / "site")
    config = StrategyConfig.load(path, ["plugin=hospital_policies.barriers"])
    assert config.plugin == "hospital_policies.barriers" and config.barrier.kind == "half"
    assert run_virtual(config, SILOS, tmp_path / "out")["rounds"] == 4
    for name, remedy in {
        "hospital_policy": "Install the module",
        "hospital_policies.broken": "Correct the module",
    }.items():
        with pytest.raises(ConfigError) as caught:
            StrategyConfig.load(path, [f"plugin={name}"])
        assert f"{name!r} cannot be imported: ModuleNotFoundError" in str(caught.value)
        assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("barrier.part=0.0", "barrier.part: 0.0 is not allowed. Write a number greater than 0"),
        ("barrier.prt=0.1", "Did you mean 'part'?"),
        ("barrier.kind=haf", "Did you mean 'half'?"),
        ("plugin=none.py", "none.py: there is no such file. Correct plugin"),
    ],
)
def test_a_mistake_in_a_section_of_ones_own_is_explained_as_any(path: Path, override: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        StrategyConfig.load(path, [override])
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('register("half")', 'register("bsp")', "barrier.kind 'bsp' is Bsp already"),
        ("(frozen=True)", "()", "not a frozen dataclass"),
        ("part: Ann", "part; Ann", "running the file failed: NameError"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(path: Path, old: str, new: str, told: str) -> None:
    (path.parent / "my_policies.py").write_text(FILE.replace(old, new), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        StrategyConfig.load(path)
    assert told in str(caught.value)


def test_ready_policies_take_the_place_of_what_the_strategy_says(tmp_path: Path) -> None:
    strategy = fedsync.FedSync(StrategyConfig.load("bsp"), policies={"barrier": Alone(2.0)}, out=tmp_path)
    assert strategy.config.barrier == Alone(2.0)
    assert strategy.config.model_dump(mode="json")["barrier"] == {"kind": "Alone", "pause_s": 2.0}
    few = strategy.config.model_copy(update={"stop": strategy.config.stop.model_copy(update={"rounds": 4})})
    assert run_virtual(few, SILOS, tmp_path / "out")["rounds"] == 4


@pytest.mark.parametrize(
    ("policies", "told"),
    [
        ({"balancer": Ssp()}, "Ssp is no balancer policy"),
        ({"barier": Ssp()}, "there is no such section. Did you mean 'barrier'?"),
        ({"barrier": object()}, "object is no barrier policy"),
        ({"aggregation": Plain()}, "aggregation.kind 'Plain' is your own"),
    ],
)
def test_policies_that_do_not_fit_are_refused(policies: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        StrategyConfig.load("lb-bsp-he").with_policies(policies)
    assert told in str(caught.value)


@dataclass(frozen=True)
class Backwards(ServerOptimizerPolicy):
    """A user's own."""

    rate: float = 1.0
    grace: int | None = None

    def build(self) -> ServerOptimizer:
        return HeavyBall(-0.5, self.rate)


def test_an_optimizer_of_one_s_own_steps_at_the_server_and_not_at_silos() -> None:
    config = StrategyConfig.load("lb-bsp").with_policies({"server_optimizer": Backwards()})
    assert json.loads(RunSpec.of(config, None, 3).dump())["server_optimizer"] is None
    with pytest.raises(ConfigError, match=r"server_optimizer\.kind 'Backwards' is your own"):
        StrategyConfig.load("lb-bsp-he").with_policies({"server_optimizer": Backwards()})
    with pytest.raises(ConfigError, match=r"Subclass fedsync\.ServerOptimizerPolicy"):
        StrategyConfig.load("lb-bsp").with_policies({"server_optimizer": Ssp()})


def test_silos_that_step_know_the_optimizer_from_the_specification() -> None:
    """So it is in R, and silos that were told different ones have different runs."""
    config = StrategyConfig.load("lb-bsp-he", ["server_optimizer={kind: fedadam, rate: 0.03}"])
    spec = RunSpec.parse(RunSpec.of(config, None, 3).dump())
    plan = spec.encryption_plan(Layout(("w",), ((4,),)))
    assert plan is not None and plan.optimizer == Adaptive("adam", 0.03, 0.9, 0.99, 0.001)
    other = config.model_copy(update={"server_optimizer": FedAdam(rate=0.04)})
    assert RunSpec.of(other, None, 3).dump() != spec.dump()


def test_where_silos_step_no_model_is_gone_back_to() -> None:
    back = ["barrier={kind: fsp, interval: {kind: linear, interval_s: 3.0}}", "aggregation={kind: fednova}"]
    sealed = [*back, "cipher.metrics=plain"]
    StrategyConfig.load("lb-bsp-he", sealed)
    StrategyConfig.load("lb-bsp", [*back, "server_optimizer={kind: fedavgm}"])
    with pytest.raises(ConfigError, match="as configured goes back to earlier models"):
        StrategyConfig.load("lb-bsp-he", [*sealed, "server_optimizer={kind: fedavgm}"])


def test_silos_are_not_told_of_an_aggregation_that_they_do_not_have() -> None:
    config = StrategyConfig.load("lb-bsp").with_policies({"aggregation": Plain()})
    assert json.loads(RunSpec.of(config, None, 3).dump())["aggregation"]["kind"] == "fedavg"
