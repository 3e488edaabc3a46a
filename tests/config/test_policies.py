"""What strategy files say of predictors, balancers, barriers and aggregations, and what is said when it is wrong."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from fedsync.common.errors import ConfigError
from fedsync.config.strategy import StrategyConfig
from fedsync.config.yaml_file import YamlFile
from fedsync.core.orders import LocalWork, UpdateMeta
from fedsync.core.speed.fitting import CurveFitter
from fedsync.core.speed.sizing import Scale, Sizing
from fedsync.core.stopping import StopRules
from fedsync.policies.aggregate.aggregate_kinds import Normalised
from fedsync.policies.aggregate.weighers import Hinge, Polynomial, Scaled, Stale, Toward, WeightedMean
from fedsync.policies.balance.by_forecast import EqualisingBalancer
from fedsync.policies.balance.rounding import InMultiples
from fedsync.policies.balance.without_forecast import LeaderStraggler, MovePace
from fedsync.policies.barrier.intervals import FixedInterval
from fedsync.policies.barrier.kinds.bulk import Bsp
from fedsync.policies.barrier.kinds.fsp import Fsp, Late, WaitFor
from fedsync.policies.barrier.kinds.sampled import Sampling
from fedsync.policies.barrier.wrappers.default_wrappers import MinimumSilos, Resting
from fedsync.policies.barrier.wrappers.late_orders import Capped, Quorum
from fedsync.policies.predict.mixture import Mixture
from fedsync.policies.predict.predictor_base import predictors
from tests.laws.kinds import cases, configuration, examples

WORK = LocalWork(20, 32, 0.2)
FIXED = "interval: {kind: fixed, interval_s: 2.0}"
WRAPPED = "{kind: capped, cap_s: 5.0, inner: {kind: quorum, share: 0.5, inner: {kind: bsp}}}"


def load(*overrides: str, balancer: str = "{kind: fixed}", barrier: str = WRAPPED) -> StrategyConfig:
    local = "{steps: 20, batch_size: 32, learning_rate: 0.2}"
    parts = f"local: {local}\nbalancer: {balancer}\nbarrier: {barrier}\ntask: {{kind: digits}}"
    file = YamlFile("b.yaml", f"name: b\nstop: {{rounds: 4}}\n{parts}")
    file.override(overrides)
    return file.validate(StrategyConfig)


@pytest.mark.parametrize("barrier", ["{kind: bsp}", "{kind: on-time}", "{kind: fsp, " + FIXED + "}"])
def test_silos_count_by_their_examples_unless_a_strategy_says_otherwise(barrier: str) -> None:
    """20 and 60 samples: a quarter and three quarters."""
    weigher = load(barrier=barrier).policies(2).weigher
    metas = [UpdateMeta(f"{name}/1", name, 0, 4, 128, examples, 9) for name, examples in (("a", 20), ("b", 60))]
    assert weigher.coefficients(metas, 1) == pytest.approx([0.25, 0.75])


@pytest.mark.parametrize("case", cases(), ids=str)
def test_what_is_written_reads_back_the_same(case: tuple[str, str, dict[str, Any]]) -> None:
    section, _, more = case
    config = configuration(case, {"rounds": 1})
    written = config.model_dump(mode="json")
    assert next(iter(written[section])) == "kind"
    plain = {key: value for key, value in more.items() if not isinstance(value, dict | list)}
    assert plain.items() <= written[section].items()
    assert StrategyConfig.model_validate(json.loads(json.dumps(written))) == config


def test_a_barrier_goes_into_a_barrier_into_a_barrier() -> None:
    inner = Quorum(Bsp(), share=0.5)
    assert load().policies(5).barrier == MinimumSilos(Resting(Capped(inner, 5.0)), 5)


def test_sections_inside_a_section_are_read() -> None:
    text = f"{{kind: fsp, {FIXED}, late: stale, wait_for: {{sample_size: 2, sampling: basic}}}}"
    config = load("aggregation={kind: fedbuff}", barrier=text)
    assert config.barrier == Fsp(FixedInterval(2.0), late=Late.STALE, wait_for=WaitFor(2, Sampling.BASIC))


@pytest.mark.parametrize(
    ("balancer", "expected"),
    [
        ("{kind: fixed}", Sizing(WORK)),
        ("{kind: equalise}", Sizing(WORK, EqualisingBalancer(), fitter=CurveFitter(), noise=0.3)),
        (
            "{kind: equalise, curve: {kind: linear}, multiple: 8, floor: 4, cap: 64, scale: learning_rate}",
            (InMultiples, Sizing(WORK, None, Scale.LEARNING_RATE, floor=4, cap=64)),
        ),
        (
            "{kind: leader-straggler, fast: {step: 4, window: 2}, multiple: 4, cap: 64}",
            Sizing(
                WORK,
                adaptive=LeaderStraggler(multiple=4, cap=64, fast=MovePace(4, 2), fine=MovePace(1, 20)),
                cap=64,
                fitter=CurveFitter(),
            ),
        ),
    ],
)
def test_a_balancer_sizes_as_it_says(balancer: str, expected: Any) -> None:
    sizing = load(balancer=balancer).policies().sizing
    if isinstance(expected, tuple):
        assert isinstance(sizing.balancer, expected[0])
        sizing, expected = Sizing(sizing.work, None, sizing.scale, sizing.floor, sizing.cap), expected[1]
    assert sizing == expected


@pytest.mark.parametrize(
    ("changes", "noise"),
    [
        ((), 0.3),
        (["barrier={kind: bsp}"], 0.3),
        (["barrier={kind: a-bsp}"], 0.0),
        (["aggregation.weight=samples"], 0.0),
        (["balancer.scale=steps"], 0.0),
        (["balancer.speeds=declared"], 0.0),
    ],
)
def test_noise_counts_where_the_slowest_ends_a_round_and_weights_stay(changes: Sequence[str], noise: float) -> None:
    assert StrategyConfig.load("lb-bsp", changes).policies().sizing.noise == noise


def test_declared_speeds_have_no_curve_to_learn() -> None:
    policies = load(balancer="{kind: equalise, speeds: declared}").policies()
    assert policies.declared_speeds
    assert policies.sizing.fitter is None


def test_a_mixture_holds_one_of_each_other_kind_by_default() -> None:
    mixture = predictors()["mixture"]
    assert isinstance(mixture, Mixture)
    assert {expert.kind: expert for expert in mixture.experts} == {
        kind: other for kind, other in predictors().items() if kind != "mixture"
    }


SHARING = ("proportional", "equalise", "leader-straggler")
MISTAKES: list[tuple[str, str, str, str]] = [
    ("barrier.inner.kind=qorum", "barrier.inner.kind", "unknown kind 'qorum'", "Did you mean 'quorum'?"),
    ("barrier.inner.inner.kind=bps", "barrier.inner.inner.kind", "unknown kind 'bps'", "Did you mean 'bsp'?"),
    ("barrier.inner.inner=bsp", "barrier.inner.inner", "a section is expected", "Write inner: {kind: bsp}"),
    ("barrier.inner.share=2.0", "barrier.inner.share", "2.0 is not allowed", "at most 1"),
    ("barrier.inner.count=3", "barrier.inner", "the number of silos is not defined", "either `count` or `share`"),
    ("barrier.late=never", "barrier.late", "'never' is not allowed", "drop, next"),
    ("barrier.inner.late=drop", "barrier", "late 'next' of capped would commit what quorum", "the same `late`"),
    ("barrier.caps_s=3.0", "barrier.caps_s", "unknown key", "Did you mean 'cap_s'?"),
    ("barrier.kind=[bsp]", "barrier.kind", "unknown kind", "Allowed"),
    ("barrier={}", "barrier", "no kind is chosen", "Write `kind: ...`"),
    ("barrier={kind: buffered}", "barrier.size", "missing", "Add this key"),
    ("barrier={kind: fedcompass, min_steps: 9, max_steps: 8}", "barrier", "max_steps 8", "Raise max_steps"),
    ("barrier={kind: ssp, staleness: -1}", "barrier.staleness", "-1 is not allowed", "at least 0"),
    ("barrier={kind: ssp, staleness: 1.5}", "barrier.staleness", "1.5 is not allowed", "Write a whole number"),
    ("barrier={kind: ssp, staleness: '1'}", "barrier.staleness", "'1' is not allowed", "Write a whole number"),
    ("barrier={kind: sampled}", "barrier.sample_size", "missing", "Add this key"),
    ("barrier={kind: sampled, sample_size: 2, sampling: dynamik}", "barrier.sampling", "'dynamik'", "'dynamic'?"),
    ("barrier={kind: a-bsp, sync_ratio: 1.1}", "barrier.sync_ratio", "1.1 is not allowed", "at most 1"),
    ("barrier={kind: a-bsp, sync_ratio: .nan}", "barrier.sync_ratio", "nan is not allowed", "finite number"),
    ("barrier={kind: a-bsp, report_s: 0.0}", "barrier.report_s", "0.0 is not allowed", "greater than 0"),
    ("barrier={kind: elastic, lookahead: 0}", "barrier.lookahead", "0 is not allowed", "at least 1"),
    ("barrier={kind: elastic, lookahead: 4, floor: 5}", "barrier", "floor 5 exceeds lookahead 4", "Lower the floor"),
    ("barrier={kind: elastic, method: naive}", "barrier.method", "'naive' is not allowed", "sweep"),
    ("barrier={kind: fsp}", "barrier.interval", "missing", "Add this key"),
    ("barrier={kind: fsp, interval: 2.0}", "barrier.interval", "a section is expected", "Write interval: {"),
    ("barrier={kind: fsp, interval: {kind: fixt}}", "barrier.interval.kind", "unknown kind 'fixt'", "'fixed'?"),
    (f"barrier={{kind: fsp, {FIXED}, overrun: 1.5}}", "barrier.overrun", "1.5 is not allowed", "at most 1"),
    (f"barrier={{kind: fsp, {FIXED}, passes: 0.0}}", "barrier.passes", "0.0 is not allowed", "greater than 0"),
    (f"barrier={{kind: fsp, {FIXED}, wait_for: 3}}", "barrier.wait_for", "a section is expected", "{key: value}"),
    (f"barrier={{kind: fsp, {FIXED}, wait_for: {{sample_size: '3'}}}}", "barrier.wait_for.sample_size", "'3'", "whole"),
    (f"barrier={{kind: fsp, {FIXED}, wait_for: {{size: 3}}}}", "barrier.wait_for.size", "unknown key", "sample_size"),
    (f"barrier={{kind: fsp, {FIXED}, late: drop, wait_for: {{sample_size: 2}}}}", "barrier", "discards", "late: next"),
    (f"barrier={{kind: fsp, {FIXED}, late: stale}}", "barrier.late", "needs a discount of stale updates", "polynomial"),
    ("predictor={kind: mixture, experts: []}", "predictor.experts", "[] is not allowed", "a list of at least 1"),
    ("predictor={kind: mixture, experts: [{kind: mixture}]}", "predictor", "cannot contain a mixture", "experts"),
    ("predictor={kind: mixture, experts: [{kind: emma}]}", "predictor.experts.0.kind", "unknown kind 'emma'", "'ema'?"),
    ("aggregation={kind: fedbuff, staleness: {kind: hinges}}", "aggregation.staleness.kind", "hinges", "'hinge'"),
    ("aggregation={kind: fedasync, mixing: 1.5}", "aggregation.mixing", "1.5 is not allowed", "at most 1"),
    ("local.proximal=-0.1", "local.proximal", "-0.1 is not allowed", "at least 0"),
    *(
        (f"barrier={{kind: fsp, interval: {{kind: {interval}}}}}", place, problem, remedy)
        for interval, place, problem, remedy in [
            ("fixed, interval_s: 0.0", "barrier.interval.interval_s", "0.0 is not allowed", "greater than 0"),
            ("binary, interval_s: 1.0, factor: 1", "barrier.interval.factor", "1 is not allowed", "at least 2"),
            ("binary, interval_s: 0.05", "barrier.interval", "floor_s 0.1 exceeds", "Lower the floor"),
            ("linear, interval_s: 3.0, ceiling_s: 2.0", "barrier.interval", "lies outside", "Move the bounds"),
            ("climb, floor_s: 3.0, ceiling_s: 2.0", "barrier.interval", "floor_s 3 exceeds", "Lower the floor"),
            ("climb, trials: 1", "barrier.interval.trials", "1 is not allowed", "at least 2"),
        ]
    ),
    *(
        (f"balancer={{kind: {kind}, {more}}}", place, problem, remedy)
        for kind in SHARING
        for more, place, problem, remedy in [
            ("floor: 32", "local.batch_size", "32 is the smallest batch", "fixed"),
            ("floor: 17, multiple: 32", "local.batch_size", "32 is the smallest batch", "fixed"),
            ("cap: 32", "local.batch_size", "32 is the largest batch", "fixed"),
            ("floor: 64", "balancer.floor", "64 exceeds local.batch_size 32", "Change one"),
            ("cap: 8", "balancer.cap", "8 lies below local.batch_size 32", "Change one"),
            ("multiple: 5", "balancer.multiple", "5 does not divide local.batch_size 32", "local.batch_size: 35"),
            ("multiple: 0", "balancer.multiple", "0 is not allowed", "at least 1"),
            ("curve: {kind: afine}", "balancer.curve.kind", "unknown kind 'afine'", "'affine'"),
            ("curve: affine", "balancer.curve", "a section is expected here, not 'affine'", "{kind: affine}"),
        ]
    ),
]


@pytest.mark.parametrize(("override", "place", "problem", "remedy"), MISTAKES, ids=[case[0] for case in MISTAKES])
def test_mistakes_are_explained(override: str, place: str, problem: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(override)
    assert caught.value.place.endswith(f" {place}")
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy


EQUALISED_STEPS = "{kind: equalise, scale: steps}"


@pytest.mark.parametrize(
    ("balancer", "barrier", "problem"),
    [
        ("{kind: equalise, scale: steps, multiple: 2}", "{kind: bsp}", "multiple has no effect"),
        (EQUALISED_STEPS, "{kind: capped, cap_s: 9, inner: {kind: fedcompass}}", "fedcompass sets the steps"),
        (EQUALISED_STEPS, "{kind: elastic}", "'steps' has no effect"),
        (EQUALISED_STEPS, f"{{kind: fsp, {FIXED}}}", "'steps' has no effect"),
        ("{kind: leader-straggler}", "{kind: asp}", "barrier.kind asp has no rounds"),
        ("{kind: leader-straggler}", "{kind: capped, cap_s: 9, inner: {kind: elastic}}", "barrier.kind elastic has no"),
        ("{kind: leader-straggler, scale: steps}", "{kind: bsp}", "unknown key"),
        ("{kind: leader-straggler, speeds: declared}", "{kind: bsp}", "unknown key"),
    ],
)
def test_what_does_not_go_together_is_refused(balancer: str, barrier: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(balancer=balancer, barrier=barrier)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("aggregation={kind: fedasync}", "moves towards whole models. Choose fedbuff"),
        ("task={kind: k-means, data: {kind: blobs}}", "does not fit task.kind k-means"),
    ],
)
def test_a_server_optimizer_steps_along_sums_of_updates_only(override: str, problem: str) -> None:
    load(override)
    with pytest.raises(ConfigError, match=problem):
        load(override, "server_optimizer={kind: fedavgm}")


SCAFFOLD = ["barrier={kind: bsp}", "aggregation={kind: fednova, weight: examples}", "server_optimizer={kind: scaffold}"]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("task={kind: silo-app, file: mine.py}", "task.kind silo-app has a loop of its own"),
        ("local.momentum=0.9", "Write optimizer: sgd, without momentum"),
        ("local.optimizer={kind: sgd, momentum: 0.5}", "Write optimizer: sgd, without momentum"),
        ("local.optimizer={kind: sgd, maximize: true}", "Write optimizer: sgd, without momentum"),
        ("local.optimizer=adam", "local.optimizer 'adam' as configured is not plain SGD"),
        ("local.proximal=0.1", "Write proximal: 0"),
        ("balancer={kind: proportional, scale: learning_rate}", "different learning rates. Write scale: batch"),
        ("aggregation={kind: fedavg, weight: examples}", "Write aggregation: {kind: fednova}"),
        ("aggregation.staleness={kind: polynomial}", "does not define a commit's number of local steps"),
        ("aggregation.weight=samples", "Write weight: examples, or silo"),
        ("barrier={kind: ssp, staleness: 2}", "commits updates that began with different versions"),
        ("barrier={kind: quorum, share: 0.5, late: next, inner: {kind: bsp}}", "began with different versions"),
        ("barrier={kind: fsp, late: drop, interval: {kind: linear, interval_s: 3.0}}", "goes back to earlier models"),
        ("wire={up: bf16}", "wire has less than 32 bits"),
        ("wire={down: int8}", "wire has less than 32 bits"),
    ],
)
def test_steps_are_corrected_only_where_variates_stay_those_of_the_model(override: str, problem: str) -> None:
    load(*SCAFFOLD)
    with pytest.raises(ConfigError, match="corrects the steps of silos") as caught:
        load(*SCAFFOLD, override)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        "barrier={kind: a-bsp}",
        "barrier={kind: elastic}",
        "barrier={kind: fsp, late: drop, interval: {kind: fixed, interval_s: 1}}",
        "barrier={kind: quorum, share: 0.5, late: drop, inner: {kind: bsp}}",
        "barrier={kind: fraction, share: 0.5, inner: {kind: bsp}}",
        "local={steps: 20, batch_size: 32, learning_rate: 0.1, clip_norm: 1.0, weight_decay: 0.01}",
        "balancer={kind: proportional, scale: steps}",
        "cipher={kind: bfv}",
        "cipher={kind: masked}",
    ],
)
def test_steps_are_corrected_also_where_silos_do_unequal_numbers_of_them(override: str) -> None:
    load(*SCAFFOLD, override)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ("{kind: fedavgm, momentum: 1.0}", "less than 1|below 1"),
        ("{kind: fedavgm, rate: 0.0}", "above 0|greater than 0"),
        ("{kind: fedadam, tau: 0.0}", "at least"),
        ("{kind: fedadam, eta: 0.1}", "unknown key"),
        ("{kind: fedprox}", "unknown kind 'fedprox'"),
    ],
)
def test_settings_of_server_optimizers_have_bounds(keys: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(f"server_optimizer={keys}")


def test_what_goes_together_is_not_refused() -> None:
    load(balancer="{kind: leader-straggler}")
    load("aggregation={kind: fednova, staleness: {kind: hinge}}", barrier=f"{{kind: fsp, {FIXED}, late: stale}}")
    load("local.proximal=5.0", "aggregation.kind=fedavg")


@pytest.mark.parametrize(
    "aggregation", ["{kind: fedavg}", "{kind: fednova}", "{kind: fedbuff, staleness: {kind: constant}}"]
)
def test_stale_updates_may_not_wait_where_nothing_discounts_them(aggregation: str) -> None:
    with pytest.raises(ConfigError, match="needs a discount"):
        load(f"aggregation={aggregation}", barrier=f"{{kind: fsp, {FIXED}, late: stale}}")


@pytest.mark.parametrize("kind", ["{kind: silo-app, file: app.py}", "{kind: clientapp, app: 'a.b:app'}"])
@pytest.mark.parametrize(
    "assignment",
    ["optimizer=adam", "momentum=0.9", "weight_decay=0.01", "clip_norm=1.0", "precision=bf16", "proximal=0.1"],
)
def test_a_key_that_an_own_loop_does_not_receive_is_refused(kind: str, assignment: str) -> None:
    given, key = [f"local.{assignment}", "aggregation.kind=fedavg"], assignment.partition("=")[0]
    load(*given)
    with pytest.raises(ConfigError, match=rf"local\.{key}: has no effect on task\.kind .*Leave it out, and set it in"):
        load(f"task={kind}", *given)


def test_a_proximal_term_that_makes_silos_swing_is_refused_where_it_is_normalised() -> None:
    with pytest.raises(ConfigError, match=r"5 times local\.learning_rate 0\.2 is not below 1"):
        load("local.proximal=5.0", "aggregation.kind=fednova")


@pytest.mark.parametrize("kind", examples("barrier"))
def test_unequal_steps_are_normalised_unless_the_file_says_otherwise(kind: str) -> None:
    inner = str({"kind": kind, **examples("barrier")[kind]}).replace("'", "")
    for override in (f"barrier={inner}", f"barrier={{kind: capped, cap_s: 1.0, inner: {inner}}}"):
        config = load(override)
        unequal = config.barrier.innermost.unequal_steps
        assert unequal == (kind in ("fsp", "a-bsp", "on-time", "elastic", "fedcompass"))
        assert config.aggregation.kind == ("fednova" if unequal else "fedavg")
        assert load(override, "aggregation.kind=fedavg").aggregation.kind == "fedavg"
    assert load(balancer=EQUALISED_STEPS).aggregation.kind == "fednova"


def test_fednova_knows_how_the_silos_train() -> None:
    config = load("local.momentum=0.5", "local.proximal=0.3", "aggregation={kind: fednova, weight: examples}")
    assert config.policies().weigher == Normalised(WeightedMean("examples"), momentum=0.5, pull=pytest.approx(0.06))


@pytest.mark.parametrize(("proximal", "pull"), [(0.0, 0.2), (1.0, 0.4)])
def test_a_running_mean_comes_less_far_with_each_step(proximal: float, pull: float) -> None:
    """s <- s - 0.2 (s - t) - 0.2 mu (s - s_0): of the way to t, a step leaves 1 - 0.2 (1 + mu)."""
    task = "task={kind: k-means, clusters: 3, data: {kind: blobs}}"
    rest = ["local.momentum=0.0", f"local.proximal={proximal}", "aggregation={kind: fednova}"]
    assert load(task, *rest).policies().weigher == Normalised(WeightedMean("examples"), pull=pytest.approx(pull))


def test_aggregations_are_built_from_parts() -> None:
    buff = load("aggregation={kind: fedbuff, server_rate: 0.5}").policies().weigher
    assert buff == Scaled(Stale(WeightedMean("silo"), Polynomial(0.5)), 0.5)
    hinge = "aggregation={kind: fedasync, mixing: 0.4, staleness: {kind: hinge, slope: 2.0, grace: 3}}"
    assert load(hinge).policies().weigher == Toward(Scaled(Stale(WeightedMean(), Hinge(2.0, 3)), 0.4))
    plain = load("aggregation={kind: fedbuff, staleness: {kind: constant}}").policies().weigher
    assert plain == WeightedMean("silo"), "eta_g = 1 and s = 1 change nothing"


def test_stop_rules_are_read() -> None:
    stop = "stop={rounds: 9, seconds: 60.0, target_accuracy: 0.9, patience: 3}"
    assert load(stop).policies().stop == StopRules(9, 60.0, 0.9, 3)
