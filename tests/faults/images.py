"""Faults 35 and 36: images that are corrupt or unusual."""

from __future__ import annotations

import io
import itertools
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pictures import AGREEMENT, distance, exif, photo, png, saved
from PIL import Image, features
from trees import leftovers

from colabkit.errors import ColabkitError
from colabkit.loading import Loader
from colabkit.packs import FileDataset, open_pack
from colabkit.packs.packing.api import pack

from .board import COLABKIT, Outcome, Result, attempts, fault, spread
from .mutations import overwrites

Pixels = list[np.ndarray]
Way = Callable[[Path, str], tuple[Pixels, list[str]]]


@dataclass(frozen=True)
class Decoder:
    """A tool that decodes a folder of images.

    Args:
        ways: functions of the folder and a policy; each returns the pictures, `uint8 [H, W, C]`, in the order of their
            names, and the names of the bad files.
        policies: how bad files can be handled.
        refusals: the exceptions by which the tool refuses work.
    """

    ways: dict[str, Way]
    policies: tuple[str, ...]
    refusals: type[Exception]


def _by_pack(encoding: str, source: Path, policy: str) -> tuple[Pixels, list[str]]:
    options: dict[str, Any] = {"labels": None, "threads": 1, "progress": False, "max_bad": 0.9}
    try:
        report = pack(source, source.parent / "p.h5", encoding=encoding, on_bad=policy, **options)
    finally:
        assert not leftovers(source.parent), "unfinished files are left"
    data = open_pack(report.path)["train"]
    return [data[row].permute(1, 2, 0).numpy() for row in range(len(data))], [name for name, _ in report.bad]


def _by_loader(source: Path, policy: str) -> tuple[Pixels, list[str]]:
    loader = Loader(FileDataset(source, labels=None), 3, on_bad=policy, num_workers=0)
    batches = [batch.permute(0, 2, 3, 1).numpy() for batch in loader]
    return [picture for batch in batches for picture in batch], list(loader.bad_samples)


class PillowDataset(torch.utils.data.Dataset[np.ndarray]):
    """The images of a folder, decoded with Pillow as in PyTorch's tutorials."""

    def __init__(self, source: Path) -> None:
        self.paths = sorted(source.iterdir())

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> np.ndarray:
        return np.asarray(Image.open(self.paths[number]).convert("RGB"))


def _by_pillow(source: Path, policy: str) -> tuple[Pixels, list[str]]:
    loader = torch.utils.data.DataLoader(PillowDataset(source), batch_size=1, num_workers=0)
    return [picture for batch in loader for picture in batch.numpy()], []


DECODERS = {
    COLABKIT: Decoder(
        {"pack": partial(_by_pack, "raw"), "files in a pack": partial(_by_pack, "source"), "Loader": _by_loader},
        ("raise", "skip", "blank"),
        ColabkitError,
    ),
    "Pillow": Decoder({"DataLoader": _by_pillow}, ("raise",), Exception),
}
_BAD = "005.bad"
_HTML = b"<!DOCTYPE html><html><body>404</body></html>"
_WHOLE = [photo(24, 32, seed=number) for number in range(4)]


def _kinds() -> list[str]:
    optional = {"WEBP": "webp", "AVIF": "avif", "JPEG2000": "jpg_2000"}
    return ["JPEG", "PNG", "GIF", "BMP", "TIFF", "PPM", *(kind for kind in optional if features.check(optional[kind]))]


