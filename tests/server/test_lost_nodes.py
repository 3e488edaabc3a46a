"""Runs whose nodes vanish, are away for a while, or are started again."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from fedsync.core.coordinator import Coordinator
from fedsync.server.checkpoints import Checkpoints
from fedsync.server.timeouts import Timeouts
from fedsync.silo.protocol import Request, Train
from tests.flower.grid import DirectGrid, unless
from tests.server.test_driver import fed_sync

pytestmark = pytest.mark.usefixtures("silos_here")


def test_a_silo_whose_node_is_away_for_a_while_still_gets_its_baseline(tmp_path: Path) -> None:
    """Node 2 vanishes while orders are sent, between two checks for lost nodes, and is back two orders later."""
    grid = DirectGrid(3)
    apart: list[int] = []

    def first(request: Request) -> None:
        if isinstance(request, Train) and request.order.apart:
            apart.append(request.order.after)
            if len(apart) == 1:
                grid.nodes.remove(2)
            elif len(apart) == 3:
                grid.nodes.add(2)
                grid.starts[2] += 1
            elif len(apart) > 3:
                time.sleep(0.1)  # others train for as long as the silo needs to join

    grid.answers[1] = unless(first)
    timing = Timeouts(poll_s=0.001, look_s=0.2, order_timeout_s=20, join_timeout_s=60)
    overrides = ["stop.rounds=12", "evaluation.cross_site={local: true, fine_tune: 0}"]
    fed_sync(tmp_path, *overrides, timing=timing).start(grid)
    assert apart == list(range(12))
    failed = [line for line in (tmp_path / "journal.jsonl").read_text().splitlines() if '"WorkFailed"' in line]
    assert len(failed) == 1, "the order that could not be sent"
    models = json.loads((tmp_path / "cross_site.json").read_text())["models"]
    assert [each["silo"] for each in models if each.get("silo")] == ["a", "b", "c"]


def test_silos_that_are_lost_together_cost_no_checkpoint_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of 4,000 silos takes most of a second, and a region of 1,000 of them may go at once."""
    grid, saved = DirectGrid(3), list[int]()
    save = Checkpoints.save

    def counting(self: Checkpoints, coordinator: Coordinator, *given: Any) -> None:
        saved.append(coordinator.version)
        save(self, coordinator, *given)

    def leave_in_round_two(request: Request) -> None:
        if isinstance(request, Train) and request.order.base_version == 1:
            grid.nodes -= {2, 3}

    monkeypatch.setattr(Checkpoints, "save", counting)
    grid.answers[1] = unless(leave_in_round_two)
    fed_sync(tmp_path).start(grid)
    assert (tmp_path / "journal.jsonl").read_text().count("its node is gone") == 2
    assert saved == [0, 0, 1, 2, 3], "at the beginning, at the first order, and of each version"


def test_what_a_node_was_sent_before_it_was_started_again_is_not_waited_for(tmp_path: Path) -> None:
    grid, orders = DirectGrid(3), 0

    def is_started_again_in_round_two(request: Request) -> bool:
        nonlocal orders
        orders += isinstance(request, Train)
        if lost := isinstance(request, Train) and orders == 2:
            grid.starts[1] += 1
        return lost

    grid.answers[1] = unless(is_started_again_in_round_two)
    fed_sync(tmp_path).start(grid)
    journal = (tmp_path / "journal.jsonl").read_text()
    assert journal.count('"type":"SiloLost"') == 1
    assert "no answer in" not in journal
