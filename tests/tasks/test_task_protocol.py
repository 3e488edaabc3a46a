import torch
from torch import nn

from fedsync.tasks.task_protocol import SiloData, SiloSlot, Task


class Given(Task):
    """A model that says what its inputs say."""

    def model(self) -> nn.Module:
        return nn.Identity()

    def data(self, slot: SiloSlot) -> SiloData:
        raise NotImplementedError


def test_loss_and_score_agree_by_hand() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
    labels = torch.tensor([0, 1, 1])
    # -log softmax of the right class: log(1 + exp(wrong - right)).
    each = torch.log1p(torch.exp(torch.tensor([-2.0, -1.0, 3.0])))
    mean = Given().loss(nn.Identity(), [logits, labels])
    total, correct = Given().score(nn.Identity(), [logits, labels])
    torch.testing.assert_close(mean, each.mean())
    torch.testing.assert_close(total, each.sum())
    assert int(correct) == 2


def test_unknown_labels_and_labels_of_pixels_count_as_the_mean_of_known_labels() -> None:
    """Of two images of four pixels, one label is unknown and one of seven is wrong."""
    labels = torch.tensor([[[0, 1], [1, 0]], [[1, 1], [0, -100]]])
    logits = 4.0 * torch.nn.functional.one_hot(labels.clamp(min=0), 2).movedim(-1, 1).float()
    logits[0, :, 0, 0] = torch.tensor([0.0, 4.0])
    total, correct = Given().score(nn.Identity(), [logits, labels])
    torch.testing.assert_close(total / 2, Given().loss(nn.Identity(), [logits, labels]))
    torch.testing.assert_close(correct / 2, torch.tensor(6 / 7))
