"""JPEG files that the loop itself decodes, since `num_workers` is 0."""

import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.v2.functional import pil_to_tensor

import colabkit


class Photos(Dataset):
    def __init__(self, folder):
        self.paths = sorted(folder.rglob("*.jpg"))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        with Image.open(self.paths[index]) as photo:
            small = photo.convert("RGB").resize((64, 64))
        return pil_to_tensor(small), int(self.paths[index].parent.name[-1])


def slow(folder):
    return train(colabkit.watch(DataLoader(Photos(folder / "photos"), batch_size=8, shuffle=True)))


def fixed(folder):
    colabkit.pack(Photos(folder / "photos"), folder / "photos-64.h5", progress=False)
    return train(colabkit.Loader(colabkit.open_pack(folder / "photos-64.h5")["train"], 8, shuffle=True))


def train(loader):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
    model.append(nn.Linear(8 * 16, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        for photos, labels in loader:
            loss = nn.functional.cross_entropy(model(photos.float() / 255), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loader
