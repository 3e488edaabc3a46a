"""Rates within an order, against PyTorch's own schedulers; clipping and accumulation, against a bare loop."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsync.core.orders import Cursor
from fedsync.model.layout import Vector
from fedsync.train.batches import Sampler
from fedsync.train.options import LocalOptions, Schedule
from fedsync.train.weights import Weights
from tests.train.make import EXAMPLES, Cramped, TwoClasses, order, slot, trainer

STEPS = 7


def rates(scheduler: type[torch.optim.lr_scheduler.LRScheduler], **options: Any) -> list[float]:
    """Rates of a scheduler of PyTorch's on a rate of 1."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = scheduler(optimizer, **options)
    found = []
    for _ in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_rates_are_pytorchs() -> None:
    cosine = rates(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=STEPS, eta_min=0.1)
    linear = rates(torch.optim.lr_scheduler.LinearLR, start_factor=1.0, end_factor=0.2, total_iters=STEPS)
    assert [Schedule("cosine", end=0.1).factor(step, STEPS) for step in range(STEPS)] == pytest.approx(cosine)
    assert [Schedule("linear", end=0.2).factor(step, STEPS) for step in range(STEPS)] == pytest.approx(linear)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_order_with_a_schedule_in_mixed_precision_is_a_bare_loop(precision: Any) -> None:
    """Also by automatic mixed precision, with an optimizer, clipping and pieces."""
    schedule = Schedule("linear", end=0.25)
    optimizer = {"kind": "adamw", "betas": [0.9, 0.98]}
    options = LocalOptions(optimizer, schedule=schedule, clip_norm=0.1, accumulate=2, device="cpu", precision=precision)
    subject = trainer(options=options)
    base = subject.initial_model()
    expected = _bare(base, precision)
    for _ in range(2):  # it begins anew
        found = subject.run(order(batch_size=8, max_steps=STEPS), base, Cursor()).update
        np.testing.assert_allclose(found, expected - base, rtol=0, atol=1e-6)


def _bare(base: Vector, precision: str) -> Vector:
    model = TwoClasses().model()
    Weights(model).load(base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.25, STEPS)
    inputs, labels = TwoClasses().data(slot()).train.tensors
    rows, _ = Sampler(EXAMPLES, 7, "silo-0").take(Cursor(), STEPS * 8)
    for batch in np.split(rows, STEPS):
        optimizer.zero_grad()
        for half in np.split(batch, 2):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = nn.functional.cross_entropy(model(inputs[half]), labels[half]) / 2
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
    return Weights(model).read()


def test_a_warm_up_climbs_and_the_rest_follows() -> None:
    factors = [Schedule("linear", warmup=3).factor(step, STEPS) for step in range(STEPS)]
    assert factors == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25])
    assert [Schedule("constant", warmup=1).factor(step, 3) for step in range(3)] == [0.5, 1.0, 1.0]
    assert Schedule("cosine", warmup=9).factor(8, 4) == pytest.approx(0.9), "the order ends while it climbs"


def test_an_order_with_all_of_it_is_a_bare_loop() -> None:
    options = LocalOptions(
        {"kind": "adamw", "betas": [0.9, 0.98]}, schedule=Schedule("cosine"), clip_norm=0.1, accumulate=3, device="cpu"
    )
    subject = trainer(options=options)
    base = subject.initial_model()
    model = TwoClasses().model()
    Weights(model).load(base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    inputs, labels = TwoClasses().data(slot()).train.tensors
    rows, _ = Sampler(EXAMPLES, 7, "silo-0").take(Cursor(), STEPS * 8)
    for batch in np.split(rows, STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
    for _ in range(2):
        update = subject.run(order(batch_size=8, max_steps=STEPS), base, Cursor()).update
        np.testing.assert_allclose(update, Weights(model).read() - base, rtol=1e-4, atol=1e-6)


def test_pieces_are_no_larger_than_asked_and_memory_may_make_them_smaller() -> None:
    task = Cramped(fits=99)
    subject = trainer(task, options=LocalOptions(accumulate=3, device="cpu"))
    subject.run(order(batch_size=8, max_steps=1), subject.initial_model(), Cursor())
    assert task.asked == [3, 3, 2]
    task.asked, task.fits = [], 2
    subject.run(order(batch_size=8, max_steps=1), subject.initial_model(), Cursor())
    assert task.asked == [3, *[1] * 8], "half of what was too much"
