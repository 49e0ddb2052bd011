"""Transforms of whole batches, on any device: random by sample, and the same again after a resume.

Random numbers are a pure function of (seed, epoch, position of the sample), so the same sample gets the same crop on
any number of threads, in any batch, and on any rank. Geometric transforms of `uint8` images on the CPU go sample by
sample where the loader gathers them anyway; on other devices, and for floating images, they go by batch.
"""

from __future__ import annotations

from colabkit.augment.boxes import Boxes
from colabkit.augment.compose import Compose, geometry_of, parted, steps_of
from colabkit.augment.crops import CenterCrop, RandomCrop, RandomHorizontalFlip, RandomResizedCrop
from colabkit.augment.cutout import Cutout
from colabkit.augment.cutting import cut
from colabkit.augment.draws import Draws
from colabkit.augment.geometry import Geometry
from colabkit.augment.mixup import MixUp
from colabkit.augment.normalize import Normalize
from colabkit.augment.per_batch import PerBatch
from colabkit.augment.per_sample import PerSample, is_per_sample
from colabkit.augment.transform import Transform

__all__ = [
    "Boxes",
    "CenterCrop",
    "Compose",
    "Cutout",
    "Draws",
    "Geometry",
    "MixUp",
    "Normalize",
    "PerBatch",
    "PerSample",
    "RandomCrop",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "Transform",
    "cut",
    "geometry_of",
    "is_per_sample",
    "parted",
    "steps_of",
]
