import pytest
import torch
from torch import nn

from fedsync.common.errors import ConfigError
from fedsync.extras.tasks.networks import LstmClassifier, image_network
from fedsync.extras.tasks.neural import Network, Norm


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        # 6 (25 + 1) + 16 (6 * 25 + 1) + 120 (400 + 1) + 84 (120 + 1) + 10 (84 + 1)
        ("lenet5", (1, 28, 28), 61_706),
        ("lenet5", (3, 32, 32), 61_706 + 2 * 25 * 6),
        # stem 27 * 16, six 3x3 of 16 -> 16, then 16 -> 32 and five of 32, 32 -> 64 and five of 64; norms; head.
        # So 0.27 and 0.46 million, as He et al. 2016, table 6, have it.
        (
            "resnet20",
            (3, 32, 32),
            432 + 9 * (6 * 256 + 512 + 5 * 1024 + 2048 + 5 * 4096) + 2 * (7 * 16 + 6 * 32 + 6 * 64) + 650,
        ),
        (
            "resnet32",
            (3, 32, 32),
            432 + 9 * (10 * 256 + 512 + 9 * 1024 + 2048 + 9 * 4096) + 2 * (11 * 16 + 10 * 32 + 10 * 64) + 650,
        ),
        ("cnn", (1, 8, 8), 16 * (9 + 1) + 32 + 32 * (9 * 16 + 1) + 64 + 10 * (32 * 2 * 2 + 1)),
    ],
)
def test_sizes_by_hand(name: Network, shape: tuple[int, ...], expected: int) -> None:
    model = image_network(name, "group", shape, 10)
    assert parameters(model) == expected
    assert model(torch.zeros(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize("name", ["lenet5", "cnn", "resnet20"])
@pytest.mark.parametrize("shape", [(1, 4, 4), (3, 33, 40), (2, 28, 30)])
def test_images_of_any_size_will_do(name: Network, shape: tuple[int, ...]) -> None:
    assert image_network(name, "group", shape, 3)(torch.rand(2, *shape)).shape == (2, 3)


@pytest.mark.parametrize("name", ["cnn", "resnet20"])
@pytest.mark.parametrize(("norm", "alike"), [("group", True), ("batch", False)])
def test_what_group_norm_says_of_a_sample_does_not_depend_on_the_batch(name: Network, norm: Norm, alike: bool) -> None:
    torch.manual_seed(0)
    model = image_network(name, norm, (1, 8, 8), 3)
    images = torch.rand(4, 1, 8, 8)
    together, apart = model(images), torch.cat([model(images[:2]), model(images[2:])])
    assert torch.allclose(together, apart, atol=1e-4) == alike


def test_a_residual_block_passes_its_input_on() -> None:
    model = image_network("resnet20", "group", (1, 8, 8), 3)
    first, widening = model.blocks[0], model.blocks[3]  # type: ignore[union-attr, index]  # of a ResNet
    for block in (first, widening):
        nn.init.zeros_(block.body[3].weight)  # type: ignore[union-attr, index]  # the last convolution
    features = torch.rand(1, 16, 8, 8)
    torch.testing.assert_close(first(features), features)  # type: ignore[operator]  # a module
    widened = widening(features)  # type: ignore[operator]  # a module
    torch.testing.assert_close(widened[:, 8:24], features[:, :, ::2, ::2])
    assert not widened[:, :8].any()
    assert not widened[:, 24:].any()


def test_an_lstm_has_two_recurrent_layers() -> None:
    model = LstmClassifier((30, 20), hidden=8, layers=2, classes=5)
    # Four gates a layer, each with weights of input and state, and two biases.
    assert parameters(model) == 4 * 8 * (20 + 8 + 2) + 4 * 8 * (8 + 8 + 2) + 8 * 5 + 5
    assert model(torch.zeros(3, 30, 20)).shape == (3, 5)


def test_inputs_that_do_not_fit_are_named() -> None:
    with pytest.raises(ConfigError, match=r"task\.data: inputs of shape \(20,\) are no images"):
        image_network("cnn", "group", (20,), 2)
    with pytest.raises(ConfigError, match=r"task\.data: inputs of shape \(1, 28, 28\) are no sequences"):
        LstmClassifier((1, 28, 28), 8, 2, 2)
