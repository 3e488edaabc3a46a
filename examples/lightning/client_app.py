"""An autoencoder in Lightning: what compresses digits at one site compresses them at all."""

import logging
import warnings

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from fedsync.client import SiloApp
from fedsync.client.lightning import FedSyncCallback

# A trainer is made for each order, and each would say what machine it found.
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")

app = SiloApp()


class LitAutoEncoder(lightning.LightningModule):
    def __init__(self, learning_rate=1e-3):
        super().__init__()
        self.learning_rate = learning_rate
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 12))
        self.decoder = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)

    def loss(self, images):
        return nn.functional.mse_loss(self.decoder(self.encoder(images)), images)

    def training_step(self, batch, batch_idx):
        return self.loss(batch[0])

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.loss(batch[0]))


def quiet_trainer(**options):
    return lightning.Trainer(
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options
    )


@app.setup()
def setup(silo):
    images = torch.from_numpy(load_digits().data).float() / 16
    share = range(silo.index, len(images), silo.options["silos"])
    cut = len(share) * 4 // 5
    data = TensorDataset(images)
    return silo.use(LitAutoEncoder, Subset(data, share[:cut]), Subset(data, share[cut:]))


@app.train()
def fit(work, model, train):
    model.learning_rate = work.learning_rate
    trainer = quiet_trainer(max_epochs=-1, callbacks=[FedSyncCallback(work)], gradient_clip_val=1.0)
    trainer.fit(model, work.loader(train))


@app.evaluate()
def test(model, val):
    (found,) = quiet_trainer().validate(model, DataLoader(val, batch_size=64), verbose=False)
    pixels = torch.stack([image for (image,) in val])
    explained = 1 - found["loss"] / pixels.var(dim=0).mean().item()
    return {"loss": (found["loss"], len(val)), "explained": (explained, len(val))}
