"""What is refused is said to the letter: who sent it, which check it failed, and what was found."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedsync.common.errors import ProtocolError
from fedsync.core.orders import Evaluation, SiloFacts, WorkOrder, WorkReport
from fedsync.core.orders import Window as Seen
from fedsync.core.report_checks import check_facts, check_report, check_sealed, sound
from fedsync.model.plain_aggregator import PlainAggregator
from fedsync.model.plain_replica import PlainReplica
from tests.core.make import answer, begin

ORDER = WorkOrder("a/1", 3, 1, batch_size=8, max_steps=4, learning_rate=0.1, seed=1)


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
        ({"windows": (Seen(1.0),) * 65}, "'windows': 65 windows, at most 64"),
        ({"windows": (Seen(2e9),)}, "'speed': 2e+09 samples/s lies outside [1e-09, 1e+09]"),
        ({"windows": (Seen(1.0, 1.5),)}, "'resources': Window(speed=1.0, cpu=1.5, memory=None)"),
        ({"windows": (Seen(1.0, None, -0.5),)}, "'resources': Window(speed=1.0, cpu=None, memory=-0.5)"),
        ({"metrics": {f"x{number}": 0.0 for number in range(33)}}, "'metrics': 33 metrics, at most 32"),
        ({"metrics": {"Energy": 1.0}}, "'metrics': 'Energy' = 1.0"),
        ({"batch_cap": 0}, "'batch cap': 0"),
    ],
)
def test_a_report_that_cannot_be(changes: dict[str, Any], told: str) -> None:
    event = answer("a", ORDER, **changes)
    with pytest.raises(ProtocolError) as caught:
        check_report("a", ORDER, event.meta, event.report)
    assert str(caught.value) == f"silo 'a' failed the check {told}"
    assert not sound(ORDER, event.meta, event.report)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"steps": 3}, "report and update disagree"),
        ({"samples": 3}, "report and update disagree"),
        ({"examples": 0}, "0 examples, 40 bytes"),
        ({"nbytes": -1}, "1000 examples, -1 bytes"),
    ],
)
def test_an_update_that_cannot_be(changes: dict[str, Any], told: str) -> None:
    event = answer("a", ORDER)
    with pytest.raises(ProtocolError) as caught:
        check_report("a", ORDER, replace(event.meta, **changes), event.report)
    assert str(caught.value) == f"silo 'a' failed the check 'meta': {told}"


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        (SiloFacts(0), "'examples': 0 training samples, at most 1000000000"),
        (SiloFacts(1, memory_samples=0), "'memory': memory for 0 samples"),
        (SiloFacts(1, declared_speed=0.0), "'speed': 0 samples/s lies outside [1e-09, 1e+09]"),
        (SiloFacts(1, device="x" * 129), "'device': a name of 129 characters, at most 128"),
    ],
)
def test_a_silo_that_cannot_be(facts: SiloFacts, told: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        check_facts("a", facts)
    assert str(caught.value) == f"silo 'a' failed the check {told}"


@pytest.mark.parametrize(
    "own", [{"loss": 1.0}, {"evaluation": Evaluation(1.0, 1.0, 1)}, {"metrics": {"energy_j": 1.0}}]
)
def test_figures_of_its_own_where_they_are_sealed(own: dict[str, Any]) -> None:
    """What they are is not said: it would be written down."""
    sealed: WorkReport = answer("a", ORDER, loss=None).report
    check_sealed("a", sealed)
    with pytest.raises(ProtocolError) as caught:
        check_sealed("a", replace(sealed, **own))
    assert (
        str(caught.value)
        == "silo 'a' failed the check 'metrics': it sends unencrypted metrics, which this run encrypts"
    )


def test_a_snapshot_that_nobody_asked_for() -> None:
    with pytest.raises(ProtocolError) as caught:
        PlainAggregator(np.zeros(1, dtype=np.float32)).put_snapshot("a", 1, np.zeros(1, dtype=np.float32))
    assert str(caught.value) == "silo 'a' failed the check 'snapshot': none was requested"


@pytest.mark.parametrize(
    ("coefficients", "told"),
    [
        ((1.0, 2.0), "the weigher gives 1 updates 2 coefficients"),
        ((float("nan"),), "the weigher gives 'a/1' the coefficient nan"),
        ((0.0,), "the weigher gives 'a/1' the coefficient 0.0"),
        ((-1.0,), "the weigher gives 'a/1' the coefficient -1.0"),
        ((float("inf"),), "the weigher gives 'a/1' the coefficient inf"),
    ],
)
def test_a_weigher_that_breaks_its_contract(coefficients: tuple[float, ...], told: str) -> None:
    class Odd:
        weighting = None
        toward = False

        def coefficients(self, metas: Any, version: int) -> tuple[float, ...]:
            return coefficients

    coordinator, orders = begin("a", weigher=Odd())
    with pytest.raises(Exception, match="bug in your policy") as caught:
        coordinator.handle([answer("a", orders["a"])], 1.0)
    assert str(caught.value).startswith(
        f"{told}. This is a bug in your policy or, without one, in FedSync; the last entries were:\n  JournalEntry("
    )


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda silo: silo.model, "a silo that keeps no model is asked for it"),
        (lambda silo: silo.snapshot(), "a silo that keeps no model is asked for it"),
        (
            lambda silo: silo.answer(np.zeros(1)),
            "the server failed the check 'question': asked about masks in an unencrypted run",
        ),
    ],
)
def test_a_silo_in_the_clear_is_asked_what_it_has_not(ask: Callable[[PlainReplica], object], told: str) -> None:
    with pytest.raises(Exception, match="asked") as caught:
        ask(PlainReplica(1))
    assert str(caught.value) == told
