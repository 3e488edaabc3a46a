"""A 3-D U-Net of MONAI outlines lesions in scans of three sites, whose scanners differ."""

import math

import torch
from monai.losses import DiceCELoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet
from torch import nn
from torch.utils.data import Dataset

from fedsync.client import SiloApp

SIZE = 16

app = SiloApp()


class Scans(Dataset):
    """Volumes with one bright ball each: ``image`` float32 [1, 16, 16, 16], ``label`` likewise, of zeros and ones."""

    def __init__(self, count, contrast, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.contrast = contrast
        self.samples = [self.make() for _ in range(count)]

    def make(self):
        grid = torch.stack(torch.meshgrid(*[torch.arange(SIZE)] * 3, indexing="ij"))
        centre = torch.randint(5, SIZE - 5, (3, 1, 1, 1), generator=self.generator)
        radius = torch.randint(3, 6, (), generator=self.generator)
        label = ((grid - centre).square().sum(dim=0) <= radius**2).float()[None]
        noise = torch.randn(1, SIZE, SIZE, SIZE, generator=self.generator)
        return {"image": self.contrast * label + 0.5 * noise, "label": label}

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, number):
        return self.samples[number]


def make_model():
    return UNet(spatial_dims=3, in_channels=1, out_channels=1, channels=(4, 8, 16), strides=(2, 2))


def warm_up_and_cosine(step, warm_up, total):
    """Factor of the learning rate at a step of the whole run."""
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm_up) / (total - warm_up))))


def parameter_groups(model):
    """Weight decay for matrices, none for biases."""
    matrices = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim <= 1]
    return [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]


@app.setup()
def setup(silo):
    contrast = silo.node_config["contrast"]
    return silo.use(make_model, Scans(32, contrast, silo.index), Scans(8, contrast, 100 + silo.index))


@app.train()
def fit(work, model, train, silo):
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=work.learning_rate)
    criterion = DiceCELoss(sigmoid=True)
    step = work.state.get("step", 0)  # of the whole run: the schedule goes on from order to order
    for batch in work.loader(train):
        for group in optimizer.param_groups:
            group["lr"] = work.learning_rate * warm_up_and_cosine(step, 5, silo.options["steps"])
        loss = criterion(model(batch["image"].to(work.device)), batch["label"].to(work.device))
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        work.log(loss=loss, gradient=norm)
    work.state["step"] = step


@app.evaluate()
def test(model, val, silo):
    images, labels = (torch.stack([sample[name] for sample in val]).to(silo.device) for name in ("image", "label"))
    logits = model(images)
    dice = DiceMetric()
    dice(y_pred=(logits > 0).float(), y=labels)
    return {
        "loss": (DiceCELoss(sigmoid=True)(logits, labels), len(val)),
        "dice": (dice.aggregate(), len(val)),
    }
