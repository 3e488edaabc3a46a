"""The borders of what a report may say, and what is said of reports beyond them."""

from dataclasses import replace
from typing import Any

import pytest

from fedsync.common.errors import ProtocolError
from fedsync.core.actions import Commit
from fedsync.core.coordinator import Coordinator
from fedsync.core.events import Event, SiloJoined
from fedsync.core.orders import Evaluation, LocalWork, SiloFacts, Window, WorkOrder
from fedsync.core.protocols import Balancer
from fedsync.core.report_checks import check_evaluation, check_facts, check_report, check_speed, sound, usable
from fedsync.core.silo_weight import Share
from fedsync.core.speed.sizing import Sizing
from fedsync.evaluation.metrics.metric_types import statistics_of
from fedsync.evaluation.metrics.moments import BlockSums, Mean
from fedsync.evaluation.metrics.named import shipped
from fedsync.policies.aggregate.weighers import WeightedMean
from fedsync.policies.balance.by_forecast import EqualisingBalancer, ProportionalBalancer
from tests.core.make import answer, of_type, orders, policies, scored

ORDER = WorkOrder("a/1", 3, 1, batch_size=8, max_steps=4, learning_rate=0.1, seed=1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"steps": 1, "samples": 1},
        {"steps": 4, "samples": 32},
        {"loss": -5.0},  # a log likelihood
        {"compute_s": 32e-9},  # 1e9 samples/s, the most
        {"overhead_s": {"load": 0.0}},
        {"windows": (Window(1e9, 0.0, 0.0),) * 64},
        {"windows": (Window(1.0, 1.001, 1.001),)},  # a mean of ones may exceed 1 by rounding
        {"windows": (Window(1.0),)},  # does not tell of its machine
        {"compute_s": 32e9},  # 1e-9 samples/s, the least
        {"loss": -1e30},
        {"overhead_s": {f"{'x' * 126}{number}": 1e9 for number in range(10, 74)}},
        {"windows": (Window(1e-9),)},
        {"batch_cap": 1},
        {"batch_cap": 10**15},
        {"metrics": {f"{'x' * 62}{number}": -1e30 for number in range(10, 42)}},
        {"evaluation": scored(0.0, samples=0)},
    ],
)
def test_what_just_passes(changes: dict[str, Any]) -> None:
    event = answer("a", ORDER, **changes)
    check_report("a", ORDER, event.meta, event.report)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"base_version": 9}, "'version': started from version 9"),
        ({"steps": 5}, "'steps': 5 of 4 steps"),
        ({"steps": 0}, "'steps': 0 of 4 steps"),
        ({"steps": 2, "samples": 17}, "'samples': 17 samples in steps that hold 16"),
        ({"loss": float("nan")}, "'loss': training loss nan"),
        ({"compute_s": 0.0}, "'compute time': 0.0 s of training"),
        ({"compute_s": 32e10}, "'speed': 1e-10 samples/s lies outside [1e-09, 1e+09]"),
        ({"overhead_s": {f"{number}": 0.0 for number in range(65)}}, "'overhead': 65 kinds, at most 64"),
        ({"overhead_s": {"load": -1.0}}, "'overhead': -1.0 s of 'load'"),
        ({"overhead_s": {"x" * 129: 0.5}}, f"'overhead': 0.5 s of '{'x' * 128}'"),
        ({"windows": (Window(1.0),) * 65}, "'windows': 65 windows, at most 64"),
        ({"windows": (Window(2e9),)}, "'speed': 2e+09 samples/s lies outside [1e-09, 1e+09]"),
        ({"windows": (Window(1.0, 1.5),)}, "'resources': Window(speed=1.0, cpu=1.5, memory=None)"),
        ({"windows": (Window(1.0, None, -0.5),)}, "'resources': Window(speed=1.0, cpu=None, memory=-0.5)"),
        ({"metrics": {f"x{number}": 0.0 for number in range(33)}}, "'metrics': 33 metrics, at most 32"),
        ({"metrics": {"Energy": 1.0}}, "'metrics': 'Energy' = 1.0"),
        ({"batch_cap": 0}, "'batch cap': 0"),
        ({"loss": 1.1e30}, "'loss'"),
        ({"compute_s": 33e9}, "'speed'"),
        ({"compute_s": 1e308}, "'speed'"),
        *[({"metrics": {"energy_j": value}}, "'metrics'") for value in (float("nan"), float("inf"), 1.1e30, 10**400)],
        *[
            ({"metrics": {name: 1.0}}, "'metrics'")
            for name in ("", "Energy", "energy j", "9_j", "x" * 65, "energy_j\n")
        ],
        ({"batch_cap": 10**30}, "'batch cap'"),
        ({"samples": 0}, "'samples'"),
        ({"loss": float("inf")}, "'loss'"),
        *[({"compute_s": value}, "'compute time'") for value in (-1.0, float("nan"), float("inf"))],
        *[({"overhead_s": {"load": value}}, "'overhead'") for value in (1.1e9, float("nan"))],
        *[({"windows": (Window(value),)}, "'speed'") for value in (0.0, 5e-324, float("nan"))],
        ({"windows": (Window(1.0, float("nan")),)}, "'resources'"),
    ],
)
def test_what_no_silo_can_mean_is_refused(changes: dict[str, Any], told: str) -> None:
    event = answer("a", ORDER, **changes)
    with pytest.raises(ProtocolError) as caught:
        check_report("a", ORDER, event.meta, event.report)
    assert str(caught.value).startswith(f"silo 'a' failed the check {told}")
    assert not sound(ORDER, event.meta, event.report)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"steps": 3}, "report and update disagree"),
        ({"samples": 3}, "report and update disagree"),
        *(({"examples": number}, f"{number} examples, 40 bytes") for number in (0, -1, 10**9 + 1, 10**400)),
        ({"nbytes": -1}, "1000 examples, -1 bytes"),
    ],
    ids=range(7),
)
def test_an_update_that_cannot_be_is_refused(changes: dict[str, Any], told: str) -> None:
    event = answer("a", ORDER)
    with pytest.raises(ProtocolError) as caught:
        check_report("a", ORDER, replace(event.meta, **changes), event.report)
    assert str(caught.value) == f"silo 'a' failed the check 'meta': {told}"


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        *((SiloFacts(number), f"'examples': {number} training samples") for number in (0, 10**9 + 1, 10**30)),
        (SiloFacts(1, memory_samples=0), "'memory': memory for 0 samples"),
        (SiloFacts(1, memory_samples=10**16), "'memory': memory for"),
        (SiloFacts(1, declared_speed=0.0), "'speed': 0 samples/s lies outside [1e-09, 1e+09]"),
        *((SiloFacts(1, declared_speed=speed), "'speed'") for speed in (float("nan"), 5e-324)),
        (SiloFacts(1, device="x" * 129), "'device': a name of 129 characters, at most 128"),
    ],
)
def test_what_no_silo_can_be_is_refused(facts: SiloFacts, told: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        check_facts("a", facts)
    assert str(caught.value).startswith(f"silo 'a' failed the check {told}")


def test_a_silo_may_be_as_large_as_one_can_be() -> None:
    check_facts("a", SiloFacts(10**9, 10**15, 1e9, "x" * 128))
    check_facts("a", SiloFacts(1, 1, 1e-9))


@pytest.mark.parametrize("weight", ["examples", "samples", "silo"])
@pytest.mark.parametrize("balancer", [None, ProportionalBalancer(), EqualisingBalancer()])
def test_what_silos_may_say_at_most_ends_no_run(weight: Share, balancer: Balancer | None) -> None:
    """The largest and the smallest silo that there may be, and one that says more and is not there."""
    huge, tiny = SiloFacts(10**9, 10**15, 1e9), SiloFacts(1, 1, 1e-9)
    rules = policies(weigher=WeightedMean(weight), sizing=Sizing(LocalWork(4, 8, 0.1), balancer))
    coordinator = Coordinator(rules)
    events: list[Event] = [SiloJoined(0.0, name, facts) for name, facts in [("a", huge), ("b", tiny)]]
    entry = coordinator.handle([*events, SiloJoined(0.0, "c", SiloFacts(10**30))], 0.0)
    for round in range(3):
        work = orders(entry)
        assert set(work) == {"a", "b"} and sum(order.batch_size for order in work.values()) <= 16
        came = [answer(name, order, round + 1.0) for name, order in work.items()]
        sizes = {"a": 10**9, "b": 1}
        came = [replace(each, meta=replace(each.meta, examples=sizes[each.meta.silo])) for each in came]
        entry = coordinator.handle(came, round + 1.0)
        (commit,) = of_type(entry, Commit)
        assert all(0 < share < 1 for share in commit.weights.values())


@pytest.mark.parametrize("speed", [0.0, -1.0, 5e-324, 0.9e-9, 1.0000001e9, float("nan"), float("inf")])
def test_speeds_that_no_machine_has(speed: float) -> None:
    with pytest.raises(ProtocolError, match="'speed'"):
        check_speed("a", speed)


@pytest.mark.parametrize(
    "evaluation",
    [
        Evaluation(float("nan"), 0.0, 1),
        Evaluation(0.0, float("inf"), 1),
        Evaluation(0.0, 0.0, -1),
        Evaluation(0.0, float("nan"), 1),
        Evaluation(0.0, 1.1e7, 10),
        Evaluation(0.0, 0.5, 0),
        Evaluation(0.0, 1.0, 10**9 + 1),
        Evaluation(1e300, 1.0, 100),
        Evaluation(-1.1e31, 1.0, 10),
        Evaluation(0.0, -1e300, 100),
        Evaluation(0.0, 0.5, 1, {"eval_auc": (float("nan"), 1)}),
        Evaluation(0.0, 0.5, 1, {"eval_auc": (1e300, 1)}),
        Evaluation(0.0, 0.5, 1, {"eval_auc": (0.5, 0)}),
        Evaluation(0.0, 0.5, 1, {"eval_auc": (0.5, 10**9 + 1)}),
        Evaluation(0.0, 0.5, 1, {"Eval auc": (0.5, 1)}),
        Evaluation(0.0, 0.5, 1, {f"eval_{number}": (0.5, 1) for number in range(33)}),
        Evaluation(0.0, 0.5, 1, gains={"theirs": {"auroc": (0.0, 0.1)}}),
        Evaluation(0.0, 0.5, 1, gains={"last": {"auroc": (0.2, 0.1)}}),
        Evaluation(0.0, 0.5, 1, gains={"last": {"auroc": (float("nan"), 0.1)}}),
        Evaluation(0.0, 0.5, 1, gains={"last": {"auroc": (0.0, 1e300)}}),
        Evaluation(0.0, 0.5, 1, gains={"last": {"AU ROC": (0.0, 0.1)}}),
        Evaluation(0.0, 0.5, 1, gains={"last": {f"m{number}": (0.0, 0.1) for number in range(33)}}),
    ],
)
def test_evaluations_that_poison_a_mean(evaluation: Evaluation) -> None:
    with pytest.raises(ProtocolError, match="'evaluation'"):
        check_evaluation("a", evaluation)
    assert usable("a", evaluation) is None


def test_a_score_may_be_negative_and_perfect_but_not_more() -> None:
    squared = Evaluation(1e12, -1e12, 10)  # errors of prices, before any training
    for evaluation in (Evaluation(5.0, -30.0, 10), Evaluation(-25.0, 25.0, 10), squared, Evaluation(0.0, 0.0, 0)):
        assert usable("a", evaluation) is evaluation
    assert usable("a", None) is None


HISTOGRAM = (1.0,) * 512
BLOCKS = (1.0, 0.5) * 16


@pytest.mark.parametrize(
    "sums",
    [
        {"scores/256": (-1.0, *HISTOGRAM[1:])},
        {"scores/256": (0.5, *HISTOGRAM[1:])},
        {"scores/256": (float("nan"), *HISTOGRAM[1:])},
        {"scores/256": (1e308, *HISTOGRAM[1:])},
        {"scores/256": (2e15, *HISTOGRAM[1:])},
        {"scores/256": HISTOGRAM[1:]},
        {"scores/256": (1.0,) * 10**6},
        {"scores/256": ()},
        {"scores/128": HISTOGRAM[:256]},
        {"scores/256": HISTOGRAM, "other/1": (1.0,)},
        {f"scores/{number}": HISTOGRAM for number in range(17)},
        {"dice/16": (1.0, float("inf")) * 16},
        {"dice/16": (1.0, 1e46) * 16},
        {"dice/16": (-1.0, 1.0) * 16},
        {"dice/16": (0.5, 1.0) * 16},
    ],
)
def test_sums_that_no_samples_come_to_are_refused(sums: dict[str, tuple[float, ...]]) -> None:
    known = statistics_of((shipped("auroc", 2), Mean("dice", BlockSums("dice"))))
    fine = Evaluation(1.0, 1.0, 2, sums={"scores/256": HISTOGRAM, "dice/16": BLOCKS})
    check_evaluation("a", fine, known)
    with pytest.raises(ProtocolError, match="statistics"):
        check_evaluation("a", replace(fine, sums=sums), known)
    assert usable("a", replace(fine, sums=sums), known) is None


def test_sums_that_nobody_knows_are_bounded_all_the_same() -> None:
    check_evaluation("a", Evaluation(1.0, 1.0, 2, sums={"mine": (0.5,)}))
    for sums, problem in (({"mine": (1.0,) * 10**6}, "entries"), ({"mine": (float("nan"),)}, "'mine': .*not finite")):
        with pytest.raises(ProtocolError, match=f"statistics.*{problem}"):
            check_evaluation("a", Evaluation(1.0, 1.0, 2, sums=sums))
