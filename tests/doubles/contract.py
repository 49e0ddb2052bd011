"""Small sealed packs, and the contract of resumable streams."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from colabkit.errors import ColabkitError
from colabkit.packs.format.layout import DataSet
from colabkit.packs.format.pack_file import create_pack, read_pack, seal_pack

Samples = list[Any]


def make_pack(
    path: Path, shape: tuple[int, ...] = (4, 3, 3), dtype: str = "|u1", seed: int = 11, **counts: int
) -> Path:
    """Seal a pack of random but reproducible samples, as in `make_pack(path, train=40, dev=7)`, and return its path.

    Samples with three dimensions are images, others are arrays; labels cycle through the classes 0, 1 and 2.
    """
    random = np.random.default_rng(seed)
    samples = {split: random.integers(0, 256, (count, *shape)).astype(dtype) for split, count in counts.items()}
    labels = {split: np.arange(count, dtype="<i8") % 3 for split, count in counts.items()}
    return seal_fields(path, {"X": samples, "Y": labels}, {"X": "image" if len(shape) == 3 else "array"}, "class")


def seal_fields(
    path: Path,
    fields: dict[str, dict[str, Any]],
    contents: dict[str, str],
    label_kind: str,
    tables: tuple[str, ...] = (),
    **meta: Any,
) -> Path:
    """Seal a pack of the given fields, by name and split, and return its path.

    A list of `bytes` becomes a ragged field. `contents` maps each field except the labels `Y` to its content, such as
    `"image"`. The labels and the fields in `tables` have separate CRCs; the CRC of each sample covers the other fields.
    """
    arrays: dict[str, np.ndarray] = {}
    counts = {split: len(values) for split, values in fields["X"].items()}
    ragged = {name: isinstance(next(iter(of_split.values())), list) for name, of_split in fields.items()}
    for split, count in counts.items():
        crcs = [0] * count
        for name, of_split in fields.items():
            values = of_split[split]
            if ragged[name]:
                lengths = np.array([len(value) for value in values], "<i8")
                arrays[f"{name}_{split}"] = np.frombuffer(b"".join(values), "|u1")
                arrays[f"{name}_{split}_index"] = np.stack([lengths.cumsum() - lengths, lengths], 1).astype("<i8")
            else:
                arrays[f"{name}_{split}"] = values
            if name != "Y" and name not in tables:
                blobs = values if ragged[name] else [values[row, ...].tobytes() for row in range(count)]
                crcs = [crc32(blob, crc) for blob, crc in zip(blobs, crcs, strict=True)]
        arrays[f"crc_{split}"] = np.array(crcs, "<u4")
    first = next(iter(fields["X"].values()))
    description = {
        "source": "made",
        "encoding": "source" if ragged["X"] else "raw" if contents["X"] == "image" else "array",
        "fields": {name: [contents.get(name, "labels"), ragged[name]] for name in fields},
        "classes": ["a", "b", "c"] if label_kind in ("class", "multilabel") else [],
        "label_kind": label_kind,
        "splits": counts,
        "sample_shape": None if ragged["X"] else list(first.shape[1:]),
        "channels": 3,
        "options": {},
        "left_out": [],
        "bad": [],
        **meta,
    }
    placed, crcs_of_tables = create_pack(
        path, [DataSet(n, a.shape, a.dtype.str) for n, a in arrays.items()], description
    )
    with path.open("r+b") as file:
        for name, array in arrays.items():
            file.seek(placed[name].offset)
            file.write(array.tobytes())
    checked = {f"{name}_{split}" for name in fields for split in counts if name != "Y" and name not in tables}
    table_crcs = {name: crc32(array.tobytes()) for name, array in arrays.items() if name not in checked}
    seal_pack(path, placed.values(), {**crcs_of_tables, **table_crcs})
    return path


def seal_every_kind(path: Path, images: np.ndarray) -> Path:
    """Seal a pack of training images with fields of every kind, two of them in tables, and return its path."""
    count, random = len(images), np.random.default_rng(4)
    fields = {
        "X": {"train": images},
        "Y": {"train": np.arange(count) % 3},
        "Z": {"train": random.normal(size=(count, 2, 4)).astype("<f4")},
        "caption": {"train": [f"Größe {number}".encode() for number in range(count)]},
        "raw": {"train": [bytes(range(number)) for number in range(count)]},
        "age": {"train": np.arange(count, dtype="<i2")},
        "code": {"train": np.array([f"é{number}".encode() for number in range(count)], "S4")},
    }
    contents = {"X": "image", "Z": "array", "caption": "text", "raw": "bytes", "age": "array", "code": "text"}
    return seal_fields(path, fields, contents, "class", tables=("age", "code"))


def make_shards(path: Path, *counts: dict[str, int], shape: tuple[int, ...] = (4, 3, 3), **meta: Any) -> Path:
    """Seal one shard for each of `counts`, the sample counts by split, then their index; return the index's path."""
    shards, labels = [], {}
    for number, count in enumerate(counts):
        shard = make_pack(path.with_name(f"{path.stem}-{number:05d}.h5"), shape, seed=number, **count)
        info = read_pack(shard)
        shards.append({"name": shard.name, "seal": info.seal, "splits": count, "length": shard.stat().st_size})
        for split in count:
            labels.setdefault(split, []).append(info.map(f"Y_{split}"))
    whole = {f"Y_{split}": np.concatenate(some) for split, some in labels.items()}
    splits = {split: len(whole[f"Y_{split}"]) for split in labels}
    description = {**info.meta, "splits": splits, "shards": shards, **meta}
    placed, crcs = create_pack(path, [DataSet(name, a.shape, a.dtype.str) for name, a in whole.items()], description)
    with path.open("r+b") as file:
        for name, array in whole.items():
            file.seek(placed[name].offset)
            file.write(array.tobytes())
    seal_pack(path, placed.values(), {**crcs, **{name: crc32(array.tobytes()) for name, array in whole.items()}})
    return path


