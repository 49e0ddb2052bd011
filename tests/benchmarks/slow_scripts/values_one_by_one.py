"""A loop that reads every prediction with `.item()`, one at a time."""

import torch
from torch import nn

import colabkit

images, labels = torch.rand(100_000, 64), torch.randint(0, 10, (100_000,))
loader = colabkit.Loader((images, labels), batch_size=64, shuffle=True)


def slow(folder):
    model, optimizer = parts()
    correct = 0
    for _ in range(2):
        for inputs, targets in loader:
            outputs = step(model, optimizer, inputs, targets)
            for output, target in zip(outputs, targets, strict=True):
                if output.argmax().item() == target.item():
                    correct += 1
    return loader


def fixed(folder):
    model, optimizer = parts()
    correct = torch.zeros((), dtype=torch.int64)
    for _ in range(2):
        for inputs, targets in loader:
            outputs = step(model, optimizer, inputs, targets)
            correct += (outputs.argmax(1) == targets).sum()
    print(f"accuracy {correct.item() / (2 * len(images)):.2f}")
    return loader


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def step(model, optimizer, inputs, targets):
    outputs = model(inputs)
    loss = nn.functional.cross_entropy(outputs, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return outputs.detach()
