"""Random numbers of private training: size and form of the noise, draws of units, and their sources."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from fedsync.core.orders import Cursor
from fedsync.model.layout import Vector
from fedsync.privacy.release import PrivateSettings
from fedsync.tasks.task_protocol import Batch
from fedsync.train.dp_sgd.private_step import SeededRandom, SystemRandom, noisy_mean
from tests.privacy.make import Line, order, trainer
from tests.privacy.test_private_trainer import CLIP

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

# A chance of one in ten thousand million for each test of a distribution.
NEVER = 1e-10


def many(settings: PrivateSettings, seed: int = 1, torch_seed: int = 0) -> Vector:
    """Noise of one step with twenty thousand weights of which no row is drawn."""

    class Wide(Line):
        def model(self) -> nn.Module:
            return nn.Linear(2, 10_000, bias=False)

        def loss(self, model: nn.Module, batch: Batch) -> Tensor:
            return model(batch[0]).square().mean()

    subject = trainer(Wide(), settings)
    torch.manual_seed(torch_seed)
    np.random.seed(torch_seed)
    return subject.run(order(batch_size=1, seed=seed), np.zeros(20_000, np.float32), Cursor()).update


def test_noise_has_the_size_of_noise_times_clip_and_a_normal_s_shape() -> None:
    """With all weights zero every gradient is zero too."""
    found = many(PrivateSettings(CLIP, 3.0, 4)) / (3.0 * CLIP)
    assert stats.kstest(found, "norm").pvalue > NEVER
    # Bounds of seven standard errors, and a tail of 4 sigma that 0.006 % of normal numbers reach.
    assert abs(found.mean()) < 7 / math.sqrt(20_000) and abs(found.var() - 1) < 7 * math.sqrt(2 / 20_000)
    assert 0 < np.mean(np.abs(found) > 3) < 0.01 and np.abs(found).max() < 8.6


def test_noise_of_the_operating_system_follows_no_seed() -> None:
    settings = PrivateSettings(CLIP, 1.0, 4)
    found = [many(settings) for _ in range(2)]
    assert not (found[0] == found[1]).any() or np.mean(found[0] == found[1]) < 1e-3
    assert abs(np.corrcoef(found[0], found[1])[0, 1]) < 0.06


def test_noise_of_virtual_time_follows_the_order_s_seed_alone() -> None:
    settings = PrivateSettings(CLIP, 1.0, 4, seeded=True)
    one, again, other = many(settings), many(settings, torch_seed=5), many(settings, seed=2)
    np.testing.assert_array_equal(one, again)
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.06
    for random in (SeededRandom(3), SystemRandom()):
        # In parts that do not end where a block of noise ends, and of more than one type.
        parts = [noise(random, 20_000), noise(random, 7, torch.float64), noise(random, 41_000)]
        assert stats.kstest(torch.cat(parts).numpy(), "norm").pvalue > NEVER
        assert not noise(random, 3, deviation=0.0).any()


def test_each_number_of_noise_is_added_once_and_none_again_in_another_type(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(1, 2**24))

    def fill(self: SystemRandom, block: torch.Tensor) -> None:
        block.copy_(torch.tensor([next(numbers) for _ in range(block.numel())]).view_as(block))

    monkeypatch.setattr(SystemRandom, "_fill", fill)
    random, found = SystemRandom(), list[torch.Tensor]()
    size = len(random._block)
    for count in (1, 0, size - 1, size, 2, size - 3, 2, 2 * size + 3, size - 4):
        found.append(torch.zeros(count))
        random.add_noise(found[-1], 1.0)
    assert torch.cat(found).tolist() == list(range(1, 6 * size + 1))
    for dtype in (torch.float32, torch.float64, torch.float32):
        found.append(torch.zeros((), dtype=dtype))
        random.add_noise(found[-1], 2.0)
    assert [float(each) for each in found[-3:]] == [2.0 * (6 + block) * size + 2 for block in range(3)]


@pytest.mark.parametrize("source", [SystemRandom, lambda: SeededRandom(4)])
@pytest.mark.parametrize(
    "total", [torch.zeros(4, 5).t(), torch.zeros(1, 5).expand(4, 5), torch.zeros(0), torch.zeros(())]
)
def test_a_sum_of_any_strides_has_noise_of_its_own_for_each_value(total: torch.Tensor, source: Any) -> None:
    mean = noisy_mean(total, source(), PrivateSettings(CLIP, 1.0, 4), 1)
    assert mean.shape == total.shape and len(mean.unique()) == total.numel()


def noise(random: SeededRandom | SystemRandom, count: int, dtype: Any = None, deviation: float = 2.5) -> torch.Tensor:
    total = torch.ones(count // 7, 7, dtype=dtype) if count % 7 == 0 else torch.ones(count, dtype=dtype)
    random.add_noise(total, deviation)
    return (total - 1).flatten() / 2.5


@pytest.mark.parametrize("source", [SystemRandom, lambda: SeededRandom(4)])
def test_units_are_drawn_one_by_one_with_the_rate(source: Any) -> None:
    """Counts are binomial; the draws of two units are independent."""
    random, units, times = source(), 50, 2000
    drawn = np.zeros((times, units))
    for row in drawn:
        row[random.chosen(units, 0.3)] = 1
    counts = drawn.sum(axis=1)
    expected = stats.binom.pmf(np.arange(8, 23), units, 0.3) * times
    found = np.array([(counts == count).sum() for count in range(8, 23)])
    assert stats.chisquare(found, expected * found.sum() / expected.sum()).pvalue > NEVER
    assert abs(drawn.mean() - 0.3) < 7 * math.sqrt(0.21 / drawn.size)
    assert abs(np.corrcoef(drawn[:, 0], drawn[:, 1])[0, 1]) < 7 / math.sqrt(times)
    assert len(random.chosen(10, 1.0)) == 10
