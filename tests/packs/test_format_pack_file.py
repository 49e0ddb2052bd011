"""Pack files are plain HDF5 files, are sealed last, and never return damaged samples without an error."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path
from zlib import crc32

import h5py
import numpy as np
import pytest
from contract import make_pack, whole_content
from hdf5_files import ODD
from packed_files import META

from colabkit.errors import BadSource, ColabkitError, Corrupt, NotSealed, SourceMissing
from colabkit.packs.dataset.opened_pack import open_pack
from colabkit.packs.format.layout import DataSet
from colabkit.packs.format.pack_file import create_pack, read_pack, seal_pack
from colabkit.packs.packing.verification import verify


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return make_pack(tmp_path / "made.h5", train=6, dev=3)


def outcome(path: Path, original: tuple[object, ...]) -> str:
    """Return colabkit's reaction to a changed pack.

    "refused": reading the pack raises an error; "named": `verify()` lists damaged samples; "meaningless": the content
    is unchanged; "silent": changed content is not detected.
    """
    try:
        found = whole_content(path)
        damaged = verify(path, progress=False).damaged
    except (BadSource, NotSealed, Corrupt):
        return "refused"
    if found == original:
        assert not damaged
        return "meaningless"
    return "named" if damaged else "silent"


def layouts(count: int = 2) -> tuple[DataSet, ...]:
    return (
        DataSet("X_train", (count, 2, 2, 3), "|u1"),
        DataSet("Y_train", (count,), "<i8"),
        DataSet("crc_train", (count,), "<u4"),
    )


def test_a_pack_is_plain_contiguous_hdf5(packed):
    info = read_pack(packed)
    with h5py.File(packed) as file:
        assert set(file) == {f"{field}_{split}" for field in ("X", "Y", "crc") for split in ("train", "dev")}
        for name, dataset in file.items():
            assert dataset.chunks is None
            assert dataset.compression is None
            assert dataset.id.get_create_plist().get_layout() == h5py.h5d.CONTIGUOUS
            assert dataset.id.get_offset() == info.data_sets[name].offset
            assert np.array_equal(dataset[()], info.map(name))
        assert file["X_train"].shape == (6, 4, 3, 3)
        assert file["X_train"].dtype == np.uint8
        assert file["Y_train"].dtype == np.int64
        assert file["crc_train"].dtype == np.uint32


def test_fields_are_aligned_to_their_type_large_ones_to_a_page_and_none_overlap(tmp_path):
    path = make_pack(tmp_path / "large.h5", (32, 32, 3), train=50, dev=9, test=2)
    fields = sorted(read_pack(path).data_sets.values(), key=lambda field: field.offset)
    large = [field for field in fields if field.size_bytes >= 4096]
    assert {field.name for field in large} == {"X_train", "X_dev", "X_test"}
    assert all(field.offset % 4096 == 0 for field in large)
    assert fields[0].offset >= 0
    assert [field.name for field in fields if field.offset % np.dtype(field.dtype).itemsize] == []
    for field, following in itertools.pairwise(fields):
        assert field.offset + field.size_bytes <= following.offset
    assert fields[-1].offset + fields[-1].size_bytes <= path.stat().st_size


def test_splits_are_in_the_standard_order_regardless_of_how_they_were_written(tmp_path):
    assert read_pack(make_pack(tmp_path / "p.h5", test=1, dev=1, train=1)).splits == ("train", "dev", "test")


def test_maps_are_read_only_and_keep_no_hdf5_handle_open(packed):
    samples = read_pack(packed).map("X_train")
    with pytest.raises(ValueError, match="read-only"):
        samples[0] = 0
    # HDF5 refuses to open a file for writing while it is still open for reading.
    with h5py.File(packed, "r+"):
        pass


def test_an_empty_field_can_be_mapped(tmp_path):
    path = make_pack(tmp_path / "empty.h5", train=3, dev=0)
    assert read_pack(path).map("X_dev").shape == (0, 4, 3, 3)
    assert read_pack(path).table("Y_dev").shape == (0,)


def test_metadata_of_any_size_and_script_is_read_unchanged(tmp_path):
    meta = {**META, "left_out": [[f"ordner/größe-{number}.txt", "kein Bild ✗"] for number in range(3000)]}
    path = tmp_path / "p.h5"
    placed, crcs = create_pack(path, layouts(), meta)
    seal_pack(path, placed.values(), {"Y_train": 0, "crc_train": 0, **crcs})
    assert read_pack(path).meta == meta


def test_an_unsealed_file_raises_and_sealing_keeps_the_reserved_length(tmp_path):
    path = tmp_path / "p.h5"
    placed, _ = create_pack(path, layouts(), META)
    with pytest.raises(NotSealed, match="never finished"):
        read_pack(path)
    reserved = path.stat()
    assert reserved.st_blocks * 512 >= reserved.st_size
    seal = seal_pack(path, placed.values(), {"Y_train": 0xFFFFFFFF, "crc_train": 0})
    assert path.stat().st_size == reserved.st_size
    assert read_pack(path).seal == seal


def test_seals_are_equal_only_for_equal_contents(tmp_path):
    seals = [read_pack(make_pack(tmp_path / f"{n}.h5", train=train)).seal for n, train in enumerate((6, 6, 7))]
    assert seals[0] == seals[1] != seals[2]


def test_another_format_version_and_changed_metadata_raise(packed):
    with h5py.File(packed, "r+") as file:
        file.attrs.modify("colabkit_meta", "{}")
    with pytest.raises(Corrupt):
        read_pack(packed)
    packed.write_bytes(packed.read_bytes().replace(b"colabkit pack 2\n", b"colabkit pack 3\n", 1))
    with pytest.raises(NotSealed, match="pack format 3"):
        read_pack(packed)


@pytest.mark.parametrize(
    ("about", "changed"),
    [
        *(({name: None}, ()) for name in META if name not in ("sample_shape", "channels")),
        ({"splits": {}}, ()),
        ({"splits": {"train": "two"}}, ()),
        ({"fields": {"Y": ["labels", False]}}, ()),
        ({"sample_shape": [2, "2", 3]}, ()),
        ({"fields": {"X": ["image", True], "Y": ["labels", False]}}, (DataSet("X_train_index", (2,), "<i8"),)),
        ({"fields": {"X": ["image", True], "Y": ["labels", False]}}, (DataSet("X_train_index", (2, 2), "<f8"),)),
        ({}, (DataSet("X_train", (), "|u1"),)),
        ({}, (DataSet("Y_train", (2,), "|S4"),)),
        ({}, (DataSet("crc_train", (2,), "|S4"),)),
        ({}, (DataSet("crc_train", (2, 1), "<u4"),)),
    ],
)
def test_a_sealed_pack_with_inconsistent_contents_is_corrupt(tmp_path, about, changed):
    meta = {name: value for name, value in {**META, **about}.items() if value is not None}
    data_sets = {one.name: one for one in (*layouts(), *changed)}
    placed, crcs = create_pack(tmp_path / "p.h5", data_sets.values(), meta)
    tables = {name: crc32(bytes(one.size_bytes)) for name, one in placed.items() if name != "X_train"}
    seal_pack(tmp_path / "p.h5", placed.values(), {**crcs, **tables})
    with pytest.raises(Corrupt):
        open_pack(tmp_path / "p.h5")


def test_labels_and_crcs_must_be_covered_by_the_seal(tmp_path):
    for sealed in ("Y_train", "crc_train"):
        path = tmp_path / f"{sealed}.h5"
        placed, _ = create_pack(path, layouts(), META)
        seal_pack(path, placed.values(), {sealed: 0})
        with pytest.raises(Corrupt, match=r"the table '(Y|crc)_train' is invalid"):
            read_pack(path)


def test_bytes_outside_the_datasets_are_hashed_in_little_memory(tmp_path):
    path = tmp_path / "p.h5"
    placed, _ = create_pack(path, (*layouts(), DataSet("Z_train", (1 << 26,), "|u1")), META)
    kept = [one for one in placed.values() if one.name != "Z_train"]
    tracemalloc.start()
    seal_pack(path, kept, {"Y_train": 0, "crc_train": 0})
    read_pack(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_files_that_are_not_packs_raise_with_the_reason(tmp_path):
    for path in (tmp_path, tmp_path / "none.h5", tmp_path / "none" / "none.h5"):
        with pytest.raises(SourceMissing, match=r"the file does not exist|it is a folder"):
            read_pack(path)
    for data in (b"", b"x", b"PK\x03\x04" * 100, b"\x89HDF", b"\0" * 5000):
        (tmp_path / "p.h5").write_bytes(data)
        with pytest.raises(BadSource, match="not an HDF5 file" if data else "the file is empty"):
            read_pack(tmp_path / "p.h5")
    with h5py.File(tmp_path / "p.h5", "w") as file:
        file["X_train"] = np.zeros((3, 2, 2, 3), np.uint8)
    with pytest.raises(NotSealed, match=r"without colabkit's seal.* Open it unverified in Python with open_pack"):
        read_pack(tmp_path / "p.h5")


@pytest.mark.parametrize("add", ODD.values(), ids=ODD)
def test_links_and_datasets_that_are_not_contiguous_are_corrupt(tmp_path, packed, add):
    other = make_pack(tmp_path / "other.h5", (2, 2, 3), train=2)
    path = tmp_path / "p.h5"
    placed, _ = create_pack(path, layouts(), META)
    for target in (path, packed):
        with h5py.File(target, "r+") as file:
            add(file, other)
    seal_pack(path, placed.values(), {"Y_train": 0, "crc_train": 0})
    with pytest.raises(Corrupt, match="'Z_train' is not"):
        read_pack(path)
    with pytest.raises(Corrupt):
        read_pack(packed)


def test_hdf5_never_parses_a_pack_that_does_not_match_its_seal(packed, monkeypatch):
    data = bytearray(packed.read_bytes())
    # The HDF5 superblock begins after the seal.
    data[4096 + 20] ^= 1
    packed.write_bytes(data)
    monkeypatch.setattr(h5py, "File", lambda *_, **__: pytest.fail("parsed"))
    for read in (read_pack, open_pack):
        with pytest.raises(Corrupt, match="do not match the seal"):
            read(packed)


def test_a_truncated_or_extended_pack_raises(tmp_path, packed):
    data = packed.read_bytes()
    for length in {*range(0, len(data), 97), *range(4), len(data) - 1, len(data) - 4096}:
        (tmp_path / "cut.h5").write_bytes(data[:length])
        with pytest.raises((BadSource, NotSealed, Corrupt)):
            read_pack(tmp_path / "cut.h5")
    packed.write_bytes(data + b"\0")
    with pytest.raises(Corrupt):
        read_pack(packed)


def test_a_block_of_zeros_is_detected_unless_it_was_empty(tmp_path, packed):
    original, data = whole_content(packed), packed.read_bytes()
    path = tmp_path / "q.h5"
    for start in range(0, len(data), 512):
        path.write_bytes(data[:start] + bytes(512) + data[start + 512 :])
        found = outcome(path, original)
        assert found in ("refused", "named") or (found == "meaningless" and not any(data[start : start + 512])), start


def test_random_damage_is_always_detected(tmp_path, packed):
    original, data = whole_content(packed), packed.read_bytes()
    seeded = random.Random(5)
    used = [position for position, byte in enumerate(data) if byte]
    path = tmp_path / "q.h5"
    seen = set()
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(seeded.randint(1, 20)):
            changed[seeded.choice(used)] = seeded.randrange(256)
        path.write_bytes(changed)
        seen.add(outcome(path, original))
    assert seen >= {"refused", "named"}
    assert "silent" not in seen


def test_every_single_bit_flip_is_detected_or_harmless(tmp_path, packed):
    """Each flip raises an error, is reported for its sample, or does not change the pack's content."""
    original, data = whole_content(packed), packed.read_bytes()
    seeded = random.Random(6)
    used = [position for position, byte in enumerate(data) if byte]
    positions = {*seeded.sample(used, 400), *seeded.sample(range(len(data)), 100)}
    path = tmp_path / "q.h5"
    for position in sorted(positions):
        changed = bytearray(data)
        changed[position] ^= 1 << seeded.randrange(8)
        path.write_bytes(changed)
        assert outcome(path, original) != "silent", position


