"""A loop that saves a checkpoint in each step."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import colabkit

dataset = TensorDataset(torch.rand(4096, 64), torch.randint(0, 10, (4096,)))


def slow(folder):
    return train(folder / "model.pt", every=1)


def fixed(folder):
    return train(folder / "model.pt", every=50)


def train(path, every):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 10))
    optimizer = torch.optim.Adam(model.parameters())
    loader = colabkit.watch(DataLoader(dataset, batch_size=64, shuffle=True))
    number = 0
    for _ in range(12):
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            number += 1
            if number % every == 0:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return loader
