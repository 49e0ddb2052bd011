"""`verify()` finds every changed bit, and reports exactly the changed samples."""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from packed_files import files_of, flip_byte, packed, photos
from pictures import photo, saved

from colabkit.errors import ColabkitError, Corrupt, FileFailed, InvalidOption
from colabkit.packs.dataset.opened_pack import open_pack
from colabkit.packs.format import mapped_pages
from colabkit.packs.format.layout import PackInfo
from colabkit.packs.format.pack_file import read_pack
from colabkit.packs.packing.verification import verify

FLIPS = 300
FIELDS = {"name": lambda path: path, "wide": lambda path: np.full((3,), len(path)), "where": "path"}
PACKS: dict[str, dict[str, Any]] = {
    "raw": {"encoding": "raw"},
    "source": {"encoding": "source"},
    "jpeg": {"encoding": "jpeg", "on_bad": "blank", "max_bad": 2},
    "raw with fields": {"encoding": "raw", "fields": FIELDS},
    "jpeg with fields": {"encoding": "jpeg", "on_bad": "skip", "max_bad": 2, "fields": FIELDS},
}


@pytest.fixture
def made(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return a pack of 8 training and 4 test photos; if `on_bad` is an option, two of the files are broken."""
    tree = tmp_path / "tree"
    for split, count in (("train", 4), ("test", 2)):
        for label in ("ants", "bees"):
            (tree / split / label).mkdir(parents=True)
            for number in range(count):
                data = saved(photo(20, 30, seed=number), "JPEG")
                (tree / split / label / f"{number}.jpg").write_bytes(data)
    options = PACKS[request.param]
    if "on_bad" in options:
        for number in (0, 7):
            files_of(tree)[number].write_bytes(b"no image")
    return packed(tree, tmp_path / "p.h5", **options)


every = pytest.mark.parametrize("made", PACKS, indirect=True)


def owner(info: PackInfo, at: int) -> tuple[str, int] | None:
    """Return the split and the number of the sample that contains a byte of the file; None if no sample does."""
    for split in info.splits:
        for field in info.sample_fields():
            data = info.data_sets[field.data_set(split)]
            place = at - data.offset
            if not 0 <= place < data.size_bytes:
                continue
            if not field.is_ragged:
                return split, place * info.count(split) // data.size_bytes
            ends = info.table(field.index(split)).sum(axis=1)
            return split, int(np.searchsorted(ends, place, "right"))
    return None


@pytest.mark.full
@every
def test_every_changed_bit_is_found_and_only_its_sample_is_reported(made):
    info = read_pack(made)
    random = np.random.default_rng(4)
    named = 0
    for at, bit in zip(
        random.integers(0, made.stat().st_size, FLIPS).tolist(), random.integers(0, 8, FLIPS).tolist(), strict=True
    ):
        flip_byte(made, at, 1 << bit)
        sample = owner(info, at)
        if sample is None:
            with pytest.raises(ColabkitError):
                verify(made, progress=False)
        else:
            report = verify(made, progress=False)
            assert (report.damaged, report.is_good) == ((sample,), False)
            with pytest.raises(Corrupt, match=rf"{sample[0]}\[{sample[1]}\]"):
                open_pack(made)[sample[0]][sample[1]]
            named += 1
        flip_byte(made, at, 1 << bit)
    assert named > 20
    assert verify(made, progress=False).is_good


@every
def test_all_damaged_samples_are_reported_together(made):
    info = read_pack(made)
    wanted = set()
    for split in info.splits:
        for field in info.sample_fields():
            one = info.data_sets[field.data_set(split)]
            for at in range(one.offset, one.offset + one.size_bytes, max(1, one.size_bytes // 3)):
                flip_byte(made, at, 255)
                wanted.add(owner(info, at))
    report = verify(made, progress=False)
    first = ", ".join(f"{split}[{index}]" for split, index in report.damaged[:5])
    assert f", starting with {first}" in repr(report)
    assert set(report.damaged) == wanted
    assert list(report.damaged) == sorted(report.damaged, key=lambda one: (info.splits.index(one[0]), one[1]))
    assert f"{len(wanted)} of {sum(map(info.count, info.splits))} samples" in repr(report)


@pytest.mark.parametrize("kind", ["raw", "source", "jpeg"])
def test_the_report_of_an_intact_pack(tmp_path, kind):
    path = packed(photos(tmp_path / "tree"), tmp_path / "p.h5", encoding=kind)
    report = verify(str(path), progress=False)
    assert (report.path, report.samples, report.damaged, report.is_good) == (path, 12, (), True)
    assert repr(report) == f"{str(path)!r} is intact: 12 samples match their checksums"


def test_a_pack_at_an_address_is_to_be_fetched_first():
    with pytest.raises(InvalidOption, match=r"'gs://bucket/birds.h5': it is an address.*colabkit\.fetch") as caught:
        verify("gs://user:secret@bucket/birds.h5")
    assert "secret" not in str(caught.value)


def test_a_part_of_the_samples_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    def failing(*_: int) -> int:
        ctypes.set_errno(errno.EFAULT)
        return -1

    path = packed(photos(tmp_path / "tree"), tmp_path / "p.h5", encoding="raw")
    monkeypatch.setattr(mapped_pages, "find_madvise", lambda: failing)
    with pytest.raises(FileFailed, match=f"Cannot verify '{path}': "):
        verify(path, progress=False)


def test_tables_are_not_mapped_because_an_io_error_of_a_map_kills_the_process(tmp_path, monkeypatch):
    info = read_pack(packed(photos(tmp_path / "tree"), tmp_path / "p.h5", encoding="raw"))
    monkeypatch.setattr(np, "memmap", Mock(side_effect=AssertionError))
    assert info.table("Y_train").tolist() == [0] * 4 + [1] * 4 + [2] * 4
