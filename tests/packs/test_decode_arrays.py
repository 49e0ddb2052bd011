"""`.npy` files are decoded to arrays; pickles, damaged files and wrong sizes raise an error."""

from __future__ import annotations

import io

import numpy as np
import pytest

from colabkit.errors import BadImage
from colabkit.packs.decode.images import decode_array


def npy(values: object, **options: object) -> bytes:
    file = io.BytesIO()
    np.save(file, values, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    "values",
    [
        np.arange(24, dtype=np.float32).reshape(2, 3, 4),
        np.asfortranarray(np.arange(12, dtype=np.int16).reshape(3, 4)),
        np.array(7.5),
        np.zeros((0, 5), np.uint8),
        np.arange(5, dtype=">i4"),
        np.array([True, False]),
        np.array([1 + 2j]),
        np.array(["2024-01-02"], "M8[D]"),
        np.array(["abc", "d"]),
        np.zeros(3, [("a", "<f4"), ("b", "u1", (2,))]),
    ],
    ids=lambda values: f"{values.dtype}{list(values.shape)}",
)
def test_arrays_are_read_unchanged(values):
    found = decode_array(npy(values))
    assert found.dtype == values.dtype
    assert found.shape == values.shape
    assert (found == values).all()
    assert (decode_array(memoryview(b"x" + npy(values))[1:]) == values).all()


def test_a_header_of_format_2_is_read():
    values = np.zeros(2, [(f"a_field_with_a_long_name_{n}", "<f4") for n in range(200)])
    file = io.BytesIO()
    np.lib.format.write_array(file, values, version=(2, 0))
    assert decode_array(file.getvalue()).dtype == values.dtype


def header(shape: str, descr: str = "'<f4'", order: str = "False") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the file is empty"),
        (b"<html>", "the file is not a .npy array (it starts with b'<html>')"),
        (b"PK\x03\x04" + bytes(50), "the file is an archive of arrays"),
        (npy(np.array([{}], object), allow_pickle=True), "the array contains Python objects"),
        (npy(np.arange(10.0))[:-1], "the file has 79 bytes of values, but float64 [10] has 80"),
        (npy(np.arange(10.0)) + b"x", "the file has 81 bytes of values"),
        (npy(np.arange(10.0))[:20], "the header of the array is damaged"),
        (b"\x93NUMPY", "the header of the array is damaged"),
        (b"\x93NUMPY\x03\x00" + npy(np.arange(3))[8:], "the array has .npy format 3.0"),
        (header("(1000000000000, 1000000)"), "the file has 0 bytes of values, but float32"),
        (header("(-1, 4)") + bytes(16), "the header of the array is damaged"),
        (header("(-2, -2)") + bytes(16), "the header of the array is damaged"),
        (header("(0, 99999999999999999999999)"), "the header of the array is damaged"),
        (header("(4,)", "'|V0'"), "the array has dtype |V0"),
        (header("(4,)", "'nonsense'") + bytes(16), "the header of the array is damaged"),
        (header("__import__('os')") + bytes(16), "the header of the array is damaged"),
        (header("(4,)", "'<f4'", "7") + bytes(16), "the header of the array is damaged"),
        (header("(True,)") + bytes(4), ""),
    ],
    ids=lambda value: value[:60].decode("latin-1") if isinstance(value, bytes) else "",
)
def test_invalid_files_raise_with_the_reason(data, reason):
    try:
        found = decode_array(data)
    except BadImage as error:
        # The case with an empty reason is a valid array.
        assert str(error).startswith(reason)  # noqa: PT017
    else:
        assert reason == ""
        assert found.shape == (1,)


def test_a_damaged_array_decodes_to_the_same_size_or_raises():
    data = npy(np.arange(40, dtype=np.float32).reshape(5, 8))
    random = np.random.default_rng(4)
    refused = 0
    for place in [*range(128), *random.integers(0, len(data), 100)]:
        broken = bytearray(data)
        broken[place] ^= int(random.integers(1, 256))
        try:
            found = decode_array(bytes(broken))
        except BadImage:
            refused += 1
        else:
            assert found.nbytes == 160
    assert refused > 50
