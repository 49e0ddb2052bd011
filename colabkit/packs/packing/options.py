"""Validated options of `pack()`, and the names allowed for fields."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

from colabkit.foundation import (
    BadImage,
    InvalidOption,
    Text,
    cannot,
    check_one_of,
    check_size,
    check_whole_number,
    format_things,
    omit,
    option,
    shown,
    user_path,
)
from colabkit.packs.decode.pixels import MAX_PIXELS
from colabkit.packs.format.layout import PackInfo
from colabkit.packs.labels.label_values import TASKS, Task
from colabkit.packs.labels.labelling import Labels, Splits
from colabkit.packs.labels.splits import checked_splits
from colabkit.packs.packing.function_digest import function_digest
from colabkit.packs.packing.pack_plan import Encoding, OnBad

Layout: TypeAlias = Literal["auto", "nhwc", "nchw", "nhw", "array"]
"""Order of the dimensions of images in an array, or `array` for samples that are not images."""
Fields: TypeAlias = Sequence[str] | Mapping[str, str | Callable[[str], Any]]
"""Additional fields: column names, or a mapping of field names to columns or functions of a sample's path."""

QUALITY = 90
"""Default of `quality`."""

MAX_BAD = 0.1
"""Default of `max_bad`."""

_OWN_NAMES = frozenset("XY") | {"crc", "colabkit"}


@dataclass(frozen=True)
class PackOptions:
    """The options that determine the contents of a pack; see `pack()` for their meaning.

    Raises:
        InvalidOption: if an option is invalid.
    """

    act: str
    size: int | tuple[int, int] | None
    encoding: Encoding | Literal["auto"]
    quality: int
    channels: Literal[1, 3]
    labels: Labels
    task: Task
    renumber: bool
    splits: Splits
    fields: Fields | None
    seed: int
    on_bad: OnBad
    max_bad: float
    layout: Layout = "auto"
    path_column: str | None = None
    root: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        act = self.act
        check_one_of(act, "encoding", self.encoding, ("auto", "raw", "source", "jpeg"))
        check_one_of(act, "task", self.task, ("auto", *TASKS))
        check_one_of(act, "renumber", self.renumber, (False, True))
        check_one_of(act, "layout", self.layout, ("auto", "nhwc", "nchw", "nhw", "array"))
        check_one_of(act, "on_bad", self.on_bad, ("raise", "skip", "blank"))
        channels = ("Use ", option("channels", 3), " for RGB or ", option("channels", 1), " for luminance")
        check_one_of(act, "channels", self.channels, (3, 1), channels)
        is_number = isinstance(self.max_bad, int | float) and not isinstance(self.max_bad, bool)
        if not is_number or not 0 <= self.max_bad < math.inf:
            example = ("For example, use ", option("max_bad", 0.01), " or ", option("max_bad", 50))
            expected = "a share below 1, or a whole number of samples"
            raise InvalidOption(cannot(act, option("max_bad", self.max_bad), expected, example))
        if self.encoding == "source" and self.size is not None:
            found = (option("encoding", "source"), " stores files unchanged, but ", option("size"), " is given")
            raise InvalidOption(cannot(act, found, "", (omit("size"), ", or use ", option("encoding", "jpeg"))))
        object.__setattr__(self, "quality", check_whole_number(act, "quality", self.quality, 1, 100))
        object.__setattr__(self, "seed", check_whole_number(act, "seed", self.seed, 0))
        object.__setattr__(self, "splits", checked_splits(act, self.splits))
        # Computing these properties validates `size` and `fields`.
        _ = self.image_size, self.sources_of_fields

    @cached_property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width of all images; None keeps each image's size."""
        return height_and_width(self.act, self.size)

    @cached_property
    def sources_of_fields(self) -> Mapping[str, str | Callable[[str], Any]]:
        """Column or function of a sample's path for each additional field, by the field's name."""
        fields = [self.fields] if isinstance(self.fields, str) else self.fields
        named = dict(fields) if isinstance(fields, Mapping) else {name: name for name in fields or ()}
        check_field_names(self.act, named)
        for name, value in named.items():
            if not isinstance(value, str) and not callable(value):
                found = f"the source of the field {name!r} is {shown(value)}"
                expected = "the name of a column, or a function of a sample's path"
                next_step = ("For example, use ", option("fields", ["age"]))
                raise InvalidOption(cannot(self.act, found, expected, next_step))
        return named

    def most_bad(self, samples: int) -> int:
        """Return the maximum number of bad samples among `samples`."""
        if self.on_bad == "raise":
            return 0
        if isinstance(self.max_bad, int) or self.max_bad > 1:
            return int(self.max_bad)
        return max(1, int(self.max_bad * samples)) if self.max_bad else 0

    def check_bad(self, info: PackInfo, name: str, repair: Text) -> None:
        """Raise `BadImage` if an existing pack has more bad samples than allowed; `repair` begins the advice."""
        samples = sum(info.meta["splits"].values()) + sum(index is None for _, index, _, _ in info.meta["bad"])
        if len(info.bad) > (most := self.most_bad(samples)):
            bad = f"{name!r} already exists with {format_things(len(info.bad), 'bad sample')}"
            next_step = (repair, ", or increase ", option("max_bad"))
            raise BadImage(cannot(self.act, bad, f"at most {most}", next_step))

    def plain(self) -> list[Any]:
        """Return the options as JSON-serializable values for comparing packs; functions become digests."""
        size, seed = self.image_size, self.seed if isinstance(self.splits, Mapping) else None
        return [
            *(size and list(size), self.encoding, self.quality, self.channels, _plain(self.labels)),
            *(_plain(self.splits), _plain(self.sources_of_fields), seed, self.on_bad),
            # A default is omitted, so that packs made before the option existed are still reused.
            *(["task", self.task] if self.task != "auto" else []),
            *(["renumber"] if self.renumber else []),
            *(["layout", self.layout] if self.layout != "auto" else []),
            *([] if self.path_column is None else ["path_column", self.path_column]),
            *([] if self.root is None else ["root", os.path.abspath(user_path(self.root, self.act))]),
        ]


def height_and_width(act: str, size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the size as a pair, or None to keep each image's size; raise `InvalidOption` for an invalid size."""
    if size is None:
        return None
    height, width = check_size(act, "size", size)
    if height * width > MAX_PIXELS:
        found = (option("size", size), f" is {height * width:,} pixels")
        example = ("For example, use ", option("size", 224))
        raise InvalidOption(cannot(act, found, f"at most {MAX_PIXELS:,} pixels", example))
    return height, width


def check_field_names(act: str, names: Iterable[object]) -> None:
    """Raise `InvalidOption` for names that an additional field cannot have."""
    for name in names:
        if not isinstance(name, str) or not name or name in _OWN_NAMES or "/" in name or "\0" in name:
            expected = "text without '/', other than 'X', 'Y', 'crc' and 'colabkit'"
            raise InvalidOption(cannot(act, f"a field is named {shown(name)}", expected, "Rename this field"))


def _plain(value: Any) -> Any:
    if callable(value):
        return f"function {function_digest(value)}"
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
