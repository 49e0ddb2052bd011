"""Values of the cells of tables."""

from __future__ import annotations

import math
from typing import Any


def plain_value(value: Any) -> Any:
    """Convert a cell of a table to a Python value; a missing value becomes None."""
    if value is None or type(value).__name__ == "NAType":
        return None
    if isinstance(value, list | tuple | dict | str):
        return value
    # These methods convert pandas and NumPy values to Python values.
    for conversion in ("to_pydatetime", "to_pytimedelta", "tolist"):
        if hasattr(value, conversion):
            value = getattr(value, conversion)()
            break
    is_nothing = type(value).__name__ == "NaTType" or (isinstance(value, float) and math.isnan(value))
    return None if is_nothing else value


def stripped_value(cell: Any) -> Any:
    """Convert a cell of a text file to a Python value, without spaces around text."""
    value = plain_value(cell)
    return value.strip(" ") if isinstance(value, str) else value


def undecodable(cell: Any) -> Any:
    """Decode, as UTF-8, text that was read as Latin-1; keep undecodable bytes as `os.fsdecode` does."""
    return cell.encode("latin-1").decode("utf-8", "surrogateescape") if isinstance(cell, str) else cell


def decoded_text(cell: Any) -> Any:
    """Decode text that was read as Latin-1: as UTF-8, or else as Windows-1252, in which Excel saves CSV files."""
    if not isinstance(cell, str):
        return cell
    data = cell.encode("latin-1")
    try:
        return data.decode()
    except UnicodeDecodeError:
        # Bytes without a character in Windows-1252 become U+FFFD.
        return data.decode("cp1252", "replace")
