"""What is often wrong with a task is said in one line before it trains."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fedsync.common.errors import ConfigError
from fedsync.core.orders import Cursor
from fedsync.tasks.task_protocol import SiloData, SiloSlot
from tests.train.make import TwoClasses, order, trainer


class Named(TwoClasses):
    """The same samples as dicts."""

    def data(self, slot: SiloSlot) -> SiloData:
        data = super().data(slot)
        train, test = (
            [{"image": image, "label": label} for image, label in zip(*each.tensors, strict=True)]  # type: ignore[attr-defined]
            for each in (data.train, data.test)
        )
        return SiloData(train, test)  # type: ignore[arg-type]  # a list has all that a map-style data set needs


def scoring(score: Callable[[Tensor, Tensor], Any]) -> TwoClasses:
    """A task whose score is this function of logits and labels."""

    class Scored(TwoClasses):
        def score(self, model: nn.Module, batch: Any) -> Any:
            return score(model(batch[0]), batch[1])

    return Scored()


def data_of(change: Callable[[SiloData], Any]) -> TwoClasses:
    """A task whose data are changed."""

    class Changed(TwoClasses):
        def data(self, slot: SiloSlot) -> SiloData:
            return change(super().data(slot))  # type: ignore[no-any-return]

    return Changed()


class Stream(IterableDataset[Any]):
    """Samples that come in an order of their own."""

    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: (data.train, data.test), "it returned tuple. Return SiloData"),
        (lambda data: SiloData(DataLoader(data.train), data.test), "train is a DataLoader.*SiloData.train=loader.d"),
        (lambda data: SiloData(data.train, DataLoader(data.test)), "test is a DataLoader.*SiloData.test=loader.d"),
        (lambda data: SiloData(Stream(), data.test), "train is a Stream, which has no length.*map-style"),
    ],
)
def test_data_that_samples_cannot_be_taken_from(change: Callable[[SiloData], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"task, data.slot.: {message}"):
        trainer(data_of(change))


def test_dicts_and_three_parts_want_a_loss_of_their_own() -> None:
    with pytest.raises(ConfigError, match="task, loss: a batch is a dict of image, label, and the default loss wants"):
        trainer(Named())
    three = data_of(lambda data: SiloData(TensorDataset(*data.train.tensors, data.train.tensors[1]), data.test))  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="a batch is a list of 3: Tensor, Tensor, Tensor, and the default loss"):
        trainer(three)

    class Half(Named):
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            return nn.functional.cross_entropy(model(batch["image"]), batch["label"])

    with pytest.raises(ConfigError, match=r"task, score: .* default score wants inputs and labels\. Write score"):
        trainer(Half())

    class Collated(Named):
        def collate(self, samples: list[Any]) -> Any:
            return [torch.stack([sample[key] for sample in samples]) for key in ("image", "label")]

    subject = trainer(Collated())
    assert subject.run(order(), subject.initial_model(), Cursor()).report.steps == 5


LOSS = nn.functional.cross_entropy


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (lambda logits, labels: (LOSS(logits, labels), (logits.argmax(1) == labels).sum()), "the loss of a batch"),
        (
            lambda logits, labels: (LOSS(logits, labels, reduction="sum"), (logits.argmax(1) < 9).float().mean()),
            "the number correct of a batch is that of half the batch, so it is a mean. Return sums",
        ),
        (
            lambda logits, labels: (LOSS(logits, labels, reduction="none"), labels.sum()),
            r"the loss has the shape \(2,\)",
        ),
        (lambda logits, labels: LOSS(logits, labels), "it returned a Tensor. Return two scalar tensors"),
        (lambda logits, labels: (LOSS(logits, labels).item(), 1), "it returned a tuple of 2: float, int. Return two"),
    ],
)
def test_a_score_is_two_sums(score: Callable[[Tensor, Tensor], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"task, score: {message}"):
        trainer(scoring(score))


def test_sums_that_are_nothing_or_near_nothing_are_sums() -> None:
    trainer(scoring(lambda logits, labels: (torch.zeros(()), torch.zeros(()))))
    trainer(scoring(lambda logits, labels: (1e-12 * LOSS(logits, labels, reduction="sum"), labels.sum())))


def test_trying_a_task_changes_nothing() -> None:
    """A score that draws, or moves the statistics of a norm, leaves no trace in what is trained."""
    plain = trainer()
    state = torch.get_rng_state()
    subject = trainer(scoring(lambda logits, labels: (logits.sum() * torch.rand(()), labels.sum())))
    assert torch.equal(torch.get_rng_state(), state)
    update = subject.run(order(), plain.initial_model(), Cursor()).update
    assert update.tobytes() == plain.run(order(), plain.initial_model(), Cursor()).update.tobytes()
