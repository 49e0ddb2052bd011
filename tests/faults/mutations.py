"""Damage to files: flipped bits, overwritten bytes, cuts and blocks of zeros, reproducible from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator

BLOCK_BYTES = 4096


def flips(data: bytes, count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield names and copies of `data` with one flipped bit, nine of ten in bytes that are not zero."""
    generator = random.Random(seed)
    used = [at for at, byte in enumerate(data) if byte]
    for number in range(count):
        at = generator.randrange(len(data)) if number % 10 == 9 else generator.choice(used)
        bit = generator.randrange(8)
        changed = bytearray(data)
        changed[at] ^= 1 << bit
        yield f"bit {bit} of byte {at} flipped", bytes(changed)


def overwrites(data: bytes, count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield names and copies of `data` in which some bytes are overwritten, cut out or repeated."""
    generator = random.Random(seed)
    for number in range(count):
        changed = bytearray(data)
        begin = generator.randrange(len(data))
        end = min(len(data), begin + generator.randrange(1, 64))
        action = ("random", "high", "zero", "cut out", "repeated")[number % 5]
        if action == "random":
            changed[begin:end] = generator.randbytes(end - begin)
        elif action == "high":
            changed[begin:end] = b"\xff" * (end - begin)
        elif action == "zero":
            changed[begin:end] = bytes(end - begin)
        elif action == "cut out":
            del changed[begin:end]
        else:
            changed[end:end] = changed[begin:end]
        yield f"bytes {begin} to {end} {action}", bytes(changed)


def cuts(data: bytes, step: int = BLOCK_BYTES) -> Iterator[tuple[str, bytes]]:
    """Yield names and prefixes of `data`: one for every `step` bytes, and all but the last byte."""
    for length in [*range(0, len(data), step), len(data) - 1]:
        yield f"cut to {length} bytes", data[:length]


def zeros(data: bytes, step: int = BLOCK_BYTES) -> Iterator[tuple[str, bytes]]:
    """Yield names and copies of `data` with one block of zeros, for each block that contains other bytes."""
    for begin in range(0, len(data), step):
        if any(data[begin : begin + step]):
            block = bytes(len(data[begin : begin + step]))
            yield f"zeros from byte {begin}", data[:begin] + block + data[begin + step :]
