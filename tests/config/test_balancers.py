"""What each balancer can be told, and what it becomes."""

from __future__ import annotations

from typing import Any

import pytest

from fedsync.config.strategy import StrategyConfig
from fedsync.config.yaml_file import YamlFile
from fedsync.core.errors import ConfigError
from fedsync.core.fitting import CurveFitter
from fedsync.core.orders import LocalWork
from fedsync.core.sizing import Scale, Sizing
from fedsync.policies.balance.equalise import EqualisingBalancer
from fedsync.policies.balance.leader_straggler import LeaderStraggler, MovePace
from fedsync.policies.balance.multiples import InMultiples
from fedsync.policies.balance.proportional import ProportionalBalancer

WORK = LocalWork(20, 32, 0.1)


def load(balancer: str, barrier: str = "{kind: bsp}") -> StrategyConfig:
    text = f"name: b\nstop: {{rounds: 1}}\nbalancer: {balancer}\nbarrier: {barrier}\ntask: {{kind: digits}}\n"
    return YamlFile("b.yaml", text).validate(StrategyConfig)


@pytest.mark.parametrize(
    ("balancer", "expected"),
    [
        ("{kind: fixed}", Sizing(WORK)),
        ("{kind: proportional}", Sizing(WORK, ProportionalBalancer())),
        (
            "{kind: proportional, curve: {kind: affine}, scale: learning_rate}",
            Sizing(WORK, ProportionalBalancer(), Scale.LEARNING_RATE, fitter=CurveFitter()),
        ),
        ("{kind: equalise}", Sizing(WORK, EqualisingBalancer(), fitter=CurveFitter())),
        (
            "{kind: equalise, curve: {kind: linear}, multiple: 8, floor: 4, cap: 64}",
            Sizing(WORK, InMultiples(EqualisingBalancer(), 8), floor=4, cap=64),
        ),
        ("{kind: equalise, scale: steps}", Sizing(WORK, EqualisingBalancer(), Scale.STEPS, fitter=CurveFitter())),
        (
            "{kind: leader-straggler}",
            Sizing(WORK, adaptive=LeaderStraggler(MovePace(5, 5), MovePace(1, 20), 0.95), fitter=CurveFitter()),
        ),
        (
            "{kind: leader-straggler, fast: {step: 4, window: 2}, memory: 0.9, multiple: 4, cap: 64}",
            Sizing(
                WORK,
                adaptive=LeaderStraggler(MovePace(4, 2), MovePace(1, 20), 0.9, multiple=4),
                cap=64,
                fitter=CurveFitter(),
            ),
        ),
    ],
)
def test_what_is_written_is_what_decides(balancer: str, expected: Sizing) -> None:
    assert load(balancer).policies().sizing == expected


def test_declared_speeds_have_no_curve_to_learn() -> None:
    policies = load("{kind: equalise, speeds: declared}").policies()
    assert policies.declared_speeds
    assert policies.sizing.fitter is None


@pytest.mark.parametrize("balancer", ["{kind: equalise}", "{kind: leader-straggler, cap: 64}", "{kind: proportional}"])
def test_a_resolved_file_reads_back_the_same(balancer: str) -> None:
    config = load(balancer)
    assert StrategyConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("kind", ["proportional", "equalise", "leader-straggler"])
@pytest.mark.parametrize(
    ("more", "key", "problem", "remedy"),
    [
        ("floor: 64", "balancer.floor", "64 exceeds local.batch_size 32", "Change one"),
        ("cap: 8", "balancer.cap", "8 lies below local.batch_size 32", "Change one"),
        ("multiple: 5", "balancer.multiple", "5 does not divide local.batch_size 32", "Write local.batch_size: 35"),
        ("multiple: 0", "balancer.multiple", "0 is not allowed", "at least 1"),
        ("curve: {kind: afine}", "balancer.curve.kind", "unknown kind 'afine'", "'affine'"),
        ("curve: affine", "balancer.curve", "a section is expected here, not 'affine'", "{kind: affine}"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(kind: str, more: str, key: str, problem: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(f"{{kind: {kind}, {more}}}")
    assert caught.value.place.startswith(f"b.yaml, line 3, {key}")
    assert problem in f"{key} {caught.value.problem}"
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("balancer", "barrier", "problem"),
    [
        ("{kind: equalise, scale: steps, multiple: 2}", "{kind: bsp}", "multiple has no effect"),
        ("{kind: equalise, scale: steps}", "{kind: fedcompass}", "'steps' has no effect"),
        ("{kind: equalise, scale: steps}", "{kind: elastic}", "'steps' has no effect"),
        (
            "{kind: equalise, scale: steps}",
            "{kind: fsp, interval: {kind: fixed, interval_s: 1.0}}",
            "'steps' has no effect",
        ),
        ("{kind: leader-straggler}", "{kind: asp}", "barrier.kind asp has no rounds"),
        ("{kind: leader-straggler}", "{kind: capped, cap_s: 9, inner: {kind: elastic}}", "barrier.kind elastic has no"),
        ("{kind: leader-straggler, scale: steps}", "{kind: bsp}", "unknown key"),
        ("{kind: leader-straggler, speeds: declared}", "{kind: bsp}", "unknown key"),
    ],
)
def test_what_does_not_go_together_is_refused(balancer: str, barrier: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(balancer, barrier)


def test_wrappers_around_bsp_have_rounds_too() -> None:
    wrapped: dict[str, Any] = {"kind": "capped", "cap_s": 9.0, "late": "next", "inner": {"kind": "bsp"}}
    assert load("{kind: leader-straggler}", str(wrapped).replace("'", "")).balancer.kind == "leader-straggler"
