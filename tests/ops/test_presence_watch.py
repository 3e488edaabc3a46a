"""When a silo comes and leaves by its owner's window, and that it takes no order outside of it."""

import sys
import threading
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest

from fedsync.common.errors import SiloAway
from fedsync.common.locks import wait_until
from fedsync.config.sections.presence import PresenceConfig
from fedsync.config.silo_start import LogsConfig, SiloStartConfig
from fedsync.core.orders import WorkOrder
from fedsync.ops.owner_window import SETTLE_S, PresenceWatch
from fedsync.ops.supervisor import Program, supervise
from fedsync.silo.owner import owner_policy
from fedsync.silo.owner.owner_policy import OwnerPolicy

CLOSED = datetime(2026, 1, 11, 6, tzinfo=UTC)
WINDOW = PresenceConfig(begin="22:00", until="06:00", zone="UTC", grace_s=100.0)


class World:
    """A clock, and whether an order is in work."""

    def __init__(self) -> None:
        self.at_s, self.working = -3600.0, True
        self.watch = PresenceWatch(WINDOW, lambda: self.working, self.now, lambda: self.at_s)

    def now(self) -> datetime:
        return CLOSED + timedelta(seconds=self.at_s)

    def here(self, at_s: float) -> bool:
        self.at_s = at_s
        return self.watch.should_run()


def test_an_order_in_work_is_finished_and_then_the_silo_leaves() -> None:
    world = World()
    assert world.here(-3600.0) and world.here(-0.1) and world.here(0.0) and world.here(50.0)
    world.working = False
    assert world.here(50.0 + SETTLE_S - 1), "its update is on its way"
    assert not world.here(50.0 + SETTLE_S)
    assert world.watch.told() == {"presence": {"next": "2026-01-11T22:00:00+00:00"}}
    assert world.here(16 * 3600.0), "it comes back"
    assert world.watch.told() == {"presence": {"until": "2026-01-12T06:00:00+00:00"}}


def test_what_outlasts_the_grace_is_given_up() -> None:
    world = World()
    assert world.here(-1.0) and world.here(0.0) and world.here(99.9)
    assert not world.here(100.0)
    world.working = False
    assert not world.here(101.0)


def test_a_silo_that_is_started_outside_does_not_come_and_one_without_a_window_always() -> None:
    world = World()
    assert not world.here(1.0)
    always = PresenceWatch(None, lambda: False)
    assert always.should_run() and always.told() == {}


def test_the_trainer_takes_no_order_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SiloStartConfig(name="a", server="b:1", insecure=True, state="/s", presence=WINDOW)
    owner = OwnerPolicy.of(config).model_copy(update={"counts": None})
    owner = OwnerPolicy.model_validate_json(owner.model_dump_json())  # as it goes to the trainer
    order = WorkOrder("a/1", 0, 1, 8, 2, 0.1, seed=1)
    monkeypatch.setattr(owner_policy, "utc_now", lambda: CLOSED - timedelta(seconds=1))
    owner.begin(order)
    monkeypatch.setattr(owner_policy, "utc_now", lambda: CLOSED)
    with pytest.raises(SiloAway, match=r"presence: this silo takes no orders for 57600 s"):
        owner.begin(order)


def test_the_supervisor_ends_what_runs_while_the_silo_is_away_and_starts_it_again(tmp_path: Path) -> None:
    starts, stop, away = tmp_path / "starts", threading.Event(), threading.Event()
    ends = tmp_path / "ends"
    code = (
        "import signal, sys, time\n"
        f"signal.signal(15, lambda *_: (open({str(ends)!r}, 'a').write('x'), sys.exit(0)))\n"
        f"open({str(starts)!r}, 'a').write('x')\ntime.sleep(600)"
    )
    left: list[str] = []

    until = partial(wait_until, most_s=10, pause_s=0.02)

    def drive() -> None:
        until(lambda: starts.exists() and starts.read_text() == "x")
        away.set()
        until(lambda: bool(left))
        away.clear()
        until(lambda: starts.read_text() == "xx")
        stop.set()

    driver = threading.Thread(target=drive, daemon=True)
    driver.start()
    supervise(
        [Program("silo", [sys.executable, "-c", code])], {}, tmp_path, LogsConfig(), {}, stop,
        here=lambda: not away.is_set(), leave=lambda: left.append(ends.read_text()),
    )  # fmt: skip
    driver.join(10)
    assert left == ["x"], "it was told to end, and had ended, once"
