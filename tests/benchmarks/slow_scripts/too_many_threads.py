"""More torch threads than CPUs."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import colabkit

dataset = TensorDataset(torch.rand(2048, 3, 32, 32), torch.randint(0, 10, (2048,)))


def slow(folder):
    return train(threads=16 * len(os.sched_getaffinity(0)))


def fixed(folder):
    return train(threads=len(os.sched_getaffinity(0)))


def train(threads):
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten())
    model.append(nn.Linear(16 * 28 * 28, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = colabkit.watch(DataLoader(dataset, batch_size=32, shuffle=True))
    for _ in range(3):
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loader
