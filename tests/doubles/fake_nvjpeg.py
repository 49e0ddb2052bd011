"""A fake of `torchvision.io.decode_jpeg` that decodes on the CPU and fails for files that nvJPEG rejects."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor


class FakeNvjpeg:
    """A fake decoder of lists of files: one bad file fails the whole list, and EXIF is ignored.

    Attributes:
        calls: number of files in each call.
        rejected: files that raise an error.
    """

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.rejected: set[bytes] = set()
        self._decode = torchvision.io.decode_jpeg
        self._lock = threading.Lock()

    def __call__(self, files: Sequence[Tensor], mode: Any, device: torch.device) -> list[Tensor]:
        with self._lock:
            self.calls.append(len(files))
        for file in files:
            data = bytes(file.numpy())
            # The last condition detects CMYK images, whose scans have four components.
            if data in self.rejected or data[:2] != b"\xff\xd8" or b"\xff\xda\x00\x0e\x04" in data:
                raise RuntimeError("Error while decoding JPEG images: 5")
        return [self._decode(file, mode=mode) for file in files]


@pytest.fixture
def nvjpeg(monkeypatch: pytest.MonkeyPatch) -> FakeNvjpeg:
    """Make `decode="gpu"` decode with the fake, into batches on the CPU."""
    fake = FakeNvjpeg()
    monkeypatch.setattr(torchvision.io, "decode_jpeg", fake)
    monkeypatch.setattr("colabkit.loading.engine.decoder_choice._DEVICE_TYPE", "cpu")
    return fake
