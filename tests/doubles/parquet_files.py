"""Write Parquet files with embedded images, as the package `datasets` writes them, without that package."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

IMAGE = {"_type": "Image"}
IMAGE_TYPE = pa.struct({"bytes": pa.binary(), "path": pa.string()})


def class_label(names: Sequence[str]) -> dict[str, Any]:
    return {"names": [*names], "_type": "ClassLabel"}


def image_cells(images: Sequence[bytes | None]) -> pa.Array:
    """Return the cells of a column of images; None is a row without an image."""
    rows = [None if one is None else {"bytes": one, "path": f"{number}.png"} for number, one in enumerate(images)]
    return pa.array(rows, IMAGE_TYPE)


def parquet_of(
    path: Path, columns: Mapping[str, Any], features: Mapping[str, Any] | None = None, rows: int = 4, **options: Any
) -> Path:
    """Write a file with `rows` rows in each row group; `features` describes columns as `datasets` does."""
    table = pa.table(dict(columns))
    if features is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": dict(features)}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=rows, **options)
    return path
