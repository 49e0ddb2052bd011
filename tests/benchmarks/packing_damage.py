"""Damage a pack and report which check finds it: `python packing_damage.py flips|mutations PACK FIRST LAST`.

The benchmark runs this script in a separate process, which a damaged file might crash. The script prints one line of
JSON for each damaged copy immediately. The copy's number and the kind of damage determine all randomness, so that a
crash can be repeated.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import colabkit
from colabkit.errors import ColabkitError

MAX_BLOCK = 4096
Mutation = Callable[[bytes, random.Random], bytes]


def main() -> None:
    kind, name, first, last = sys.argv[1:]
    original = Path(name)
    whole = original.read_bytes()
    regions = regions_of(original)
    expected = content(original)
    with tempfile.TemporaryDirectory(dir=original.parent) as folder:
        for number in range(int(first), int(last)):
            chance = random.Random(f"{kind} {number}")
            if kind == "flips":
                what, data = flipped(whole, regions, number, chance)
            else:
                what = list(MUTATIONS)[number % len(MUTATIONS)]
                data = MUTATIONS[what](whole, chance)
            damaged = Path(folder) / f"{number}.h5"
            damaged.write_bytes(data)
            print(json.dumps([number, what, "same bytes" if data == whole else outcome(damaged, expected)]), flush=True)
            damaged.unlink()


def regions_of(path: Path) -> dict[str, list[tuple[int, int]]]:
    """Return the byte ranges of each part of a pack: the seal, the structures and padding, the tables, the samples."""
    info = colabkit.open_pack(path).info
    length = path.stat().st_size
    regions: dict[str, list[tuple[int, int]]] = {"seal": [(0, 4096)], "structures": [], "tables": [], "samples": []}
    position = 4096
    for one in sorted(info.data_sets.values(), key=lambda one: one.offset):
        if one.size_bytes:
            end = one.offset + one.size_bytes
            regions["tables" if one.name in info.table_crcs else "samples"].append((one.offset, end))
            regions["structures"].append((position, one.offset))
            position = end
    regions["structures"].append((position, length))
    return {name: [span for span in spans if span[0] < span[1]] for name, spans in regions.items()}


def flipped(
    whole: bytes, regions: dict[str, list[tuple[int, int]]], number: int, chance: random.Random
) -> tuple[str, bytes]:
    """Flip one bit: for odd numbers anywhere in the file, for even numbers in each part in turn."""
    if number % 2:
        place = chance.randrange(len(whole))
        what = next(name for name, spans in regions.items() if any(start <= place < end for start, end in spans))
    else:
        what = list(regions)[number // 2 % len(regions)]
        spans = regions[what]
        start, end = chance.choices(spans, [end - start for start, end in spans])[0]
        place = chance.randrange(start, end)
    data = bytearray(whole)
    data[place] ^= 1 << chance.randrange(8)
    return what, bytes(data)


def outcome(path: Path, expected: str) -> str:
    """Return the first check that finds the damage; if none does, "equal" or, if data changed, "SILENT".

    An error that is not a `ColabkitError` gives "UNTYPED" and the error.
    """
    step = "open"
    try:
        pack = colabkit.open_pack(path)
        step = "split"
        for split in pack:
            pack[split]
        step = "verify"
        if not colabkit.verify(path, progress=False).is_good:
            return step
        step = "read"
        return "equal" if content(path) == expected else "SILENT"
    except ColabkitError:
        return step
    except Exception as error:
        return f"UNTYPED {type(error).__name__} by {step}: {error}"


def content(path: Path) -> str:
    """Return a digest of everything that a reader of the pack receives."""
    pack = colabkit.open_pack(path)
    digest = hashlib.sha256(repr(pack.classes).encode())
    for split, dataset in pack.items():
        digest.update(f"{split} {len(dataset)}".encode())
        for index in range(len(dataset)):
            image, label = dataset[index]
            digest.update(f"{tuple(image.shape)} {int(label)}".encode() + image.numpy().tobytes())
    return digest.hexdigest()


def span(whole: bytes, chance: random.Random) -> tuple[int, int]:
    """Return the start and end of a random block; most blocks begin in the first pages, which hold the structures."""
    start = chance.randrange(len(whole) if chance.random() < 0.5 else min(len(whole), 4 * MAX_BLOCK))
    return start, min(len(whole), start + chance.randint(1, MAX_BLOCK))


def zero_tail(whole: bytes, chance: random.Random) -> bytes:
    """Overwrite the end of a file with zeros and keep its length, as after a system crash."""
    saved = chance.randrange(len(whole))
    return whole[:saved] + bytes(len(whole) - saved)


def block(change: Callable[[bytes, int, int, random.Random], bytes]) -> Mutation:
    """Return a function that changes a random block of a file, given its start and end."""
    return lambda whole, chance: change(whole, *span(whole, chance), chance)


def moved(whole: bytes, start: int, end: int, chance: random.Random) -> bytes:
    """Copy a block over another part of the file."""
    to = chance.randrange(len(whole) - (end - start) + 1)
    return whole[:to] + whole[start:end] + whole[to + end - start :]


def many_bits(whole: bytes, chance: random.Random) -> bytes:
    data = bytearray(whole)
    for _ in range(chance.randint(2, 100)):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(data)


def numbers_edited(whole: bytes, chance: random.Random) -> bytes:
    """Replace one to four digits of the seal with random digits."""
    data = bytearray(whole)
    digits = [place for place in range(4096) if whole[place : place + 1].isdigit()]
    for place in chance.sample(digits, min(len(digits), chance.randint(1, 4))):
        data[place] = ord(chance.choice("0123456789"))
    return bytes(data)


MUTATIONS: dict[str, Mutation] = {
    "truncated": lambda whole, chance: whole[: chance.randrange(len(whole))],
    "truncated early": lambda whole, chance: whole[: chance.randrange(4 * MAX_BLOCK)],
    "truncated late": lambda whole, chance: whole[: -chance.randint(1, MAX_BLOCK)],
    "end zeroed": zero_tail,
    "extended": lambda whole, chance: whole + chance.randbytes(chance.randint(1, MAX_BLOCK)),
    "block zeroed": block(lambda whole, start, end, _: whole[:start] + bytes(end - start) + whole[end:]),
    "block overwritten": block(
        lambda whole, start, end, chance: whole[:start] + chance.randbytes(end - start) + whole[end:]
    ),
    "block removed": block(lambda whole, start, end, _: whole[:start] + whole[end:]),
    "block doubled": block(lambda whole, start, end, _: whole[:end] + whole[start:]),
    "block moved": block(moved),
    "many bits": many_bits,
    "seal edited": numbers_edited,
}

if __name__ == "__main__":
    main()
