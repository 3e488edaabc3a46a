"""Choices that a task makes for its own model, as the page about local training names them, change no update."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsync.core.orders import Cursor
from fedsync.tasks.task_protocol import Batch
from tests.train.make import TwoClasses, order, trainer

Graph = Callable[..., tuple[Tensor, ...]]


class Pictures(nn.Module):
    """The points as pictures of four pixels. PyTorch compiles no bare `nn.Sequential` in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 8, 2), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(8, 2)

    def forward(self, points: Tensor) -> Tensor:
        """Logits [n, 2] of points [n, 4]."""
        logits: Tensor = self.head(self.layers(points))
        return logits


class Choosing(TwoClasses):
    """The points, with a choice by the task; counts the graphs that PyTorch compiles."""

    def __init__(self, choice: str = "") -> None:
        self.choice, self.graphs = choice, 0

    def _compiled(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Graph:
        self.graphs += 1
        return graph.forward  # type: ignore[no-any-return]  # torch leaves it untyped

    def model(self) -> nn.Module:
        model = Pictures()
        if self.choice == "compile":
            model.compile(backend=self._compiled)
        return model.to(memory_format=torch.channels_last) if self.choice == "channels_last" else model

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return super().loss(nn.DataParallel(model) if self.choice == "gpus" else model, batch)


@pytest.mark.parametrize("choice", ["compile", "channels_last", "gpus"])
def test_a_model_as_its_task_wants_it_trains_as_the_same_model_does(choice: str) -> None:
    plain, task = trainer(Choosing()), Choosing(choice)
    subject = trainer(task)
    base = plain.initial_model()
    np.testing.assert_array_equal(subject.initial_model(), base)
    assert subject.layout == plain.layout
    for size in (16, 9):
        expected = plain.run(order(batch_size=size, evaluate=True), base, Cursor())
        found = subject.run(order(batch_size=size, evaluate=True), base, Cursor())
        np.testing.assert_allclose(found.update, expected.update, rtol=0, atol=1e-6)
        assert found.report.evaluation is not None
    assert (task.graphs > 0) == (choice == "compile")
