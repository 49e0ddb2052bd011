"""Which split and which class a file belongs to, read from its folders.

The tree is `[split/]class/…/file`. Splits are folders named like splits, and only where all top folders are; everything
else at the top is a class. One folder that wraps the whole tree, as archives often have it, is looked through.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from colabkit.errors import BadSource, InvalidOption, cannot
from colabkit.pack_format import SPLITS
from colabkit.sources import Item, Listing

__all__ = ["ClassTree", "class_tree", "split_by_fraction"]

SPLIT_FOLDERS = {
    "train": "train",
    "training": "train",
    "dev": "dev",
    "val": "dev",
    "valid": "dev",
    "validation": "dev",
    "test": "test",
    "testing": "test",
}
IMAGE_SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp"}
)


@dataclass(frozen=True, slots=True)
class ClassTree:
    """Files with their labels.

    Attributes:
        classes: class names, sorted; a label is an index into them.
        splits: for each split, its files with their labels, sorted by class, folder and name, as `ImageFolder` of
            torchvision sorts them.
        left_out: files that are no samples, with the reason.
    """

    classes: tuple[str, ...]
    splits: Mapping[str, tuple[tuple[Item, int], ...]]
    left_out: tuple[tuple[str, str], ...]


def class_tree(listing: Listing, name: str) -> ClassTree:
    """Return splits, classes and labels of a listing with one folder a class.

    Args:
        listing: the files.
        name: the source's name, for messages.

    Raises:
        BadSource: if there are no files, no images, or images outside of class folders.
    """
    act = f"find classes in {name!r}"
    left_out = list(listing.skipped)
    images: list[tuple[tuple[str, ...], Item]] = []
    for item in listing.items:
        parts = tuple(item.path.split("/"))
        if any(part.startswith(".") or part == "__MACOSX" for part in parts):
            left_out.append((item.path, "hidden"))
        elif "".join(parts[-1].rpartition(".")[1:]).lower() not in IMAGE_SUFFIXES:
            left_out.append((item.path, "no image by its name"))
        else:
            images.append((parts, item))
    layout = "one folder of images for each class, as in 'cats/1.jpg'"
    if not images:
        found = f"none of its {len(listing.items)} files is an image" if listing.items else "no files at all"
        raise BadSource(cannot(act, found, layout, "Check the path"))
    images = _unwrapped(images)
    has_splits = all(parts[0].lower() in SPLIT_FOLDERS and len(parts) > 1 for parts, _ in images)
    labelled: dict[str, list[tuple[Item, str]]] = {}
    for parts, item in images:
        inside = parts[1:] if has_splits else parts
        if len(inside) < 2:
            raise BadSource(
                cannot(act, f"{item.path!r} lies in no class folder", layout, "Sort the files into folders")
            )
        split = SPLIT_FOLDERS[parts[0].lower()] if has_splits else "train"
        labelled.setdefault(split, []).append((item, inside[0]))
    classes = tuple(sorted({label for samples in labelled.values() for _, label in samples}))
    number = {label: index for index, label in enumerate(classes)}
    splits = {
        split: _sorted([(item, number[label]) for item, label in labelled[split]])
        for split in SPLITS
        if split in labelled
    }
    return ClassTree(classes, splits, tuple(left_out))


def _unwrapped(images: list[tuple[tuple[str, ...], Item]]) -> list[tuple[tuple[str, ...], Item]]:
    """Return the paths without the folders that wrap all of them, down to classes or splits."""
    while True:
        tops = {parts[0] for parts, _ in images}
        if len(tops) != 1 or next(iter(tops)).lower() in SPLIT_FOLDERS:
            return images
        if any(len(parts) < 3 for parts, _ in images):
            return images
        images = [(parts[1:], item) for parts, item in images]


def split_by_fraction(tree: ClassTree, fractions: Mapping[str, float], seed: int) -> ClassTree:
    """Return the tree with its samples dealt anew to splits, each class by itself, in a seeded order.

    Args:
        tree: a tree without splits of its own.
        fractions: shares of `train`, `dev` and `test` that add up to 1.
        seed: the same seed gives the same splits.

    Raises:
        InvalidOption: if the fractions do not add up, name other splits, or the tree has splits already.
        BadSource: if a split would stay empty.
    """
    if not isinstance(fractions, Mapping):
        needed = "shares by split"
        raise InvalidOption(cannot("split", f"splits={fractions!r}", needed, "Use {'train': 0.8, 'test': 0.2}, say"))
    act = f"split into {dict(fractions)!r}"
    fractions = {SPLIT_FOLDERS.get(split, split): share for split, share in fractions.items()}
    if unknown := [split for split in fractions if split not in SPLITS]:
        raise InvalidOption(cannot(act, f"{unknown[0]!r} is no split", f"names among {SPLITS}", "Rename it"))
    if any(not share > 0 for share in fractions.values()) or abs(sum(fractions.values()) - 1) > 1e-6:
        found = f"shares that add up to {sum(fractions.values()):g}"
        raise InvalidOption(cannot(act, found, "positive shares that add up to 1", "Use train=0.8,test=0.2, say"))
    if set(tree.splits) != {"train"}:
        found = f"the folders already are the splits {', '.join(tree.splits)}"
        raise InvalidOption(cannot(act, found, "a tree of class folders only", "Leave the option out"))
    by_class: dict[int, list[tuple[Item, int]]] = {}
    for sample in tree.splits["train"]:
        by_class.setdefault(sample[1], []).append(sample)
    dealt: dict[str, list[tuple[Item, int]]] = {split: [] for split in SPLITS if split in fractions}
    for label, samples in sorted(by_class.items()):
        random.Random(f"{seed}/{label}").shuffle(samples)
        start, share = 0, 0.0
        for split, part in dealt.items():
            share += fractions[split] / sum(fractions.values())
            stop = round(share * len(samples))
            part.extend(samples[start:stop])
            start = stop
    for split, part in dealt.items():
        if not part:
            found = f"no sample for {split!r} among {sum(map(len, by_class.values()))}"
            raise BadSource(cannot(act, found, "at least one", "Use a larger share or more images"))
    return ClassTree(tree.classes, {split: _sorted(part) for split, part in dealt.items()}, tree.left_out)


def _sorted(samples: Sequence[tuple[Item, int]]) -> tuple[tuple[Item, int], ...]:
    return tuple(sorted(samples, key=lambda sample: (sample[1], *sample[0].path.rpartition("/"))))
