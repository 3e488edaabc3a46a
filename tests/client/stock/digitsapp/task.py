"""digitsapp: model, data and loops."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc = nn.Linear(8 * 4 * 4, 10)

    def forward(self, x):
        x = self.pool(torch.relu(self.norm(self.conv(x))))
        return self.fc(x.flatten(1))


digits = None  # loaded once a process


def load_data(partition_id, num_partitions, batch_size):
    global digits
    if digits is None:
        images, labels = load_digits(return_X_y=True)
        shape = (-1, 1, 8, 8)
        digits = torch.tensor(images / 16, dtype=torch.float32).reshape(shape), torch.tensor(labels)
    images, labels = (part[partition_id::num_partitions] for part in digits)
    cut = len(labels) * 4 // 5
    trainset, testset = TensorDataset(images[:cut], labels[:cut]), TensorDataset(images[cut:], labels[cut:])
    return DataLoader(trainset, batch_size=batch_size, shuffle=True), DataLoader(testset, batch_size=128)


def train(net, trainloader, epochs, lr, device):
    net.to(device)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    running_loss = 0.0
    for _ in range(epochs):
        for images, labels in trainloader:
            optimizer.zero_grad()
            loss = criterion(net(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
    return running_loss / (epochs * len(trainloader))


def test(net, testloader, device):
    net.to(device)
    criterion = nn.CrossEntropyLoss()
    correct, loss = 0, 0.0
    with torch.no_grad():
        for images, labels in testloader:
            outputs = net(images.to(device))
            loss += criterion(outputs, labels.to(device)).item()
            correct += (outputs.argmax(dim=1) == labels.to(device)).sum().item()
    return loss / len(testloader), correct / len(testloader.dataset)
