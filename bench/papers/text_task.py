"""A character transformer on the data set descriptions that scikit-learn ships, for `map.py`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import sklearn.datasets
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from fedsync import SiloData, SiloSlot, Task

CONTEXT = 32
WIDTH = 32
HEADS = 4
BLOCKS = 2
STRIDE = 16
TEST = 0.1


@cache
def text() -> str:
    """All descriptions in the order of their names, about 45,000 characters."""
    folder = Path(sklearn.datasets.__file__).parent / "descr"
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.rst")))


@cache
def codes() -> tuple[Tensor, int]:
    """The text as indices of characters, int64 [n], and the number of different characters."""
    letters = {each: at for at, each in enumerate(sorted(set(text())))}
    return torch.tensor([letters[each] for each in text()]), len(letters)


def windows(part: Tensor, stride: int) -> TensorDataset:
    """Inputs and the characters that follow, int64 [n, CONTEXT] each."""
    cut = part.unfold(0, CONTEXT + 1, stride)
    return TensorDataset(cut[:, :-1].contiguous(), cut[:, 1:].contiguous())


class Block(nn.Module):
    """Attention to earlier characters and two dense layers, each after a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, stream: Tensor) -> Tensor:
        n, length, _ = stream.shape
        parts = self.qkv(self.norm1(stream)).view(n, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        stream = stream + self.out(mixed.transpose(1, 2).reshape(n, length, WIDTH))
        narrow: Tensor = self.narrow(functional.gelu(self.wide(self.norm2(stream))))
        return stream + narrow


class Transformer(nn.Module):
    """Two blocks of width 32; float32 [n, length, characters] of int64 [n, length]."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(characters, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)

    def forward(self, characters: Tensor) -> Tensor:
        places = torch.arange(characters.shape[1], device=characters.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.tokens(characters) + self.positions(places))))
        return logits


class TextTask(Task):
    """Prediction of the next character; each silo has a contiguous part of the text, and all share the test windows.

    The last tenth of each part is held out. The loss is in nats per character.
    """

    def model(self) -> nn.Module:
        return Transformer(codes()[1])

    def data(self, slot: SiloSlot) -> SiloData:
        parts = codes()[0].tensor_split(slot.count)
        cuts = [int(len(part) * (1 - TEST)) for part in parts]
        held = [windows(part[cut:], CONTEXT + 1).tensors for part, cut in zip(parts, cuts, strict=True)]
        test = TensorDataset(*(torch.cat(each) for each in zip(*held, strict=True)))
        return SiloData(windows(parts[slot.index][: cuts[slot.index]], STRIDE), test)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        inputs, following = batch
        return functional.cross_entropy(model(inputs).flatten(0, 1), following.flatten())

    def score(self, model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Sum over windows of the mean loss, and of the share of characters that are right."""
        inputs, following = batch
        logits = model(inputs)
        right = (logits.argmax(-1) == following).float().mean(-1).sum()
        return functional.cross_entropy(logits.flatten(0, 1), following.flatten()) * len(inputs), right
