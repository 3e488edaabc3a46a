import pytest
import torch

from fedsync.common.errors import ConfigError
from fedsync.train.machine import device

CPU = torch.device("cpu")


def test_names_with_no_gpu_and_with_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.resolve("auto") == device.resolve("cpu") == CPU
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        device.resolve("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device.resolve("cpu") == CPU
    assert device.resolve("auto") == device.resolve("cuda") == torch.device("cuda", 0)
    assert device.resolve("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="torch sees 2 GPUs"):
        device.resolve("cuda:2")


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cpu:0", "", "mps"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"local\.device"):
        device.resolve(name)


def test_torch_s_own_allocation_failure_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert device.is_out_of_memory(caught.value)
    assert device.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert device.is_out_of_memory(MemoryError())
    assert not device.is_out_of_memory(RuntimeError("shapes do not match"))


def test_seeded_leaves_the_caller_s_generator_alone() -> None:
    torch.default_generator.manual_seed(3)
    expected = torch.rand(4)
    torch.default_generator.manual_seed(3)
    with device.seeded(CPU, 11):
        first = torch.rand(4)
    with device.seeded(CPU, 11):
        second = torch.rand(4)
    assert torch.equal(first, second)
    assert torch.equal(torch.rand(4), expected)
