"""Make `colabkit/storage/samples/digits.zip` from scikit-learn's copy of the UCI optical handwritten digits.

    pip install scikit-learn && python tests/doubles/make_samples.py

The archive holds 1,797 grayscale PNG images of 8x8 pixels in one folder for each class; values 0..16 are scaled to
0..255. Every run writes the same bytes. License of the data: CC BY 4.0, E. Alpaydin and C. Kaynak,
https://doi.org/10.24432/C50P49.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

TARGET = Path(__file__).parents[2] / "colabkit" / "storage" / "samples" / "digits.zip"
MADE = (1998, 7, 1, 0, 0, 0)


def main() -> None:
    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    with zipfile.ZipFile(TARGET, "w") as archive:
        for label in range(10):
            for number in np.flatnonzero(digits.target == label):
                png = io.BytesIO()
                Image.fromarray(images[number]).save(png, "PNG", optimize=True)
                archive.writestr(zipfile.ZipInfo(f"digits/{label}/{number:04d}.png", MADE), png.getvalue())


if __name__ == "__main__":
    main()
