"""A validation that takes longer than training, after every 20 steps."""

import torch
from torch import nn

import colabkit

images, labels = torch.rand(6400, 3, 16, 16), torch.randint(0, 10, (6400,))


def slow(folder):
    return train(validate_every=20)


def fixed(folder):
    return train(validate_every="epoch")


def train(validate_every):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 14 * 14, 10))
    step = colabkit.supervised_step(model, torch.optim.SGD(model.parameters(), lr=0.01))
    loader = colabkit.Loader((images[:3200], labels[:3200]), batch_size=32, shuffle=True)
    held_out = colabkit.Loader((images, labels), batch_size=32)
    return colabkit.train(step, loader, epochs=2, validate=held_out, validate_every=validate_every)