def whole_content(path: Path) -> tuple[object, ...]:
    """Return everything that a pack contains, for comparisons."""
    info = read_pack(path)
    content = {name: info.map(name).tobytes() for name in info.data_sets}
    tables = {name: info.table(name).tobytes() for name in info.table_crcs}
    return info.data_sets, info.meta, info.table_crcs, info.seal, info.splits, content, tables


class StreamContract:
    """The contract of streams, which yield batches for several epochs and resume from a saved state.

    A test class inherits from this class and defines `make`, `samples` and `everything`. `dropped` is the number of
    samples that each epoch leaves out.
    """

    dropped = 0

    def make(self, fail_at: int | None = None) -> Any:
        """Return a new but equal stream of several batches; batch `fail_at`, from 0, raises the error "planned"."""
        raise NotImplementedError

    def samples(self, batch: Any) -> Samples:
        """Return the samples of a batch as comparable, hashable values."""
        raise NotImplementedError

    def everything(self) -> Samples:
        """Return all samples of the data, including those that an epoch leaves out, in any order."""
        raise NotImplementedError

    def assert_whole(self, got: Samples) -> None:
        assert len(got) == len(set(got)) == len(self.everything()) - self.dropped
        assert set(got) <= set(self.everything())

    def epoch(self, stream: Any) -> Samples:
        return [sample for batch in stream for sample in self.samples(batch)]

    def first(self, stream: Any, batches: int) -> Samples:
        """Take some batches of the next epoch, stop, and return their samples."""
        got: Samples = []
        if batches:
            for number, batch in enumerate(stream, 1):
                got += self.samples(batch)
                if number == batches:
                    break
        return got

    def resumed(self, state: dict[str, Any]) -> Any:
        """Return a new stream that resumes from a state after it was saved to a file and loaded."""
        stream = self.make()
        stream.load_state_dict(json.loads(json.dumps(state)))
        return stream

    def batches(self) -> int:
        return sum(1 for _ in self.make())

    def test_every_epoch_yields_every_sample_once(self):
        stream = self.make()
        for _ in range(2):
            self.assert_whole(self.epoch(stream))

    def test_equal_streams_yield_equal_epochs(self):
        one, other = self.make(), self.make()
        for _ in range(3):
            assert self.epoch(one) == self.epoch(other)

    def test_resume_at_every_position_equals_the_uninterrupted_stream(self):
        reference = self.make()
        expected = [self.epoch(reference) for _ in range(3)]
        for stop in range(self.batches() + 1):
            stream = self.make()
            before = self.epoch(stream) + self.first(stream, stop)
            after = self.resumed(stream.state_dict())
            rest = [] if stop == self.batches() else self.epoch(after)
            assert before + rest == expected[0] + expected[1]
            assert self.epoch(after) == expected[2]

    def test_resume_twice_in_one_epoch_keeps_the_first_offset(self):
        expected = self.epoch(self.make())
        for once in range(self.batches()):
            for again in range(1, self.batches() - once):
                stream = self.make()
                got = self.first(stream, once)
                stream = self.resumed(stream.state_dict())
                got += self.first(stream, again)
                stream = self.resumed(stream.state_dict())
                assert got + self.epoch(stream) == expected

    def test_resume_at_the_end_of_an_epoch_yields_the_complete_next_epoch(self):
        stream = self.make()
        self.epoch(stream)
        assert self.epoch(self.resumed(stream.state_dict())) == self.epoch(stream) != []

    def test_resume_after_the_last_batch_of_an_unfinished_iteration_yields_the_next_epoch(self):
        stream, reference = self.make(), self.make()
        self.first(stream, self.batches())
        self.epoch(reference)
        assert self.epoch(self.resumed(stream.state_dict())) == self.epoch(reference) != []

    def test_a_loaded_state_applies_to_one_epoch_only(self):
        stream, reference = self.make(), self.make()
        self.first(stream, 1)
        resumed = self.resumed(stream.state_dict())
        self.epoch(reference)
        self.epoch(resumed)
        assert self.epoch(resumed) == self.epoch(reference)

    def test_a_loaded_state_is_returned_until_it_is_used(self):
        stream = self.make()
        self.first(stream, 2)
        state = stream.state_dict()
        assert self.resumed(state).state_dict() == state

    def test_a_break_keeps_the_position_for_the_state(self):
        stream = self.make()
        expected = self.epoch(self.make())
        got = self.first(stream, 2)
        assert got + self.epoch(self.resumed(stream.state_dict())) == expected

    def test_a_break_in_a_resumed_epoch_also_keeps_the_position(self):
        stream = self.make()
        expected = self.epoch(self.make())
        got = self.first(stream, 1)
        stream = self.resumed(stream.state_dict())
        got += self.first(stream, 1)
        assert got + self.epoch(self.resumed(stream.state_dict())) == expected

    def test_a_new_iteration_after_a_break_is_the_complete_next_epoch(self):
        stream, reference = self.make(), self.make()
        self.first(stream, 1)
        self.epoch(reference)
        assert self.epoch(stream) == self.epoch(reference)

    def test_batches_that_were_prefetched_but_not_received_do_not_count(self):
        stream = self.make()
        expected = self.epoch(self.make())
        running = iter(stream)
        for taken in range(1, self.batches()):
            next(running)
            rest = self.epoch(self.resumed(stream.state_dict()))
            assert len(rest) < len(expected)
            assert rest == expected[-len(rest) :]
            assert len(self.first(self.make(), taken)) == len(expected) - len(rest)
        running.close()

    def test_a_stop_loses_and_repeats_no_samples(self):
        for stop in range(1, self.batches()):
            stream = self.make()
            got = self.first(stream, stop)
            self.assert_whole(got + self.epoch(self.resumed(stream.state_dict())))

    def test_a_state_is_a_snapshot(self):
        stream = self.make()
        self.first(stream, 1)
        state = stream.state_dict()
        saved = pickle.dumps(state)
        self.epoch(stream)
        assert pickle.dumps(state) == saved
        assert stream.state_dict() != state

    def test_states_are_small_and_saving_them_changes_nothing(self):
        stream, watched, states = self.make(), self.make(), []
        expected = self.epoch(stream) + self.epoch(stream)
        got: Samples = []
        for _ in range(2):
            for batch in watched:
                got += self.samples(batch)
                states.append(len(json.dumps(watched.state_dict())))
        assert got == expected
        assert max(states) < 400

    def test_streams_of_the_same_data_are_independent(self):
        expected = self.epoch(self.make())
        one, other = self.make(), self.make()
        got: tuple[Samples, Samples] = [], []
        for left, right in zip(one, other, strict=True):
            got[0].extend(self.samples(left))
            got[1].extend(self.samples(right))
            self.resumed(one.state_dict())
        assert got == (expected, expected)

    @pytest.mark.parametrize("fail_at", [0, 1, 2])
    def test_an_error_is_raised_at_its_batch_and_the_state_is_that_of_the_last_batch_received(self, fail_at):
        expected = self.epoch(self.make())
        stream = self.make(fail_at=fail_at)
        got: Samples = []
        with pytest.raises(ColabkitError, match="planned"):
            got.extend(sample for batch in stream for sample in self.samples(batch))
        assert got == expected[: len(got)]
        assert len(got) == len(self.first(self.make(), fail_at))
        assert got + self.epoch(self.resumed(stream.state_dict())) == expected
