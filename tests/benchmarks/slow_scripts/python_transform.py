"""A transform in pure Python for every sample."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import colabkit

images = torch.randint(0, 256, (512, 3, 32, 32), dtype=torch.uint8)
labels = torch.randint(0, 10, (512,))


class Pictures(Dataset):
    def __len__(self):
        return len(images)

    def __getitem__(self, index):
        pixels = images[index].flatten().tolist()
        scaled = [(value / 255 - 0.5) / 0.25 for value in pixels]
        return torch.tensor(scaled).view(3, 32, 32), labels[index]


def slow(folder):
    return train(colabkit.watch(DataLoader(Pictures(), batch_size=32, shuffle=True)))


def fixed(folder):
    colabkit.pack(Pictures(), folder / "decoded.h5", progress=False)
    return train(colabkit.Loader(colabkit.open_pack(folder / "decoded.h5")["train"], 32, shuffle=True))


def train(loader):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 15 * 15, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(6):
        for pictures, targets in loader:
            loss = nn.functional.cross_entropy(model(pictures), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loader
