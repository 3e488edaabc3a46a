from typing import Any, get_args

import pytest
import torch
from torch import nn

from fedsync.common.errors import ConfigError
from fedsync.config.training import OptimizerName
from fedsync.train.options import LocalOptions, optimizers
from tests.train.make import trainer


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"optimizer": "lion"}, "local.optimizer"),
        ({"optimizer": "adam", "momentum": 0.9}, "local.momentum"),
        ({"optimizer": "lbfgs"}, "local.optimizer"),
        ({"optimizer": {"kind": "adamw", "momentum": 0.9}}, "local.optimizer"),
        ({"optimizer": {"kind": "adamw"}, "weight_decay": 0.1}, "local.weight_decay"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LocalOptions(**options)
    assert caught.value.place == place


def test_the_file_knows_the_optimizers_that_pytorch_has() -> None:
    assert set(get_args(OptimizerName)) >= set(optimizers())
    assert {"sgd", "adam", "adamw"} <= set(optimizers())


@pytest.mark.parametrize("kind", sorted(optimizers()))
def test_an_optimizer_goes_as_pytorch_s_own(kind: str) -> None:
    """Made and stepped without what PyTorch puts around them for its compiler."""
    ends = []
    for make in (LocalOptions(kind).make_optimizer, optimizers()[kind]):
        weight = nn.Parameter(torch.linspace(-1.0, 1.0, 6).reshape(2, 3))
        optimizer = make([weight], 0.01)
        for _ in range(3):
            weight.grad = weight.detach() ** 2 - 0.5
            optimizer.step()
        assert weight.requires_grad and not any(value.requires_grad for value in optimizer.state[weight].values())
        ends.append(weight.detach().numpy().tobytes())
    assert ends[0] == ends[1]


def test_an_optimizer_refuses_a_model_before_training() -> None:
    with pytest.raises(ConfigError, match="muon refuses the model: Muon only supports 2D"):
        trainer(options=LocalOptions("muon", device="cpu"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (LocalOptions(momentum=0.9, weight_decay=0.01), {"momentum": 0.9, "weight_decay": 0.01}),
        (
            LocalOptions({"kind": "adamw", "betas": [0.9, 0.98], "weight_decay": 0.02}),
            {"betas": (0.9, 0.98), "weight_decay": 0.02},
        ),
        (LocalOptions("adamw"), {"weight_decay": 0.01}),  # PyTorch's own
    ],
    ids=["options", "keywords", "neither"],
)
def test_options_and_keywords_reach_the_optimizer(options: LocalOptions, expected: dict[str, Any]) -> None:
    optimizer = options.make_optimizer(nn.Linear(1, 1).parameters(), 0.3)
    assert type(optimizer).__name__.lower() == ("sgd" if "momentum" in expected else "adamw")
    assert {name: optimizer.defaults[name] for name in ("lr", *expected)} == {"lr": 0.3, **expected}
