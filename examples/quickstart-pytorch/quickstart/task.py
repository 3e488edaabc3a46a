"""Model, data and loops."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()
        )
        self.classifier = nn.Linear(16 * 4 * 4, 10)

    def forward(self, images):
        return self.classifier(self.features(images).flatten(1))


def load_data(partition_id, num_partitions, batch_size):
    """A site's share: every third sample, say, the last fifth of them to test on."""
    images, labels = load_digits(return_X_y=True)
    share = slice(partition_id, None, num_partitions)
    images = torch.from_numpy(images[share]).float().view(-1, 1, 8, 8) / 16
    labels = torch.from_numpy(labels[share])
    cut = len(labels) * 4 // 5
    trainset, testset = TensorDataset(images[:cut], labels[:cut]), TensorDataset(images[cut:], labels[cut:])
    return DataLoader(trainset, batch_size=batch_size, shuffle=True), DataLoader(testset, batch_size=64)


def train(net, loader, epochs, lr, device):
    net.to(device)
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    total = 0.0
    for _ in range(epochs):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(net(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(loader))


def test(net, loader, device):
    net.to(device)
    net.eval()
    total, right = 0.0, 0
    with torch.no_grad():
        for images, labels in loader:
            logits, labels = net(images.to(device)), labels.to(device)
            total += nn.functional.cross_entropy(logits, labels, reduction="sum").item()
            right += (logits.argmax(dim=1) == labels).sum().item()
    return total / len(loader.dataset), right / len(loader.dataset)
