"""A log file that is extended by all weights and flushed to the disk in each step."""

import json
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import colabkit

dataset = TensorDataset(torch.rand(4096, 64), torch.randint(0, 10, (4096,)))


def slow(folder):
    return train(folder / "log.jsonl", every=1)


def fixed(folder):
    return train(folder / "log.jsonl", every=50)


def train(path, every):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = colabkit.watch(DataLoader(dataset, batch_size=64, shuffle=True))
    number = 0
    with open(path, "w") as log:
        for _ in range(12):
            for inputs, targets in loader:
                loss = nn.functional.cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                number += 1
                if number % every == 0:
                    write_log(log, model)
    return loader


def write_log(log, model):
    weights = {name: value.tolist() for name, value in model.state_dict().items()}
    log.write(json.dumps(weights) + "\n")
    log.flush()
    os.fsync(log.fileno())
