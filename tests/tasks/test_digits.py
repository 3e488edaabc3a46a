import sys

import numpy as np
import pytest
import torch

from fedsync.common.errors import ConfigError
from fedsync.tasks import digits
from fedsync.tasks.digits import DigitsTask
from fedsync.tasks.partition import Dirichlet, Iid, Pathological
from fedsync.tasks.task_protocol import SiloData, SiloSlot

SILOS = 5


def silos(task: DigitsTask, seed: int = 7) -> list[SiloData]:
    return [task.data(SiloSlot(f"silo-{index}", index, SILOS, seed)) for index in range(SILOS)]


def test_every_silo_holds_the_same_test_split_and_its_own_part() -> None:
    data = silos(DigitsTask(Dirichlet(0.5)))
    for silo in data:
        assert torch.equal(silo.test.tensors[0], data[0].test.tensors[0])
        assert torch.equal(silo.test.tensors[1], data[0].test.tensors[1])
    assert sum(len(silo.train) for silo in data) + len(data[0].test) == 1797
    images = torch.cat([silo.train.tensors[0] for silo in data] + [data[0].test.tensors[0]])
    # As many different images as scikit-learn has: no image is in two parts.
    assert len(torch.unique(images.flatten(1), dim=0)) == len(np.unique(digits._digits()[0].reshape(1797, -1), axis=0))


def test_images_labels_and_stratification() -> None:
    silo = silos(DigitsTask(Iid()))[0]
    images, labels = silo.test.tensors
    assert images.shape == (360, 1, 8, 8)
    assert images.dtype == torch.float32
    assert (images.min(), images.max()) == (0.0, 1.0)
    assert labels.dtype == torch.int64
    # 20 % of the 174 to 183 samples of each digit.
    assert set(torch.bincount(labels).tolist()) <= {35, 36, 37}
    again, other = (silos(DigitsTask(Iid()), seed)[0].test.tensors[0] for seed in (7, 8))
    assert torch.equal(images, again) and not torch.equal(images, other), "the seed decides"
    held = [torch.unique(silo.train.tensors[1]).tolist() for silo in silos(DigitsTask(Pathological(2)))]
    assert held == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


@pytest.mark.parametrize("share", [0.0, 1.0, 0.001, float("nan")])
def test_the_test_share_is_checked(share: float) -> None:
    with pytest.raises(ConfigError, match=r"task\.test_share"):
        silos(DigitsTask(Iid(), share))


def test_a_missing_library_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    digits._digits.cache_clear()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigError, match=r'pip install .*"\.\[sim\]"'):
        silos(DigitsTask(Iid()))
