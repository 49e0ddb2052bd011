"""The files and variables of the table of mistakes: a small home folder with good and bad data."""

from __future__ import annotations

import ctypes
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from PIL import Image
from torch import nn
from trees import make_tree

import colabkit

_DAC_OVERRIDE_AND_READ_SEARCH = 0b110
_CAPABILITY_VERSION = 0x20080522

CODE = """
import colabkit, torch
data = colabkit.open_pack("birds.h5")["train"]
loader = colabkit.Loader(data, 4)
model = colabkit.small_network(3, (6, 5, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = colabkit.supervised_step(model, optimizer)
def own(batch): return 0.5
def pair(x, y): return 0.5
"""
"""The variables of the Python mistakes, and `steps.py` of the command line."""


def make_home(home: Path) -> None:
    make_tree(home / "photos", 4)
    (home / "steps.py").write_text(CODE)
    (home / "broken.py").write_text("import colabkit\nloader = colabkit.Loadr\n")
    for name in ("flat", "empty", "notes", "cats.h5", "one/ants", "secret", "sealed", "heic/ants", "bad/ants"):
        (home / name).mkdir(parents=True)
    for number in range(4):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(home / "flat" / f"{number}.png")
        Image.new("RGB", (8, 8), (number, 0, 0)).save(home / "one" / "ants" / f"{number}.png")
        heic = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes([number] * 64)
        (home / "heic" / "ants" / f"{number}.heic").write_bytes(heic)
        Image.new("RGB", (8, 8 + number), (number, 0, 0)).save(home / "bad" / "ants" / f"{number}.png")
    make_tree(home / "mixed", 2)
    Image.new("RGB", (9, 7)).save(home / "mixed" / "ants" / "big.png")
    make_tree(home / "spoiled", 2)
    (home / "spoiled" / "bees" / "001.png").write_text("not an image")
    make_tree(home / "bomb", 1)
    (home / "bomb" / "ants" / "000.png").write_bytes(_bomb(60_000, 50_000))
    (home / "notes" / "a.txt").write_text("a")
    (home / "notes.txt").write_text("just text")
    (home / "secret" / "a.png").write_bytes((home / "flat" / "0.png").read_bytes())
    rows = [f"photos/{name}/{number:03d}.png,{name},{number}" for name in ("ants", "bees") for number in range(4)]
    (home / "birds.csv").write_text("\n".join(["path,label,age", *rows]))
    (home / "gone.csv").write_text(
        "\n".join(["path,label", *[row.rpartition(",")[0] for row in rows], "photos/x.png,ants"])
    )
    scores = [f"{number},{number:03d}.png,{number / 7},{'ab'[number % 2]}" for number in range(4)]
    (home / "scores.csv").write_text("\n".join(["id,where_is_it,score,kind", *scores]))
    (home / "names.csv").write_text("name,kind\na,ants\nb,bees\n")
    pixels = np.random.default_rng(1).integers(0, 255, (12, 6, 5, 3), np.uint8)
    colabkit.pack({"X": pixels, "Y": np.arange(12) % 3}, home / "birds.h5", progress=False)
    whole = (home / "birds.h5").read_bytes()
    (home / "cut.h5").write_bytes(whole[:1000])
    spoiled = bytearray(whole)
    spoiled[5000] ^= 255
    (home / "spoiled.h5").write_bytes(spoiled)
    with h5py.File(home / "theirs.h5", "w") as file:
        file["pixels"] = np.zeros((5, 4, 4), np.uint8)
        file["answers"] = np.zeros(4, np.int64)
    (home / "cut.zip").write_bytes(b"PK\3\4" + bytes(60))
    (home / "secret").chmod(0)
    (home / "sealed").chmod(0o555)


def _bomb(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def variables() -> dict[str, Any]:
    namespace: dict[str, Any] = {"np": np, "nn": nn, "Path": Path, "pixels": np.zeros((2, 6, 5, 3), np.uint8)}
    exec(CODE, namespace)
    return namespace


@contextmanager
def without_privileges() -> Iterator[None]:
    """Enforce file permissions in this thread, and in threads that it starts, even if root runs the tests."""
    if os.geteuid():
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    head = struct.pack("<II", _CAPABILITY_VERSION, 0)
    before = ctypes.create_string_buffer(24)
    libc.capget(head, before)
    words = list(struct.unpack("<6I", before.raw))
    words[0] &= ~_DAC_OVERRIDE_AND_READ_SEARCH
    libc.capset(head, struct.pack("<6I", *words))
    try:
        yield
    finally:
        libc.capset(head, before.raw)
