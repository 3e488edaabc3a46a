from typing import Any

import pytest
import torch
from torch import nn

from fedsync.core.errors import ConfigError
from fedsync.train.options import LocalOptions


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"optimizer": "lion"}, "local.optimizer"),
        ({"momentum": 1.0}, "local.momentum"),
        ({"optimizer": "adam", "momentum": 0.9}, "local.momentum"),
        ({"weight_decay": -0.1}, "local.weight_decay"),
        ({"weight_decay": float("nan")}, "local.weight_decay"),
        *(({"proximal": mu}, "local.proximal") for mu in (-0.1, float("nan"), float("inf"))),
        ({"threads": 0}, "local.threads"),
        ({"precision": "fp8"}, "local.precision"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LocalOptions(**options)
    assert caught.value.place == place


def test_options_reach_the_optimizer() -> None:
    parameters = list(nn.Linear(1, 1).parameters())
    sgd = LocalOptions(momentum=0.9, weight_decay=0.01).make_optimizer(parameters, 0.2)
    adam = LocalOptions("adam").make_optimizer(parameters, 0.3)
    assert isinstance(sgd, torch.optim.SGD)
    assert isinstance(adam, torch.optim.Adam)
    assert [sgd.defaults[name] for name in ("lr", "momentum", "weight_decay")] == [0.2, 0.9, 0.01]
    assert adam.defaults["lr"] == 0.3
