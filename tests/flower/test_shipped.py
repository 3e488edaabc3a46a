"""``FedSync.lb_bsp(...)`` and the other constructors are the shipped files, with what the caller said."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsync import FedSync
from fedsync.common.errors import ConfigError
from fedsync.common.field_docs import meanings
from fedsync.config.locate import shipped_folder
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import UpdateMeta
from fedsync.core.silo_weight import Solver
from fedsync.flower.shipped import Options
from fedsync.policies.optimize.optimizer_policies import FedAvgM

SHIPPED = [path.stem for path in sorted(shipped_folder().glob("*.yaml"))]
DIGITS = {"kind": "digits"}


@pytest.fixture(autouse=True)
def _out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A strategy without ``out`` makes its folder here."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def constructor(name: str) -> Callable[..., FedSync]:
    found: Callable[..., FedSync] = getattr(FedSync, name.replace("-", "_"))
    return found


@pytest.mark.parametrize("name", SHIPPED)
def test_a_constructor_without_options_is_its_file(name: str) -> None:
    found = constructor(name)(task=DIGITS).config
    assert found == StrategyConfig.load(name, ["task={kind: digits}"])
    assert constructor(name).__doc__, "help() tells what it is"


@pytest.mark.parametrize("name", SHIPPED)
def test_options_go_where_they_belong(name: str, tmp_path: Path) -> None:
    made = constructor(name)(
        num_rounds=3,
        batch_size=16,
        local_steps=10,
        learning_rate=0.5,
        task=DIGITS,
        seed=11,
        min_available_nodes=5,
        out=tmp_path,
        overrides=["waiting.idle_s=7.0"],
    )
    config, plain = made.config, StrategyConfig.load(name)
    assert (config.stop.rounds, config.min_silos, config.seed, config.waiting.idle_s) == (3, 5, 11, 7.0)
    local = config.local
    assert (local.batch_size, local.steps, local.learning_rate) == (16, 10, 0.5)
    assert local.proximal == plain.local.proximal, "what nobody named stays"
    assert made.out == tmp_path
    steps = {"fedcompass": {"min_steps": 2, "max_steps": 10}, "elastic": {"lookahead": 20, "floor": 5}}
    assert config.model_dump()["barrier"] == {**plain.model_dump()["barrier"], **steps.get(name, {})}


@pytest.mark.parametrize("given", ["fedavgm", {"kind": "fedavgm", "momentum": 0.8}])
def test_any_strategy_takes_a_server_optimizer(given: Any) -> None:
    chosen = FedSync.lb_bsp(task=DIGITS, server_optimizer=given).config.server_optimizer
    assert isinstance(chosen, FedAvgM)
    assert chosen.momentum == (0.9 if isinstance(given, str) else 0.8)
    with pytest.raises(ConfigError, match=r"FedSync.asp, server_optimizer|server_optimizer"):
        FedSync.asp(task=DIGITS, server_optimizer="fedavg")


OWN = [
    ("fsp", "interval_s", 9.0, "barrier.interval.interval_s"),
    ("fsp-he", "interval_s", 9.0, "barrier.interval.interval_s"),
    ("lb-a-bsp", "sync_ratio", 0.75, "barrier.sync_ratio"),
    ("lb-fsp", "interval_s", 9.0, "barrier.interval.interval_s"),
    ("lb-fsp-psp", "interval_s", 9.0, "barrier.interval.interval_s"),
    ("quorum", "share", 0.8, "barrier.share"),
    ("a-bsp", "sync_ratio", 0.75, "barrier.sync_ratio"),
    ("asp", "server_rate", 0.125, "aggregation.server_rate"),
    ("ssp", "staleness", 5, "barrier.staleness"),
    ("ssp", "server_rate", 0.125, "aggregation.server_rate"),
    ("pbsp", "sample_size", 1, "barrier.sample_size"),
    ("pbsp", "server_rate", 0.125, "aggregation.server_rate"),
    ("pssp", "sample_size", 1, "barrier.sample_size"),
    ("pssp", "staleness", 5, "barrier.staleness"),
    ("pssp", "server_rate", 0.125, "aggregation.server_rate"),
    ("fedbuff", "size", 4, "barrier.size"),
    ("fedasync", "mixing", 0.25, "aggregation.mixing"),
]


@pytest.mark.parametrize(("name", "option", "value", "key"), OWN)
def test_a_strategys_own_options_go_where_they_belong(name: str, option: str, value: object, key: str) -> None:
    found = constructor(name)(task=DIGITS, **{option: value}).config
    assert found == StrategyConfig.load(name, ["task={kind: digits}", f"{key}={value}"])
    within = constructor(name)(task=DIGITS, fraction_train=0.5, **{option: value}).config
    assert within.barrier.kind == "fraction"
    assert within.model_dump()["barrier"]["inner"] == found.model_dump()["barrier"]


def test_a_part_of_the_silos_is_as_many_as_flowers_own_would_take() -> None:
    def drawn(silos: int, **options: Any) -> tuple[int, int]:
        config = FedSync.fedavg(task=DIGITS, **options).config
        return config.barrier.sampled(silos), config.quorum()

    assert drawn(10) == (10, 2)
    assert drawn(10, fraction_train=0.5) == (5, 2)
    assert drawn(10, fraction_train=0.59, min_available_nodes=4) == (5, 4)
    assert drawn(10, fraction_train=0.05) == (2, 2), "min_train_nodes is 2 by default"
    assert drawn(10, fraction_train=0.05, min_train_nodes=3) == (3, 3)
    assert drawn(10, fraction_train=1.0, min_train_nodes=6) == (10, 6)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": "32"}, "FedSync.a_bsp, batch_size: '32' is not allowed. Write a whole number"),
    ({"num_rounds": 0}, "FedSync.a_bsp, num_rounds: 0 is not allowed"),
    ({"fraction_train": 0.0}, "FedSync.a_bsp, fraction_train: 0.0 is not allowed"),
    ({"fraction_train": 0.5, "sync_ratio": 7.0}, "FedSync.a_bsp, sync_ratio: 7.0 is not allowed"),
    ({"fraction_train": 0.5, "min_train_nodes": -1}, "FedSync.a_bsp, "),
    ({"staleness": 3}, "FedSync.a_bsp, staleness: unknown key"),
    ({"interval_s": 3.0}, "FedSync.a_bsp, interval_s: unknown key"),
    ({"task": {"kind": "digitz"}}, "FedSync.a_bsp, task: unknown kind 'digitz'. Did you mean 'digits'"),
    ({"overrides": ["local.stpes=3"]}, "--set local.stpes: unknown key. Did you mean 'steps'"),
    ({"overrides": ["barrier.interval.stpes=3"]}, "--set barrier.interval: unknown key"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES)
def test_a_mistake_is_told_by_its_keyword(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FedSync.a_bsp(**{"task": DIGITS, **options})
    assert str(caught.value).startswith(message)


WITHOUT_EFFECT: list[tuple[str, dict[str, Any], str]] = [
    ("fedavg", {"fraction_train": 0.5}, "barrier"),
    ("fsp", {"interval_s": 5.0}, "barrier"),
    ("pssp", {"sample_size": 2}, "barrier"),
    ("asp", {"server_rate": 0.5}, "aggregation"),
    ("fedasync", {"mixing": 0.5}, "aggregation"),
    ("lb-bsp", {"server_optimizer": "fedavgm"}, "server_optimizer"),
    ("lb-bsp", {"on_round": lambda round: {"mix": round}}, "on_round"),
    ("lb-bsp", {"overrides": ["local.steps=3", "barrier.slack=0.3"]}, "barrier"),
]


@pytest.mark.parametrize(("name", "options", "section"), WITHOUT_EFFECT)
def test_a_keyword_is_refused_whose_section_a_ready_policy_replaces(
    name: str, options: dict[str, Any], section: str
) -> None:
    plain = FedSync.fedbuff(task=DIGITS, server_optimizer="fedavgm", overrides=["on_round={kind: decay}"]).config
    ready = {section: getattr(plain, section)}
    assert getattr(constructor(name)(task=DIGITS, policies=ready).config, section) == ready[section]
    (option,) = options
    with pytest.raises(ConfigError) as caught:
        constructor(name)(task=DIGITS, policies=ready, **options)
    assert caught.value.place == f"FedSync.{name.replace('-', '_')}, {option}"
    assert f"policies[{section!r}]" in str(caught.value)


def test_a_keyword_stays_that_acts_beside_a_ready_policy() -> None:
    """`local_steps` and `min_train_nodes` also count elsewhere than in the barrier."""
    ready = {"barrier": FedSync.fedavg(task=DIGITS).config.barrier}
    config = FedSync.elastic(
        task=DIGITS, local_steps=40, min_train_nodes=3, fraction_train=1.0, learning_rate=0.5, policies=ready
    ).config
    assert (config.local.steps, config.min_silos, config.barrier) == (40, 3, ready["barrier"])


def test_the_server_rate_of_a_balanced_strategy_scales_its_step() -> None:
    metas = [UpdateMeta("a/1", "a", 0, 5, 40, 100, 8, 0.0), UpdateMeta("b/1", "b", 0, 5, 40, 300, 8, 0.0)]
    solver = Solver(momentum=0.0, pull=0.0)
    plain, half = (FedSync.lb_bsp(task=DIGITS, server_rate=rate).config.aggregation for rate in (1.0, 0.5))
    assert list(plain.weigher(solver).coefficients(metas, 0)) == pytest.approx([0.25, 0.75])
    assert list(half.weigher(solver).coefficients(metas, 0)) == pytest.approx([0.125, 0.375])


def test_an_unknown_keyword_is_told_as_python_does() -> None:
    with pytest.raises(TypeError, match=r"FedSync.lb_bsp\(\) got an unexpected keyword argument 'bach_size'"):
        FedSync.lb_bsp(bach_size=32)  # type: ignore[call-arg]


def test_the_client_app_beside_the_server_is_what_silos_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a package, as of Flower's templates, and where both are plain files."""
    (tmp_path / "theirs").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    code = compile("made = FedSync.lb_bsp()", "server_app.py", "exec")
    with pytest.raises(ConfigError, match=r"there is no module theirs\.client_app"):
        exec(code, {"FedSync": FedSync, "__package__": "theirs"})
    for folder in (tmp_path, tmp_path / "theirs"):
        (folder / "client_app.py").write_text("app = None\n")
    told: list[object] = []
    monkeypatch.setattr(StrategyConfig, "model_validate", lambda data: told.append(data["task"]))
    for package in ("theirs", ""):
        with pytest.raises(AttributeError):
            exec(code, {"FedSync": FedSync, "__package__": package})
    assert told == [{"kind": "clientapp", "app": f"{module}:app"} for module in ("theirs.client_app", "client_app")]


def test_every_option_is_explained() -> None:
    assert meanings(Options).keys() == Options.__annotations__.keys()