def _corrupt_images() -> dict[str, tuple[bytes, bytes | None]]:
    """Return corrupt files by name, each with the intact file, or None if no decoded picture can be correct."""
    found: dict[str, tuple[bytes, bytes | None]] = {
        "empty": (b"", None),
        "web page": (_HTML, None),
        "zeros": (bytes(2000), None),
        "array": (b"\x93NUMPY" + bytes(90), None),
        "text": (b"just some text", None),
        "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n", None),
    }
    for kind in _kinds():
        data = saved(photo(24, 32, seed=9), kind, **({"exif": exif(1)} if kind in ("JPEG", "PNG") else {}))
        lengths = {*range(1, len(data), max(1, len(data) // 14)), len(data) - 1, len(data) - 2}
        found |= {f"{kind} cut to {length} of {len(data)} bytes": (data[:length], data) for length in sorted(lengths)}
        found[f"{kind} without its start"] = (data[10:], None)
        found[f"{kind} behind zeros"] = (bytes(100) + data, None)
        if kind == "PNG":
            # All chunks of this format have checksums.
            found |= {f"{kind}, {name}": (changed, data) for name, changed in overwrites(data, 20, 1)}
    return found


@fault(35, "corrupt images, with each policy for bad files", DECODERS)
def corrupt_images(decoder: Decoder, folder: Path, limit: int) -> Iterator[Result]:
    numbers = itertools.count()
    places = itertools.cycle(decoder.ways.items())

    def work(way: Way, policy: str, data: bytes, whole: bytes | None) -> Outcome:
        place = folder / f"case{next(numbers)}"
        source = place / "images"
        source.mkdir(parents=True)
        for number, picture in enumerate(_WHOLE):
            (source / f"{3 * number:03}.png").write_bytes(png(picture))
        bad = source / _BAD.replace("bad", "jpg")
        bad.write_bytes(data)
        try:
            pictures, listed = way(source, policy)
            expected = [*_WHOLE[:2], None, *_WHOLE[2:]]
            if listed:
                assert len(listed) == 1, f"{listed} are listed as bad"
                assert bad.name in listed[0], f"{listed} is listed as bad"
                if policy == "skip":
                    del expected[2]
                else:
                    # The tools differ in the size of the black picture that replaces a bad image.
                    expected[2] = np.zeros_like(pictures[2])
            else:
                assert whole is not None, "the file is not an image, but was decoded"
                expected[2] = _intact(way, place, whole)
            same = len(pictures) == len(expected) and all(map(np.array_equal, pictures, expected))
            assert same, "the pictures differ"
            return Outcome.DEGRADED if listed else Outcome.SURVIVED
        except ColabkitError as error:
            if policy == "raise" and bad.name in str(error):
                raise
            raise AssertionError(f"the policy is {policy!r}, and the file {bad.name!r}: {error}") from error
        finally:
            shutil.rmtree(place)

    files = spread(list(_corrupt_images().items()), 3 * limit)
    cases = [
        (f"{name}, {way}, {policy}", partial(work, call, policy, data, whole))
        for (name, (data, whole)), (way, call) in zip(files, places, strict=False)
        for policy in decoder.policies
    ]
    yield from attempts(cases[: 3 * limit], refusals=decoder.refusals)


def _intact(way: Way, place: Path, data: bytes) -> np.ndarray:
    """Return the picture that the same tool decodes from the intact file."""
    (place / "intact").mkdir()
    (place / "intact" / "0.jpg").write_bytes(data)
    (place / "p.h5").unlink(missing_ok=True)
    return way(place / "intact", "raise")[0][0]


def _odd_images() -> dict[str, tuple[bytes, np.ndarray | None]]:
    """Return unusual files by name, with the documented result; None if they must be refused."""
    picture = photo(24, 32)
    image = Image.fromarray(picture)
    grey = np.asarray(image.convert("L"))
    deep = np.linspace(0, 65535, 24 * 32).astype(np.uint16).reshape(24, 32)
    alpha = image.convert("RGBA")
    alpha.putalpha(Image.fromarray(np.arange(24 * 32, dtype=np.uint8).reshape(24, 32)))
    palette = image.quantize(16)
    flat, other = (Image.fromarray(np.full((24, 32, 3), value, np.uint8)) for value in (40, 200))

    def rgb(values: np.ndarray) -> np.ndarray:
        return np.repeat(values[:, :, None], 3, 2).astype(np.uint8)

    header = bytearray(saved(picture, "JPEG"))
    frame = header.index(b"\xff\xc0")
    header[frame + 5 : frame + 9] = b"\xff\xff\xff\xff"
    cmyk = saved(image.convert("CMYK"), "JPEG")
    found: dict[str, tuple[bytes, np.ndarray | None]] = {
        "CMYK": (cmyk, np.asarray(Image.open(io.BytesIO(cmyk)).convert("RGB"))),
        "16 bits": (saved(deep, "PNG"), rgb(deep >> 8)),
        "16 bits, TIFF": (saved(deep, "TIFF"), rgb(deep >> 8)),
        "32 bits": (saved(deep.astype(np.int32), "TIFF"), rgb(deep >> 8)),
        "palette": (saved(palette, "PNG"), np.asarray(palette.convert("RGB"))),
        "palette with a transparent color": (saved(palette, "PNG", transparency=3), np.asarray(palette.convert("RGB"))),
        "transparency": (saved(alpha, "PNG"), picture),
        "gray": (saved(image.convert("L"), "PNG"), rgb(grey)),
        "gray with transparency": (saved(image.convert("L").convert("LA"), "PNG"), rgb(grey)),
        "black and white": (saved(image.convert("1"), "PNG"), rgb(np.asarray(image.convert("1")) * 255)),
        "animated GIF": (saved(flat, "GIF", save_all=True, append_images=[other]), np.asarray(flat)),
        "animated PNG": (saved(flat, "PNG", save_all=True, append_images=[other]), np.asarray(flat)),
        "pages of a TIFF": (saved(flat, "TIFF", save_all=True, append_images=[other]), np.asarray(flat)),
        "more pixels than the limit": (bytes(header), None),
        "floating-point numbers": (saved(Image.fromarray(np.zeros((24, 32), np.float32)), "TIFF"), None),
    }
    # The inverse of the rotation or flip that each orientation requests.
    turns: dict[int, Callable[[np.ndarray], np.ndarray]] = {
        2: np.fliplr,
        3: partial(np.rot90, k=2),
        4: np.flipud,
        6: partial(np.rot90, k=1),
        8: partial(np.rot90, k=3),
    }
    for orientation, turn in turns.items():
        stored = np.ascontiguousarray(turn(picture))
        found[f"orientation {orientation}"] = (saved(stored, "PNG", exif=exif(orientation)), picture)
    return found


@fault(36, "unusual images: CMYK, 16 bits, palettes, EXIF, animations, huge", DECODERS)
def odd_images(decoder: Decoder, folder: Path, limit: int) -> Iterator[Result]:
    numbers = itertools.count()

    def work(way: Way, policy: str, data: bytes, expected: np.ndarray | None) -> Outcome | None:
        place = folder / f"case{next(numbers)}"
        source = place / "images"
        source.mkdir(parents=True)
        (source / "0.png").write_bytes(png(photo(24, 32, seed=2)))
        (source / "1.png").write_bytes(data)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                pictures, listed = way(source, policy)
            if listed:
                assert "1.png" in listed[0], f"{listed} is listed as bad"
                assert expected is None, "a valid image is listed as bad"
                return Outcome.DEGRADED
            assert expected is not None, "an image that cannot be represented was decoded"
            assert len(pictures) == 2
            assert distance(pictures[1], expected) <= AGREEMENT, "the picture differs from the documented result"
            return None
        except ColabkitError as error:
            if expected is None and "1.png" in str(error):
                raise
            raise AssertionError(f"an image that can be decoded is refused: {error}") from error
        finally:
            shutil.rmtree(place)

    cases = [
        (f"{name}, {way}, {policy}", partial(work, call, policy, data, expected))
        for name, (data, expected) in _odd_images().items()
        for way, call in decoder.ways.items()
        for policy in decoder.policies
    ]
    yield from attempts(spread(cases, limit), refusals=decoder.refusals)
