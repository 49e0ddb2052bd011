"""What `pack()` was asked for, checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from colabkit.foundation import InvalidOption, cannot, check_whole_number
from colabkit.packs.decode.pixels import MAX_PIXELS
from colabkit.packs.labels.labelling import Labels, Splits
from colabkit.packs.packing.function_digest import function_digest
from colabkit.packs.packing.makers import Encoding
from colabkit.packs.packing.plan import OnBad

Size: TypeAlias = int | tuple[int, int]
Fields: TypeAlias = Sequence[str] | Mapping[str, str | Callable[[str], Any]]
"""Further fields: names of columns, or for each field a column or a function of the sample's path."""

_ENCODINGS = ("auto", "raw", "source", "jpeg")
_ON_BAD = ("raise", "skip", "blank")
OWN_NAMES = frozenset("XY") | {"crc", "colabkit"}


@dataclass(frozen=True)
class PackOptions:
    """The options of a pack that decide what is in it; arguments as of `pack()`."""

    act: str
    size: tuple[int, int] | None
    encoding: Encoding | Literal["auto"]
    quality: int
    channels: Literal[1, 3]
    labels: Labels
    splits: Splits
    fields: Mapping[str, str | Callable[[str], Any]]
    seed: int
    on_bad: OnBad
    max_bad: float

    def most_bad(self, samples: int) -> int:
        """Return how many of so many samples may be bad."""
        if self.on_bad == "raise":
            return 0
        if isinstance(self.max_bad, int) or self.max_bad > 1:
            return int(self.max_bad)
        return max(1, int(self.max_bad * samples)) if self.max_bad else 0

    def plain(self) -> list[Any]:
        """Return the options as plain values, which tell one pack from another; functions by what they do."""
        fields = {name: _plain(value) for name, value in self.fields.items()}
        return [
            *(self.size and list(self.size), self.encoding, self.quality, self.channels, _plain(self.labels)),
            *(_plain(self.splits), fields, self.seed if isinstance(self.splits, Mapping) else None, self.on_bad),
        ]


def checked_options(
    act: str,
    *,
    size: Size | None,
    encoding: str,
    quality: int,
    channels: int,
    labels: Labels,
    splits: Splits,
    fields: Fields | None,
    seed: int,
    on_bad: str,
    max_bad: float,
) -> PackOptions:
    """Return the options; raises `InvalidOption` for what cannot be meant."""
    check_whole_number(act, "seed", seed, 0)
    check_whole_number(act, "quality", quality, 1)
    _check_choice(act, "encoding", encoding, _ENCODINGS)
    _check_choice(act, "on_bad", on_bad, _ON_BAD)
    if quality > 100:
        raise InvalidOption(cannot(act, f"quality={quality}", "it goes from 1 to 100", "Use quality=90, say"))
    if channels not in (1, 3):
        raise InvalidOption(cannot(act, f"channels={channels!r}", "3 for RGB or 1 for luminance", "Use one of them"))
    if isinstance(max_bad, bool) or not isinstance(max_bad, int | float) or not 0 <= max_bad < math.inf:
        found, needed = f"max_bad={max_bad!r}", "it is a share below 1 or a whole number of samples"
        raise InvalidOption(cannot(act, found, needed, "Use max_bad=0.01 or max_bad=50, say"))
    if encoding == "source" and size is not None:
        found, needed = "size= with encoding='source'", "which keeps the files' own bytes"
        raise InvalidOption(cannot(act, found, needed, "Leave size out, or use encoding='jpeg'"))
    return PackOptions(
        act=act,
        size=height_and_width(act, size),
        encoding=encoding,  # type: ignore[arg-type]
        quality=int(quality),
        channels=channels,  # type: ignore[arg-type]
        labels=labels,
        splits=splits,
        fields=_checked_fields(act, fields),
        seed=int(seed),
        on_bad=on_bad,  # type: ignore[arg-type]
        max_bad=max_bad,
    )


def height_and_width(act: str, size: Size | None) -> tuple[int, int] | None:
    """Return the size as a pair, None for the images' own; raises `InvalidOption` for anything else."""
    if size is None:
        return None
    both: Any = (size, size) if isinstance(size, int) else size
    is_pair = isinstance(both, tuple | list) and len(both) == 2
    if not is_pair or not all(isinstance(side, int) and side is not True and side >= 1 for side in both):
        found, needed = f"size={size!r}", "it is a whole number, or height and width"
        raise InvalidOption(cannot(act, found, needed, "Use size=224 or size=(240, 320), say"))
    if both[0] * both[1] > MAX_PIXELS:
        found, needed = f"size={size!r}", f"at most {MAX_PIXELS} pixels, which is what images may have"
        raise InvalidOption(cannot(act, found, needed, "Use size=224, say"))
    return both[0], both[1]


def _checked_fields(act: str, fields: Fields | None) -> Mapping[str, str | Callable[[str], Any]]:
    if fields is None:
        return {}
    if isinstance(fields, str):
        fields = [fields]
    named = dict(fields) if isinstance(fields, Mapping) else {name: name for name in fields}
    for name, value in named.items():
        if not isinstance(name, str) or not name or name in OWN_NAMES or "/" in name or "\0" in name:
            found, needed = f"a field named {name!r}", "a name without '/', other than X, Y and crc"
            raise InvalidOption(cannot(act, found, needed, "Use fields={'Z': 'a/column'}, say"))
        if not isinstance(value, str) and not callable(value):
            found, needed = f"{value!r} as field {name!r}", "the name of a column, or a function of a sample's path"
            raise InvalidOption(cannot(act, found, needed, "Use fields=['age'], say"))
    return named


def _check_choice(act: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        known = ", ".join(map(repr, choices))
        raise InvalidOption(cannot(act, f"{name}={value!r}", f"one of {known}", "Use one of these"))


def _plain(value: Any) -> Any:
    if callable(value):
        return f"function {function_digest(value)}"
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
