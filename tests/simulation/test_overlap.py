"""Orders queued at silos that really train: in the clear, as differences, encrypted, with own progress carried on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsync.common.errors import ProtocolError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import Cursor, WorkOrder, WorkReport
from fedsync.observe.replay import read_ledger
from fedsync.silo.protocol import Completed
from fedsync.silo.session.local_carryover import OWN, LocalCarryover
from fedsync.silo.session.order_results import LastOrder
from fedsync.simulation.run import run_virtual

SILOS = ClusterConfig.model_validate(
    {"silos": [{"name": name, "speed": speed, "overhead_s": 0.1} for name, speed in (("a", 90), ("b", 70), ("c", 40))]}
)


def run(out: Path, *overrides: str, barrier: str = "inner: {kind: bsp}", rounds: int = 6) -> list[Any]:
    """Rounds of LB-BSP with an order queued at each silo."""
    sets = ["local.steps=2", "local.batch_size=8", "local.learning_rate=0.01", f"stop={{rounds: {rounds}}}"]
    config = StrategyConfig.load("lb-bsp", [*sets, f"barrier={{kind: overlap, {barrier}}}", *overrides])
    run_virtual(config, SILOS, out)
    return read_ledger(out / "journal.jsonl").rounds


@pytest.mark.slow
@pytest.mark.parametrize(
    "section", ["cipher={kind: pad, bits: 16}", "cipher={kind: pad, bits: 16, metrics: plain}", "wire={down: bf16}"]
)
def test_silos_that_keep_the_model_follow_it_while_an_order_is_queued(
    section: str, tmp_path: Path, models: list[np.ndarray]
) -> None:
    """What an order brings continues the version of the order before it, which the silo has by then."""
    clear = run(tmp_path / "clear")
    found = run(tmp_path / "kept", section)
    assert [row.seconds for row in found] == pytest.approx([row.seconds for row in clear], abs=0.05)
    assert len(models) == 3
    for model in models:
        np.testing.assert_array_equal(model, models[0])
    for row, usual in zip(found, clear, strict=True):
        assert len(row.silos) == 3, "an order was lost"
        assert row.accuracy == (None if usual.accuracy is None else pytest.approx(usual.accuracy, abs=0.02))


def test_the_update_is_a_version_old_and_the_score_is_of_the_version(tmp_path: Path) -> None:
    """With own progress carried on, training begins further on, and what is evaluated is the version in any case.

    The first version is made of the same updates with and without it, so it scores the same.
    """
    plain, carried = run(tmp_path / "plain"), run(tmp_path / "carried", barrier="carry: 1.0, inner: {kind: bsp}")
    assert carried[0].accuracy == plain[0].accuracy is not None
    assert carried[0].loss == plain[0].loss, "the first order has nothing to carry on"
    assert carried[1].loss is not None and plain[1].loss is not None
    assert carried[1].loss < plain[1].loss, "the second order of a silo goes on where its first has ended"


REPORT = WorkReport(0, 4, 32, 1.0, None)
MODEL, UPDATE = np.array([1.0, 2.0], np.float32), np.array([4.0, -8.0], np.float32)


def order(name: str, behind: str = "", carry: float = 0.25) -> WorkOrder:
    return WorkOrder(name, 0, 1, 8, 4, 0.1, 1, behind=behind, carry=carry)


@pytest.mark.parametrize("sent_as_it_is", [True, False])
def test_a_queued_order_begins_with_a_share_of_the_update_before_it(sent_as_it_is: bool) -> None:
    progress, update = LocalCarryover(sent_as_it_is=sent_as_it_is), UPDATE.copy()
    beside = progress.beside(order("a/1"), update)
    assert (beside[OWN] is update) == sent_as_it_is
    if not sent_as_it_is:
        update[:] = np.nan  # its memory is used again for what travels
    progress.done(LastOrder(order("a/1"), Completed(REPORT, update), Cursor(), beside))
    np.testing.assert_array_equal(progress.start(order("a/2", behind="a/1"), MODEL), [2.0, 0.0])
    np.testing.assert_array_equal(progress.start(order("a/2", behind="a/1", carry=1.0), MODEL), [5.0, -6.0])
    assert progress.start(order("a/2"), MODEL) is MODEL, "its update is in the model"
    assert progress.start(order("a/3", behind="a/2"), MODEL) is MODEL, "the one before it failed"
    np.testing.assert_array_equal(MODEL, [1.0, 2.0])


def test_nothing_is_kept_nor_carried_where_orders_do_not_say_so() -> None:
    progress = LocalCarryover(sent_as_it_is=True)
    beside = progress.beside(order("a/1", carry=0.0), UPDATE)
    progress.done(LastOrder(order("a/1", carry=0.0), Completed(REPORT, UPDATE), Cursor(), beside))
    assert not beside and progress.start(order("a/2", behind="a/1", carry=0.0), MODEL) is MODEL


@pytest.mark.parametrize("carry", [-0.1, 1.1, 1e30])
def test_the_server_cannot_have_more_carried_on_than_there_is(carry: float) -> None:
    with pytest.raises(ProtocolError, match="from 0 to 1"):
        LocalCarryover(sent_as_it_is=True).start(order("a/1", carry=carry), MODEL)
