"""Opaque training functions: they get rows, have no loop over batches, and count as a whole."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsync.client import Silo, SiloApp, Work
from fedsync.client import work as work_module
from fedsync.common.errors import ConfigError
from fedsync.core.orders import Cursor
from fedsync.core.speed.curve import Curve
from fedsync.train.guests.guest import GuestTrainer
from fedsync.train.silo_trainer import Throttle
from tests.client.test_own_loop import OPTIONS, SITE, app_of, plain_sgd, trainer
from tests.train.make import Clock, order


def test_an_opaque_function_gets_rows_and_counts_as_a_whole() -> None:
    app, rows = SiloApp(), []

    @app.setup()
    def setup(silo: Silo) -> Any:
        return silo.use(nn.Linear(2, 1), range(100))

    @app.train(opaque=True)
    def fit(work: Work, model: nn.Linear) -> None:
        rows.extend(work.rows.tolist())
        with torch.no_grad():
            model.bias += 1.0

    guest = GuestTrainer(app, SITE, OPTIONS)
    outcome = guest.run(order(batch_size=8, max_steps=5, budget_s=1e-9), guest.initial_model(), Cursor())
    assert sorted(set(rows)) == sorted(rows) and len(rows) == 40
    assert (outcome.report.steps, outcome.report.samples, outcome.cursor.position) == (5, 40, 40)
    assert outcome.update.tolist() == [0.0, 0.0, 1.0]


def test_an_opaque_function_takes_the_time_of_the_machine_that_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    app, clock = SiloApp(), Clock(monkeypatch, step_s=0.0)
    app.setup()(lambda silo: silo.use(nn.Linear(2, 1), range(100)))
    app.train(opaque=True)(lambda work: None)
    guest = GuestTrainer(app, SITE, OPTIONS)
    throttle = Throttle(Curve(speed=100.0), fastest_ratio=1.0)
    report = guest.run(order(batch_size=8, max_steps=5), guest.initial_model(), Cursor(), throttle=throttle).report
    assert report.compute_s == pytest.approx(40 / 100)
    assert clock.slept_s == [pytest.approx(0.4)]


def test_an_opaque_function_sees_its_time_go_and_has_no_loop_over_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that ended early counted as all steps of the order."""
    app, clock, left = app_of(plain_sgd), Clock(monkeypatch, step_s=0.0), []
    monkeypatch.setattr(work_module, "perf_counter", lambda: clock.now_s)
    app.opaque = True
    with pytest.raises(ConfigError, match=r"second loop over batches.*without opaque=True"):
        GuestTrainer(app, SITE, OPTIONS).run(order(), np.zeros(58, np.float32), Cursor())

    def whole(work: Work) -> None:
        clock.now_s += 2.0
        with work.untimed():
            clock.now_s += 3.0
        left.append(work.deadline)

    guest = trainer(whole)
    guest._app.opaque = True
    report = guest.run(order(budget_s=9.0), guest.initial_model(), Cursor()).report
    assert left == [pytest.approx(4.0)] and report.compute_s == pytest.approx(2.0)
