"""What is refused is said to the letter: who sent it, which check it failed, and what was found."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedsync.common.codec import dumps
from fedsync.common.errors import ProtocolError
from fedsync.core.orders import Evaluation, WorkOrder, WorkReport
from fedsync.core.report_checks import check_sealed
from fedsync.core.views import ClusterView, Verdict
from fedsync.model.plain_aggregator import PlainAggregator
from fedsync.model.plain_replica import PlainReplica
from tests.core.make import answer, begin

ORDER = WorkOrder("a/1", 3, 1, batch_size=8, max_steps=4, learning_rate=0.1, seed=1)


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


def test_numbers_of_numpy_are_written_as_plain_numbers() -> None:
    class InNumpy:
        weighting = None
        toward = False

        def coefficients(self, metas: Any, version: int) -> Any:
            return np.ones(1, np.float32)

        def init(self) -> None: ...

        def decide(self, state: None, view: ClusterView) -> tuple[None, Verdict]:
            return None, Verdict(commit=tuple(view.pending), release=view.idle, steps={"a": np.int64(3)})  # type: ignore[dict-item]

    coordinator, orders = begin("a", weigher=InNumpy(), barrier=InNumpy())
    assert '"max_steps":3' in dumps(orders["a"])
    assert '"weights":{"a/1":1.0}' in dumps(coordinator.handle([answer("a", orders["a"])], 1.0))


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
