"""Many short epochs, each of which starts new worker processes."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import colabkit

dataset = TensorDataset(torch.rand(640, 3, 32, 32), torch.randint(0, 10, (640,)))


def slow(folder):
    return train(DataLoader(dataset, batch_size=32, shuffle=True, num_workers=2))


def fixed(folder):
    return train(DataLoader(dataset, batch_size=32, shuffle=True, num_workers=2, persistent_workers=True))


def train(loader):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 15 * 15, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watched = colabkit.watch(loader)
    for _ in range(40):
        for inputs, targets in watched:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return watched
