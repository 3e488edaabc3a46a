"""Model, data and trainer."""

import logging

import lightning as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

# A trainer is made for each message, and each would say what machine it found.
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class LitAutoEncoder(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 12))
        self.decoder = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x):
        return self.encoder(x)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)

    def training_step(self, train_batch, batch_idx):
        (x,) = train_batch
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self._evaluate(batch, "val")

    def test_step(self, batch, batch_idx):
        self._evaluate(batch, "test")

    def _evaluate(self, batch, stage):
        (x,) = batch
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log(f"{stage}_loss", loss, prog_bar=True)
        self.log(f"{stage}_explained", 1 - loss / x.var(dim=0).mean())


def load_data(partition_id, num_partitions):
    """A site's share: every third sample, say; a part of it to validate on, and a part to test on."""
    images = torch.from_numpy(load_digits().data).float() / 16
    partition = TensorDataset(images[partition_id::num_partitions])
    generator = torch.Generator().manual_seed(42)
    train, valid, test = random_split(partition, [0.7, 0.1, 0.2], generator)
    trainloader = DataLoader(train, batch_size=32, shuffle=True)
    return trainloader, DataLoader(valid, batch_size=32), DataLoader(test, batch_size=len(test))


def quiet_trainer(**options):
    return pl.Trainer(
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options
    )
