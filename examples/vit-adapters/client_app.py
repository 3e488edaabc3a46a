"""A vision transformer whose body is frozen: adapters travel, and each site keeps a head for its own classes."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Subset, TensorDataset

from fedsync.client import SiloApp

WIDTH, BLOCKS, PATCHES = 64, 3, 16

app = SiloApp()


class Body(nn.Module):
    """What was trained before, on other images; here it is random. 8 x 8 pixels are 16 patches."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(64 // PATCHES, WIDTH)
        self.position = nn.Parameter(torch.randn(PATCHES, WIDTH) * 0.5)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(BLOCKS)
        )


class Adapter(nn.Module):
    """A narrow way around: it begins as nothing, so the body's features are what training begins with."""

    def __init__(self, narrow=8):
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, narrow), nn.Linear(narrow, WIDTH)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, tokens):
        return tokens + self.up(nn.functional.gelu(self.down(tokens)))


class AdaptedViT(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = Body().requires_grad_(False)
        self.adapters = nn.ModuleList(Adapter() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, images):
        patches = images.view(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, PATCHES, 4)
        tokens = self.body.embed(patches) + self.body.position
        for block, adapter in zip(self.body.blocks, self.adapters, strict=True):
            tokens = adapter(block(tokens))
        return self.head(self.norm(tokens.mean(dim=1)))


@app.setup()
def setup(silo):
    """A site has digits below its ``classes`` only, so its head is as wide as that."""
    images, labels = (torch.from_numpy(each) for each in load_digits(return_X_y=True))
    classes = silo.node_config["classes"]
    share = torch.arange(silo.index, len(labels), silo.options["silos"])
    share = share[labels[share] < classes].tolist()
    data, cut = TensorDataset(images.float() / 16, labels), len(share) * 4 // 5
    return silo.use(lambda: AdaptedViT(classes), Subset(data, share[:cut]), Subset(data, share[cut:]), private="head.")


@app.train()
def fit(work, model, train):
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=work.learning_rate)
    for images, labels in work.loader(train):
        loss = nn.functional.cross_entropy(model(images.to(work.device)), labels.to(work.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        work.log(loss=loss)


@app.evaluate()
def test(model, val, silo):
    images, labels = (torch.stack(each).to(silo.device) for each in zip(*val, strict=True))
    logits = model(images)
    loss = nn.functional.cross_entropy(logits, labels)
    right = (logits.argmax(dim=1) == labels).float().mean()
    return {"loss": (loss, len(val)), "accuracy": (right, len(val))}
