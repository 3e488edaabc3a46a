"""What only a GPU can show. Elsewhere these are skipped; the same logic is tested there with stand-ins."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fedsync.core.orders import Cursor
from fedsync.train.machine.device import PrecisionName
from fedsync.train.options import LocalOptions
from tests.train.make import order, trainer
from tests.train.test_precision import Pictures

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

GPU = torch.device("cuda", 0)


def options(precision: PrecisionName = "fp32", **more: bool) -> LocalOptions:
    return LocalOptions(device="cuda:0", precision=precision, **more)


@pytest.mark.parametrize(("precision", "off"), [("fp32", 1e-4), ("bf16", 0.05), ("fp16", 0.05)])
def test_a_gpu_learns_what_a_processor_learns(precision: PrecisionName, off: float) -> None:
    processor, gpu = trainer(Pictures()), trainer(Pictures(), options=options(precision))
    base = processor.initial_model()
    expected = processor.run(order(max_steps=20), base, Cursor()).update
    outcome = gpu.run(order(max_steps=20, evaluate=True), base, Cursor())
    assert gpu.device == "cuda:0"
    assert np.linalg.norm(outcome.update - expected) < off * np.linalg.norm(expected)
    assert all(window.memory is not None and 0 < window.memory <= 1 for window in outcome.report.windows)
    assert outcome.report.metrics["peak_memory_bytes"] > 0


@pytest.fixture
def little_memory() -> Iterator[None]:
    """A GPU on which torch may have 64 MiB more than it has."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(GPU).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(GPU) + 2**26) / total, GPU)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, GPU)


class Heavy(Pictures):
    """4 MiB of a sample's own for every sample."""

    def loss(self, model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        ballast = torch.zeros(len(batch[0]), 2**20, device=batch[0].device)
        return super().loss(model, batch) + ballast.sum()


def test_memory_that_runs_out_is_survived_and_its_cap_found(little_memory: None) -> None:
    subject = trainer(Heavy(), options=options())
    base = subject.initial_model()
    outcome = subject.run(order(batch_size=40, max_steps=2), base, Cursor())
    # 64 MiB hold no 20 samples of 4 MiB; 40, 20, 10.
    assert outcome.report.batch_cap == 10
    assert np.isfinite(outcome.update).all()
    found = trainer(Heavy(), options=options()).find_batch_cap()
    assert found is not None and 8 <= found < 20
