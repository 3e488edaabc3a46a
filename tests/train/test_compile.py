"""A compiled model trains as the same model does, in sizes that change, without being compiled for each."""

import numpy as np
import pytest
import torch

from fedsync.common.errors import ConfigError
from fedsync.core.orders import Cursor
from fedsync.train.loop import Trainer
from fedsync.train.options import LocalOptions
from tests.train.make import TwoClasses, order, slot, trainer


class Counted:
    """A backend of torch.compile that counts what it is asked to compile."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        self.graphs += 1
        return graph.forward


@pytest.mark.slow
def test_sizes_that_change_are_compiled_twice_and_evaluation_never(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, alone = Counted(), trainer()
    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, backend: original(model, backend=counted))
    subject = Trainer(TwoClasses(), slot(), LocalOptions(device="cpu", compile="counted", accumulate=2))
    base, cursor = alone.initial_model(), Cursor()
    subject.evaluate(base)
    assert counted.graphs == 0
    # Odd sizes make a short last piece.
    for size in (16, 8, 24, 13, 40, 9, 32, 7):
        work = order(batch_size=size, evaluate=True)
        found = subject.run(work, base, cursor)
        np.testing.assert_allclose(found.update, alone.run(work, base, cursor).update, rtol=0, atol=1e-6)
        assert found.report.evaluation == alone.evaluate(base) == subject.evaluate(base)
    assert counted.graphs == 2
    assert subject.layout == alone.layout


def test_a_machine_without_a_compiler_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ConfigError, match=r"local\.compile: .* there is none by the name of g\+\+\. Install g\+\+"):
        trainer(None, 0, LocalOptions(device="cpu", compile="inductor"))


@pytest.mark.full
def test_the_usual_compiler_compiles() -> None:
    subject, alone = trainer(None, 0, LocalOptions(device="cpu", compile="inductor")), trainer()
    base = alone.initial_model()
    for size in (8, 12):
        expected = alone.run(order(batch_size=size), base, Cursor()).update
        found = subject.run(order(batch_size=size), base, Cursor()).update
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
