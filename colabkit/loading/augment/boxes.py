"""Which part of each image a geometric transform takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Boxes:
    """One box of each image, in pixels from its upper left corner; it may reach beyond the image.

    Attributes:
        top: first row, `int64 [B]`, as the next three.
        left: first column.
        height: rows.
        width: columns.
        mirrored: whether left and right change places after the cut, `bool [B]`.
    """

    top: Numbers
    left: Numbers
    height: Numbers
    width: Numbers
    mirrored: npt.NDArray[np.bool_]

    @classmethod
    def whole(cls, sizes: Numbers) -> Boxes:
        """Return boxes that are the images themselves; `sizes` is `int64 [B, 2]`, height and width of each."""
        corner = np.zeros(len(sizes), np.int64)
        return cls(corner, corner, sizes[:, 0], sizes[:, 1], np.zeros(len(sizes), np.bool_))

    def rows(self) -> Iterator[tuple[int, int, int, int, bool]]:
        """Return top, left, height, width and mirrored of one box after the other, as plain numbers."""
        columns = self.top, self.left, self.height, self.width, self.mirrored
        return zip(*(column.tolist() for column in columns), strict=True)

    def reach_beyond(self, height: int, width: int) -> bool:
        """Return whether any box lies partly beyond images of this size."""
        inside = self.top.min(initial=0) >= 0 and self.left.min(initial=0) >= 0
        last_row, last_column = (self.top + self.height).max(initial=0), (self.left + self.width).max(initial=0)
        return not (inside and last_row <= height and last_column <= width)
