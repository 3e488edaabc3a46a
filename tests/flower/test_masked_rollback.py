"""A rollback right behind a masked sum, which silos have yet to open."""

from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, Message

from fedsync.config.strategy import StrategyConfig
from fedsync.core.journal import JOURNAL
from fedsync.silo.owner.key_lookup import KEYS, emulated_rings
from fedsync.silo.protocol import Question
from tests.flower.cut_off_runs import QUICK, SILOS, Killed, strategy_in
from tests.flower.grid import DirectGrid, asked, honest, trainers

pytestmark = [pytest.mark.usefixtures("silos_here"), pytest.mark.slow]

GIVEN = [
    "cipher={kind: masked, inner: {kind: bfv, metrics: plain}}",
    "barrier={kind: fsp, late: drop, interval: {kind: linear, interval_s: 0.2}}",
    "aggregation={kind: fednova}",
    "stop.rounds=5",
]


def _keys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rings = emulated_rings(StrategyConfig.load("fedavg", [*QUICK, *GIVEN]), SILOS, folder)
    assert rings is not None
    monkeypatch.setenv(KEYS, str(rings[0]))
    return rings[1]


def _models(version: int) -> list[np.ndarray]:
    replicas = [trainer._session.replica for trainer in trainers.values()]
    assert [replica.holds for replica in replicas] == [version] * 3
    return [replica.model for replica in replicas]


def test_the_rollback_waits_for_the_sum_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first trial has three rounds from version 0; version 3 is a masked sum, and version 4 takes all three back.

    In one decision the server commits version 3 and goes back, while silos still open the sum.
    """
    run = strategy_in(tmp_path / "run", *GIVEN, keys=_keys(tmp_path, monkeypatch))
    run.start(DirectGrid(3))
    assert '"Rollback"' in (tmp_path / "run" / JOURNAL).read_text()
    assert run.run_summary is not None
    assert (run.run_summary["rounds"], run.run_summary["lost"]) == (5, [])
    first, *others = _models(6)  # five rounds and a rollback
    for model in others:
        np.testing.assert_array_equal(model, first)


def test_a_server_that_dies_before_the_sum_is_open_still_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, keys = tmp_path / "run", _keys(tmp_path, monkeypatch)

    def dies(message: Message, context: Context) -> Message | None:
        if isinstance(asked(message), Question) and '"Rollback"' in (out / JOURNAL).read_text():
            raise Killed
        return honest(message, context)

    with pytest.raises(Killed):
        strategy_in(out, *GIVEN, keys=keys).start(DirectGrid(3, {1: dies}))
    run = strategy_in(out, *GIVEN, keys=keys, resume=True)
    run.start(DirectGrid(3))
    assert run.run_summary is not None and run.run_summary["lost"] == []
    first, *others = _models(7)  # the round after the rollback was cut off, and begins with another rollback
    for model in others:
        np.testing.assert_array_equal(model, first)
