"""JPEG files on a mounted drive that takes a long time to open each file."""

from jpeg_in_the_loop import Photos, train
from torch.utils.data import DataLoader

import colabkit


def slow(folder):
    return train(colabkit.watch(DataLoader(Photos(folder / "drive" / "photos"), batch_size=4, shuffle=True)))


def fixed(folder):
    colabkit.stage(folder / "drive" / "photos", folder / "local", progress=False)
    return train(colabkit.watch(DataLoader(Photos(folder / "local"), batch_size=4, shuffle=True)))
