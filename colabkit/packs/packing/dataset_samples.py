"""Takes the samples of a pack from map-style datasets, which one thread reads sample by sample."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from colabkit.foundation import (
    BadImage,
    BadSource,
    ColabkitError,
    InvalidOption,
    cannot,
    format_things,
    kind_of,
    omit,
    option,
)
from colabkit.packs.decode.images import decode_image
from colabkit.packs.decode.jpeg import encode_jpeg
from colabkit.packs.decode.pixels import Pixels, decode_pillow, fit_pixels, load_with_pillow
from colabkit.packs.format.layout import LABELS, SAMPLES, Content, Indices, encode_text
from colabkit.packs.labels.label_values import LabelKind, Task, convert_labels, kind_of_stored
from colabkit.packs.packing.array_samples import IMAGE_CHANNELS
from colabkit.packs.packing.options import check_field_names
from colabkit.packs.packing.pack_plan import (
    PAD,
    BadHandler,
    ColumnValues,
    Encoding,
    MemorySampleMaker,
    SampleField,
    UnequalSample,
    Value,
    is_storable,
)

_SAMPLE_KEYS = (SAMPLES, "x", "image", "images", "img", "pixel_values", "input", "inputs", "data", "text")
LABEL_KEYS = (LABELS, "y", "label", "labels", "target", "targets", "class")
"""Keys of labels in samples that are mappings."""

_FIRST_TRIES = 16

KeyPath: TypeAlias = tuple[Any, ...]
"""Location of a value in a sample, as nested keys; () if the sample is the value."""


class UnequalValue(UnequalSample):
    """Error for a value whose shape or type differs from that in the first sample."""

    next_step = f"Return the same fields, with the same shapes and dtypes, for all samples. {PAD}"


class UnequalPicture(UnequalSample):
    """Error for an image whose size differs from that of the first image."""

    next_step = (
        "Use ",
        option("size"),
        " to resize all images, or ",
        option("encoding", "jpeg"),
        " to keep their sizes",
    )


class UnstorableValue(BadImage):
    """Error for a value of a type that a pack cannot store."""

    next_step = "Convert the value in the dataset"


class UnstorableLabels(UnstorableValue):
    """Error for several labels of a sample, which belong into another field."""

    next_step = f"Return such values under another key, such as 'box_classes'. {PAD}"


@dataclass(frozen=True, slots=True)
class ImageFormat:
    """Storage options for images; see `pack()`."""

    encoding: Encoding
    channels: int
    size: tuple[int, int] | None
    quality: int

    def pixels(self, value: Any) -> Pixels:
        """Convert an image to `uint8 [H, W, C]`, scaled and cropped if `size` is set."""
        if isinstance(value, Image.Image):
            return decode_pillow(value, self.channels, self.size)
        if (encoded := _encoded(value)) is not None:
            return decode_image(encoded, self.channels, self.size)
        pixels = _numbers(SAMPLES, value)
        if not isinstance(value, np.ndarray):
            pixels = pixels.transpose(1, 2, 0)
        if self.channels == 1 and pixels.shape[2] == 3:
            pixels = np.asarray(Image.fromarray(np.ascontiguousarray(pixels)).convert("L"))[:, :, None]
        # Copy, because a dataset may reuse the same memory for each sample.
        pixels = np.array(pixels, order="C")
        return pixels if self.size is None else fit_pixels(pixels, (pixels.shape[0], pixels.shape[1]), 1, self.size)


class DatasetSampleMaker(MemorySampleMaker):
    """Takes samples from map-style datasets, one dataset for each split.

    Only one thread at a time reads a dataset, because datasets may support neither threads nor forks. A sample is `x`,
    `(x, y, ...)` or a mapping whose keys determine `X` and `Y`. Pillow images, image files given as `{"bytes": ...,
    "path": ...}`, `uint8 [C, H, W]` tensors and `uint8 [H, W, C]` arrays, with C = 1 or 3, are stored as `uint8
    [H, W, C]`. If the value after `x` is text, a number or a row of numbers, it is the label `Y`; other values become
    fields `Z`, `Z2` and so on, or are named after their keys. The first sample determines the type of all fields.

    Args:
        act: verb and object for messages.
        datasets: the dataset of each split.
        images: how images are stored.
        label: key of the labels in mappings; "auto" tries keys such as `label` and `target`, None ignores labels.
        classes: class names; text labels are converted to their index.
        has_named_numbers: whether a label that is a number is an index of `classes`.
        skips_bad: whether bad samples are allowed, so that the first samples may be bad.
        task: task of the labels; "auto" infers it from the first label.

    Raises:
        BadSource: if a split is empty, or samples contain unsupported values.
        BadImage: if the first sample is bad or, with `skips_bad`, the first 16 are.
        InvalidOption: if options for images are given but samples are not images.
    """

    def __init__(
        self,
        act: str,
        datasets: Mapping[str, Any],
        images: ImageFormat,
        label: str | None,
        classes: Sequence[str],
        *,
        has_named_numbers: bool = True,
        skips_bad: bool,
        task: Task = "auto",
    ) -> None:
        self._act = act
        self._datasets = dict(datasets)
        self.counts = {split: _length(act, split, dataset) for split, dataset in datasets.items()}
        self._ends = np.cumsum(list(self.counts.values()))
        self._images = images
        self._label = label
        self._task = task
        self._class_numbers = {str(name): number for number, name in enumerate(classes)}
        self._class_count = len(classes) if has_named_numbers else 0
        self._chosen: Indices | None = None
        self._lock = threading.Lock()
        tries = min(_FIRST_TRIES if skips_bad else 1, int(self._ends[-1]))
        for number in range(tries):
            try:
                self._learn(self._sample(number))
                break
            except UnstorableValue as error:
                unstorable = f"in {self.path(number)}, {error}"
                raise BadSource(cannot(act, unstorable, "", error.next_step)) from error.__cause__
            except BadImage as error:
                if number == tries - 1:
                    found = f"{self.path(number)} is bad ({error})"
                    raise BadImage(cannot(act, found, "", "Repair or remove this sample")) from error.__cause__

    def _learn(self, first: Any) -> None:
        self._places = self._find_fields(first)
        values = {name: _at(first, place) for name, place in self._places.items()}
        # Height, width and channels of the first image; None if samples are not images.
        self.image_shape = self._images.pixels(values[SAMPLES]).shape if _is_image(values[SAMPLES]) else None
        if not self.image_shape and (self._images.size is not None or self._images.encoding == "jpeg"):
            given = option("size") if self._images.size is not None else option("encoding", "jpeg")
            found = (given, f" applies only to images, but the first sample is {_named(values[SAMPLES])}")
            raise InvalidOption(cannot(self._act, found, "", omit(given.name)))
        self.fields = tuple(self._field(name, value) for name, value in values.items())
        self.has_bools = LABELS in values and "bool" in str(getattr(values[LABELS], "dtype", type(values[LABELS])))
        self.has_text = isinstance(values.get(LABELS), str)
        labels = next((made for made in self.fields if made.name == LABELS), None)
        self.label_kind: LabelKind = "none" if labels is None else kind_of_stored(labels.dtype, 1 + len(labels.shape))
        # Number of labels or targets of each sample; 0 for a class or a single target.
        self.label_count = labels.shape[0] if labels is not None and labels.shape else 0

    def path(self, number: int) -> str:
        """Return the sample's number in its dataset as text."""
        split, row = self._where(number)
        return f"sample {row}" + (f" of {split}" if len(self._datasets) > 1 else "")

    def columns(self, numbers: Indices, on_bad: BadHandler, on_wait: Callable[[], None]) -> Sequence[ColumnValues]:
        """Return each field of the given samples, which are read one by one."""

        def made(number: int) -> tuple[Value, ...]:
            on_wait()
            return self._made(number)

        return self._join(numbers.tolist(), made, on_bad)

    def _made(self, number: int) -> tuple[Value, ...]:
        sample = self._sample(number)
        values = []
        for made, place in zip(self.fields, self._places.values(), strict=True):
            name = made.name
            try:
                value = _at(sample, place)
            except (KeyError, IndexError, TypeError) as error:
                raise UnequalValue(f"the field {name!r} is missing") from error
            if name == SAMPLES and _is_image(value) != bool(self.image_shape):
                raise UnequalValue(f"{name!r} is {_named(value)}, unlike in the first sample")
            stored = self._value(name, value)
            if isinstance(stored, np.ndarray) is made.is_ragged:
                raise UnequalValue(f"{name!r} is {_named(value)}, unlike in the first sample")
            if isinstance(stored, np.ndarray):
                stored = made.converted(stored, UnequalPicture if made.content == "image" else UnequalValue)
            values.append(stored)
        return tuple(values)

    def subset(self, numbers: Indices) -> DatasetSampleMaker:
        """Return a maker of only the given samples; all subsets share one lock."""
        chosen = object.__new__(DatasetSampleMaker)
        chosen.__dict__.update(self.__dict__)
        chosen._chosen = numbers if self._chosen is None else self._chosen[numbers]
        return chosen

    def __getstate__(self) -> Mapping[str, Any]:
        return {**self.__dict__, "_lock": None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def _where(self, number: int) -> tuple[str, int]:
        if self._chosen is not None:
            number = int(self._chosen[number])
        at = int(np.searchsorted(self._ends, number, "right"))
        return list(self._datasets)[at], number - (int(self._ends[at - 1]) if at else 0)

    def _sample(self, number: int) -> Any:
        split, row = self._where(number)
        try:
            # An executor that is a thread pool may pack several shards at once.
            with self._lock:
                return self._datasets[split][row]
        except (ColabkitError, MemoryError):
            raise
        except Exception as error:
            # User code in the dataset can raise any error.
            reason = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
            raise BadImage(f"the dataset raised {reason}") from error

    def _find_fields(self, sample: Any) -> dict[str, KeyPath]:
        if isinstance(sample, Mapping):
            return self._by_key(sample, ())
        if self._label not in ("auto", None):
            found = (
                option("labels", self._label),
                f" is a key, but the first sample is {kind_of(sample)} without keys",
            )
            use_position = (omit("labels"), " and return (x, label) from the dataset")
            raise InvalidOption(cannot(self._act, found, "", use_position))
        if not isinstance(sample, tuple | list):
            return {SAMPLES: ()}
        if not sample:
            next_step = "Return (x, y) from the dataset"
            raise BadSource(cannot(self._act, "the first sample is an empty tuple", "x or (x, y)", next_step))
        # colabkit's own datasets have field names.
        names = getattr(next(iter(self._datasets.values())), "fields", None)
        if isinstance(names, tuple) and len(names) == len(sample) and names[0] == SAMPLES:
            return {name: (number,) for number, name in enumerate(names) if name != LABELS or self._label}
        places: dict[str, KeyPath] = {SAMPLES: (0,)}
        others = 0
        for number, value in enumerate(sample[1:], 1):
            if isinstance(value, Mapping):
                places |= self._by_key(value, (number,))
            elif number == 1 and _may_be_label(value):
                if self._label is not None:
                    places[LABELS] = (number,)
            else:
                others += 1
                places["Z" if others == 1 else f"Z{others}"] = (number,)
        return places

    def _by_key(self, sample: Mapping[Any, Any], within: KeyPath) -> dict[str, KeyPath]:
        """Return the locations of the fields in a mapping; keys such as `image` and `label` determine `X` and `Y`."""
        label = next((key for key in LABEL_KEYS if key in sample and _may_be_label(sample[key])), None)
        if self._label not in ("auto", None):
            label = self._label
            if label not in sample:
                found = f"the samples have no key {label!r}"
                keys = f"one of {', '.join(map(repr, sample))}" if sample else "samples with this key"
                raise InvalidOption(cannot(self._act, found, keys, ("Use one of these keys for ", option("labels"))))
        x = None
        if not within:
            rest = [key for key in sample if key != label]
            x = next((key for key in _SAMPLE_KEYS if key in rest), rest[0] if len(rest) == 1 else None)
            if x is None:
                has = f"the samples have the keys {', '.join(map(repr, sample))}" if sample else "the samples are empty"
                usual = f"a key such as {', '.join(map(repr, _SAMPLE_KEYS[2:6]))}"
                raise BadSource(cannot(self._act, has, usual, "Use such a key for the values to pack as X"))
        others = [key for key in sample if key not in (x, label)]
        check_field_names(self._act, others)
        places: dict[str, KeyPath] = {} if within else {SAMPLES: (x,)}
        if label is not None and self._label is not None:
            places[LABELS] = (*within, label)
        return places | {key: (*within, key) for key in others}

    def _value(self, name: str, value: Any) -> Any:
        """Convert a value to its stored form; raise `BadImage` with only the reason if that is impossible."""
        if name == SAMPLES and _is_image(value):
            pixels = self._images.pixels(value)
            return encode_jpeg(pixels, self._images.quality) if self._images.encoding == "jpeg" else pixels
        if (encoded := _encoded(value)) is not None:
            try:
                value = load_with_pillow(encoded)
            except BadImage as error:
                raise BadImage(f"in {name!r}, {error}") from error.__cause__
        # Keep images in other fields unchanged, because they are masks, whose values are not colors.
        if isinstance(value, Image.Image):
            return np.array(_numbers(name, value))
        if name == LABELS:
            return self._label_value(value)
        if isinstance(value, str):
            return encode_text(value)
        if isinstance(value, bytes | bytearray):
            return bytes(value)
        # Copy, because a dataset may reuse the same memory for each sample.
        return np.array(_numbers(name, value))

    def _label_value(self, value: Any) -> npt.NDArray[Any]:
        if isinstance(value, str) and self._task not in ("auto", "classes"):
            raise UnstorableValue("the label is text, which is a class")
        if isinstance(value, str):
            if value not in self._class_numbers:
                if not self._class_numbers:
                    raise UnstorableValue(f"the label {value!r:.80} is text, but the dataset has no `classes`")
                known = ", ".join(map(repr, list(self._class_numbers)[:5]))
                raise UnstorableValue(f"the label {value!r:.80} is not in the dataset's `classes`, such as {known}")
            return np.asarray(self._class_numbers[value], "<i8")
        found = _numbers(LABELS, value)
        try:
            stored = convert_labels(found[None], self._task)
        except ValueError as error:
            raise UnstorableValue(str(error)) from None
        if stored is not None:
            if stored.ndim == 1 and stored.dtype.kind == "i" and stored[0] >= self._class_count > 0:
                names = format_things(self._class_count, "name")
                raise UnstorableValue(
                    f"the label {stored[0]} has no name in the dataset's `classes`, a list of {names}"
                )
            return stored[0, ...]
        if self._task != "auto":
            raise UnstorableValue(f"the label is {found.dtype} {list(found.shape)}, which does not fit this task")
        wrong = f"the label is {found.dtype} {list(found.shape)}, neither a number nor a row of 0 and 1 or floats"
        raise (UnstorableLabels if found.ndim else UnstorableValue)(wrong)

    def _field(self, name: str, value: Any) -> SampleField:
        stored = self._value(name, value)
        is_image = name == SAMPLES and self.image_shape is not None
        if isinstance(stored, np.ndarray):
            content: Content = "labels" if name == LABELS else "image" if is_image else "array"
            dtype = stored.dtype.newbyteorder("<").str
            return SampleField(name, content, shape=stored.shape, dtype=dtype, is_table=name == LABELS)
        return SampleField(name, "image" if is_image else "text" if isinstance(value, str) else "bytes", is_ragged=True)


def _length(act: str, split: str, dataset: Any) -> int:
    try:
        count = len(dataset)
    except Exception as error:
        found = f"len() of the dataset of the split {split!r} raised {type(error).__name__}: {error}"
        next_step = "Define __len__ and __getitem__ in its class"
        raise BadSource(cannot(act, found, "a map-style dataset", next_step)) from error
    if not count:
        empty = f"the split {split!r} has no samples"
        raise BadSource(cannot(act, empty, "at least one sample", "Remove the split, or add samples to it"))
    return count


def _at(sample: Any, place: Iterable[Any]) -> Any:
    for key in place:
        sample = sample[key]
    return sample


def _may_be_label(value: Any) -> bool:
    return not isinstance(value, Image.Image | Mapping) and _dimensions(value) < 2


def _dimensions(value: Any) -> int:
    if isinstance(value, list | tuple):
        return 1 + max(map(_dimensions, value), default=0)
    return int(getattr(value, "ndim", 0))


def _numbers(name: str, value: Any) -> npt.NDArray[Any]:
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    try:
        found = np.asarray(value)
    except (TypeError, ValueError, RuntimeError, OSError) as error:
        raise UnstorableValue(f"{name!r} is {_named(value)} that cannot be converted to an array") from error
    if not is_storable(found.dtype):
        raise UnstorableValue(f"{name!r} is {_named(value)} instead of numbers, text or an image")
    return found


def _named(value: Any) -> str:
    dtype = getattr(value, "dtype", None)
    return kind_of(value) + (f" of {dtype} {list(getattr(value, 'shape', ()))}" if dtype is not None else "")


def _encoded(value: Any) -> bytes | None:
    """Return the file of an image that `datasets` has not decoded, a mapping of `bytes` and `path`; otherwise None."""
    if not isinstance(value, Mapping) or value.keys() != {"bytes", "path"}:
        return None
    if isinstance(value["bytes"], bytes):
        return value["bytes"]
    try:
        return Path(value["path"] or "").read_bytes()
    except OSError as error:
        raise BadImage(f"the image has no bytes, and the file {value['path']!r} cannot be read") from error


def _is_image(value: Any) -> bool:
    if isinstance(value, Image.Image) or _encoded(value) is not None:
        return True
    shape = tuple(getattr(value, "shape", ()))
    is_uint8 = str(getattr(value, "dtype", "")).endswith("uint8") and not str(value.dtype).endswith("quint8")
    return is_uint8 and len(shape) == 3 and shape[2 if isinstance(value, np.ndarray) else 0] in IMAGE_CHANNELS
