import pytest

from fedsync.core.orders import Cursor
from fedsync.core.speed.curve import Curve
from fedsync.train.silo_trainer import Throttle
from tests.train.make import Clock, order, trainer


@pytest.mark.parametrize(
    ("batch_size", "raw_s", "expected"),
    [
        (10, 0.02, 0.08),  # the curve's 10 / 100 s, less what the step took
        (10, 0.06, 0.06),  # too slow a machine: twice 0.06 s is more than the curve's 0.1
        (5, 0.05, 0.05),  # and at 5 samples too
        (10, 0.0, 0.1),
    ],
)
def test_sleep_by_hand(batch_size: int, raw_s: float, expected: float) -> None:
    throttle = Throttle(Curve(speed=100.0), fastest_ratio=2.0)
    assert throttle.sleep_s(batch_size, raw_s) == pytest.approx(expected)
    assert Throttle(Curve(speed=1000.0), fastest_ratio=1.0).sleep_s(10, 0.5) == 0.0, "the fastest never waits"


def test_an_order_takes_what_the_curve_says_though_every_sleep_ends_late(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, step_s=0.01, late_s=0.004)
    throttle = Throttle(Curve(speed=80.0), fastest_ratio=1.0)
    subject = trainer()
    report = subject.run(order(max_steps=50), subject.initial_model(), Cursor(), throttle=throttle).report
    # 50 steps of 8 / 80 s; only the last sleep's delay is left over.
    assert report.compute_s == pytest.approx(50 * 0.1 + 0.004)
    assert clock.slept_s[0] == pytest.approx(0.09)
    assert clock.slept_s[1] == pytest.approx(0.086)
    assert sum(window.speed for window in report.windows) / len(report.windows) == pytest.approx(80, rel=0.01)


def test_a_budget_ends_in_emulated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, step_s=0.01)
    throttle = Throttle(Curve(speed=80.0), fastest_ratio=1.0)
    subject = trainer()
    work = order(max_steps=50, budget_s=0.25)
    report = subject.run(work, subject.initial_model(), Cursor(), throttle=throttle).report
    assert report.steps == 3  # steps end at 0.1, 0.2, 0.3 s
