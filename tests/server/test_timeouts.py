"""How long the driver waits, by a clock that moves when silos answer."""

import logging
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest
from flwr.app import Context, Message

from fedsync.common.errors import RunError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.sections.strategy_sections import WaitingConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.events import Spare
from fedsync.flower.flower_strategy import FedSync
from fedsync.server import driver
from fedsync.server.timeouts import IdleTimeout, IdleTraining, Timeouts
from fedsync.silo.protocol import Collect, InProgress, Train
from tests.flower.grid import DirectGrid, asked, honest, saying

pytestmark = pytest.mark.usefixtures("silos_here")

SILENCE_S, ANSWER_S = 15.0, 10.0
CLUSTER = ClusterConfig.model_validate({"silos": [{"name": "a", "speed": 1e6}]})


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(driver, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep))
    return clock


class Slow:
    """A silo that takes its time, and says every ten seconds how far it is."""

    def __init__(self, clock: Clock, done: list[int]) -> None:
        self._clock = clock
        self._done = iter(done)
        self._update: Message | None = None

    def __call__(self, message: Message, context: Context) -> Message | None:
        if not isinstance(asked(message), Train | Collect):
            return honest(message, context)
        if isinstance(asked(message), Train):
            self._update = honest(message, context)
        self._clock.now_s += ANSWER_S
        steps = next(self._done, None)
        if steps is not None:
            return saying(message, InProgress(steps, steps * 8))
        assert self._update is not None
        return Message(self._update.content, reply_to=message)


def run(tmp_path: Path, clock: Clock, done: list[int], timing: Timeouts) -> str:
    config = StrategyConfig.load(
        "fedavg", ["task={kind: digits}", "local={steps: 20, batch_size: 8}", "stop={rounds: 1}", "min_silos=1"]
    )
    FedSync(config, CLUSTER, out=tmp_path, timing=timing).start(DirectGrid(1, {1: Slow(clock, done)}))
    return (tmp_path / "journal.jsonl").read_text()


def test_an_order_may_take_long_as_long_as_steps_are_done(tmp_path: Path, clock: Clock) -> None:
    journal = run(tmp_path, clock, list(range(1, 11)), Timeouts(order_timeout_s=SILENCE_S))
    assert clock.now_s > 10 * ANSWER_S
    assert "WorkFailed" not in journal
    assert journal.count('"type":"Progressed"') == 10


def test_an_order_that_does_not_get_on_has_failed(tmp_path: Path, clock: Clock) -> None:
    journal = run(tmp_path, clock, [1, 2, 2, 2], Timeouts(order_timeout_s=SILENCE_S))
    assert "no answer in 15 s; raise waiting.silence_s" in journal
    assert journal.count('"type":"WorkFailed"') == 1


def test_an_order_that_gets_on_for_ever_has_failed(tmp_path: Path, clock: Clock) -> None:
    timing = Timeouts(order_timeout_s=SILENCE_S, order_limit_s=35.0)
    journal = run(tmp_path, clock, list(range(1, 5)), timing)
    assert "no update in 35 s, which waiting.order_s allows" in journal
    assert journal.count('"type":"WorkFailed"') == 1


def test_a_strategy_says_how_long() -> None:
    assert Timeouts.of(WaitingConfig(), supervised=False) == Timeouts()
    assert Timeouts.of(WaitingConfig(), supervised=True) == Timeouts(join_timeout_s=inf)
    said = WaitingConfig(silence_s=60.0, order_s=600.0, idle_s=30.0)
    expected = Timeouts(order_timeout_s=60.0, order_limit_s=600.0, join_timeout_s=30.0)
    assert Timeouts.of(said, supervised=False) == Timeouts.of(said, supervised=True) == expected


def test_a_vigil_ends_when_there_is_nothing_to_do_for_too_long() -> None:
    vigil = IdleTimeout(30.0, 0.0)
    vigil.check(30.0, ["a"])
    vigil.wake(31.0)
    vigil.check(61.0, ["a"])
    with pytest.raises(RunError, match=r"nothing to do for 30 s; silos here: a, b\. .* raise waiting\.idle_s"):
        vigil.check(61.5, ["b", "a"])


def test_a_vigil_without_end_says_once_a_minute_what_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    vigil = IdleTimeout(inf, 0.0)
    with caplog.at_level(logging.WARNING):
        for second in range(181):
            vigil.check(float(second), [])
    assert [record.getMessage() for record in caplog.records] == [
        f"nothing to do for {minutes * 60} s; silos here: none" for minutes in (1, 2, 3)
    ]


def test_epochs_follow_what_the_last_pause_took() -> None:
    spare = IdleTraining(0.05)
    told = []
    for epoch_s in (0.001, 0.001, 0.001, 0.05, 0.05):
        (event,) = spare.events(1.0)
        assert isinstance(event, Spare)
        told.append(event.epochs)
        spare.measure([event], event.epochs * epoch_s)
    # Twice as many while there is room; 8 at 50 ms are eight times too many: 1; that just fits.
    assert told == [1, 2, 4, 8, 1]


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_the_number_stays_within_reason(seconds: float) -> None:
    spare = IdleTraining(0.05)
    for _ in range(50):
        events = spare.events(1.0)
        spare.measure(events, seconds)
    (event,) = spare.events(1.0)
    assert isinstance(event, Spare)
    assert event.epochs == (10_000 if seconds == 0.0 else 1)


def test_an_order_has_failed_at_its_limit_however_long_silence_may_last() -> None:
    assert Timeouts(order_timeout_s=10.0, order_limit_s=4.0).order_until(1.0) == (5.0, 5.0)
    assert Timeouts(order_timeout_s=10.0, order_limit_s=40.0).order_until(1.0) == (11.0, 41.0)
