"""What an update loses on the wire is part of a silo's exactly-once state."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from fedsync.common.errors import ConfigError
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import WorkOrder
from fedsync.model.transfer import OtherVersion, Payload
from fedsync.silo.protocol import Identity
from fedsync.silo.session import current_order
from fedsync.silo.session.session import SiloSession

FULL = ConfigError("answer.bin", "the disk is full", "Make room")
ORDERS = [WorkOrder(f"a/{number}", 0, number, 8, 2, 0.1, seed=number, evaluate=False) for number in (1, 2, 3)]


def session(folder: Path, wire: str = "{up: int8, top_k: 0.1}") -> SiloSession:
    config = StrategyConfig.load("fedavg", [f"wire={wire}"])
    spec = RunSpec(seed=7, silos=2, task=config.task, local=config.local, wire=config.wire)
    folder.mkdir(exist_ok=True)
    return SiloSession(Identity(spec.dump(), 0, "a"), spec, folder=folder)


@pytest.fixture
def base(tmp_path: Path) -> Payload:
    return session(tmp_path / "first").initial_model()


def test_a_trainer_that_died_goes_on_with_what_was_owed_before(
    tmp_path: Path, base: Payload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second order was trained and not saved: done again, by another process, it has the same bytes."""
    calm, shaken = session(tmp_path / "calm"), session(tmp_path / "shaken")
    expected = [calm.train(order, base).update for order in ORDERS]
    shaken.train(ORDERS[0], base)
    with monkeypatch.context() as full:
        full.setattr(current_order.LastOrder, "save", Mock(side_effect=FULL))
        with pytest.raises(ConfigError, match="full"):
            shaken.train(ORDERS[1], base)
    np.testing.assert_array_equal(shaken.train(ORDERS[1], base).update, expected[1])
    again = session(tmp_path / "shaken")
    np.testing.assert_array_equal(again.train(ORDERS[2], base).update, expected[2])
    fresh = session(tmp_path / "fresh")
    assert not np.array_equal(fresh.train(ORDERS[2], base).update, expected[2])


def test_a_restarted_trainer_says_that_it_holds_no_model(tmp_path: Path, base: Payload) -> None:
    wire = "{down: int8}"
    whole = np.concatenate([np.array([-1, 0], np.int64).view(np.uint8), base.view(np.uint8)])
    nothing_new = np.array([0, 0], np.int64).view(np.uint8)
    silo = session(tmp_path / "a", wire)
    assert silo.replica.holds == -1
    done = silo.train(ORDERS[0], whole)
    assert silo.replica.holds == 0
    assert done.update.dtype == np.float32, "up as ever"
    again = session(tmp_path / "a", wire)
    assert again.replica.holds == -1
    with pytest.raises(OtherVersion):
        again.train(ORDERS[1], nothing_new)
    expected = silo.train(ORDERS[1], nothing_new)
    np.testing.assert_array_equal(again.train(replace(ORDERS[1]), whole).update, expected.update)


def test_a_trainer_whose_table_has_other_columns_than_before_does_not_go_on(tmp_path: Path) -> None:
    """The server compares columns at the beginning; then another column would be trained in the place of the first."""
    table, task = tmp_path / "a.csv", f"task={{kind: csv, files: [{tmp_path}/a.csv], target: ill}}"
    config = StrategyConfig.load("fedavg", [task])
    spec = RunSpec(seed=7, silos=1, task=config.task, local=config.local)

    def begun(name: str, rows: int) -> SiloSession:
        table.write_text(f"{name},ill\n" + "".join(f"{row / 7:.3f},{row % 2}\n" for row in range(rows)))
        return SiloSession(Identity(spec.dump(), 0, "a"), spec, folder=tmp_path)

    first = begun("chol", 40)
    first.train(ORDERS[0], first.initial_model())
    assert begun("chol", 30).last is not None, "rows may change"
    with pytest.raises(ConfigError, match=r"the columns of its table, .* are not those of its last order"):
        begun("weight", 40)
