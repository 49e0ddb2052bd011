"""Transforms of whole batches, on any device: random for each sample, and reproducible after a resume.

Random numbers are a pure function of the seed, the epoch and the sample's position in the epoch. A sample therefore
gets the same crop with any number of threads, in any batch and on any rank. On the CPU, the loader may crop `uint8`
images one at a time while it decodes or gathers them. On other devices, and for floating-point images, crops run on
the whole batch.
"""

from colabkit.loading import (
    Boxes,
    CenterCrop,
    ColorJitter,
    Compose,
    CutMix,
    Cutout,
    Draws,
    Geometry,
    JointTransform,
    MixUp,
    Normalize,
    PerBatch,
    PerSample,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    Transform,
    TrivialAugmentWide,
)

__all__ = [
    "Boxes",
    "CenterCrop",
    "ColorJitter",
    "Compose",
    "CutMix",
    "Cutout",
    "Draws",
    "Geometry",
    "JointTransform",
    "MixUp",
    "Normalize",
    "PerBatch",
    "PerSample",
    "RandomCrop",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "RandomVerticalFlip",
    "Resize",
    "Transform",
    "TrivialAugmentWide",
]


def __dir__() -> list[str]:
    return __all__