@pytest.mark.parametrize("split", ["train", "dev"])
def test_every_flip_inside_a_field_is_detected_and_samples_are_named(packed, split):
    info = read_pack(packed)
    data = packed.read_bytes()
    seeded = random.Random(7)
    for name in (f"X_{split}", f"Y_{split}", f"crc_{split}"):
        field = info.data_sets[name]
        for inside in seeded.sample(range(field.size_bytes), 12):
            changed = bytearray(data)
            changed[field.offset + inside] ^= 1 << seeded.randrange(8)
            packed.write_bytes(changed)
            if name.startswith("X_"):
                index = inside // (field.size_bytes // field.shape[0])
                assert verify(packed, progress=False).damaged == ((split, index),)
            else:
                with pytest.raises(Corrupt, match=f"the table {name!r} does not match"):
                    verify(packed, progress=False)


def test_reading_a_pack_does_not_import_torch(packed):
    code = "import sys; from pathlib import Path; from colabkit.packs.format.pack_file import read_pack; "
    code += "read_pack(Path(sys.argv[1])); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, str(packed)], check=False).returncode == 0


def test_every_error_is_a_colabkit_error_with_a_next_step(tmp_path, packed):
    packed.write_bytes(packed.read_bytes()[:-1])
    (tmp_path / "text.h5").write_text("text")
    create_pack(tmp_path / "open.h5", layouts(), META)
    for path in (packed, tmp_path / "text.h5", tmp_path / "open.h5", tmp_path / "none.h5"):
        with pytest.raises(ColabkitError) as caught:
            read_pack(path)
        assert str(caught.value).startswith(f"Cannot open {str(path)!r}: ")
        assert str(caught.value).endswith(".")
