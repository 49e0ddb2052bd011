"""The pack that `prepare()` returns, with its report."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from colabkit.foundation import Report, format_bytes, format_seconds
from colabkit.packs.dataset.opened_pack import Pack
from colabkit.packs.dataset.samples import open_sealed
from colabkit.packs.format.layout import PackInfo


@dataclass(frozen=True, repr=False)
class PrepareReport(Report):
    """The route that `prepare()` used, and how long each route takes.

    Attributes:
        path: path of the local pack.
        way: `"near"`: a local pack existed; `"saved"`: the pack in `save_to` was staged; `"packed"`: the source was
            packed.
        near_s: seconds to find and open the local pack.
        saved_s: seconds to stage the saved pack, in this call or an earlier one on this machine; None if unknown.
        packed_s: seconds to pack the source, in this call or an earlier one on this machine; None if unknown.
        saved_path: path of the saved pack; None if there is none.
        unsaved: why there is no saved pack.
        unused: why an existing saved pack was not used; empty if it was used or there was none.
        pack_bytes: size of the pack in bytes.
    """

    path: Path
    way: Literal["near", "saved", "packed"]
    near_s: float
    saved_s: float | None
    packed_s: float | None
    saved_path: Path | None
    unsaved: str
    unused: str
    pack_bytes: int

    def _summary(self) -> str:
        size = format_bytes(self.pack_bytes)
        if self.way == "saved":
            what = f"Staged the pack that was saved at {str(self.saved_path)!r}, {size}"
        else:
            done = "Used the near pack" if self.way == "near" else "Packed from the source to"
            saved = (
                f"saved at {str(self.saved_path)!r}" if self.saved_path else f"not saved: {self.unsaved}".rstrip(".")
            )
            what = f"{done} {str(self.path)!r}, {size}; {saved}"
        notes = f". The saved pack was not used: {self.unused.rstrip('.')}" if self.unused else ""
        names = {"near": "a near pack", "saved": "a saved pack", "packed": "packing from the source"}
        known = [f"{names[way]} {format_seconds(taken)}" for way, taken in self._seconds.items() if taken is not None]
        return f"{what}{notes}. The ways take: {', '.join(known)}"

    def _rows(self) -> list[tuple[str, ...]]:
        seconds = {way: "not known" if taken is None else format_seconds(taken) for way, taken in self._seconds.items()}
        rows = [("path", str(self.path)), ("saved", str(self.saved_path or self.unsaved))]
        return [*rows, *((f"way {way}", text) for way, text in seconds.items())]

    @property
    def _seconds(self) -> dict[str, float | None]:
        return {"near": self.near_s, "saved": self.saved_s, "packed": self.packed_s}


class PreparedPack(Pack):
    """A pack with a `report` of how `prepare()` obtained it.

    Example:
        >>> import colabkit
        >>> pack = colabkit.prepare("samples:digits", save_to=None)
        >>> len(pack["train"])
        1797
        >>> pack.report.path == pack.path
        True
    """

    def __init__(self, info: PackInfo, report: PrepareReport) -> None:
        super().__init__(info, partial(open_sealed, info.path.absolute(), info.seal))
        self.report = report

    def __reduce__(self) -> tuple[object, ...]:
        return PreparedPack, (self.info, self.report)

    @property
    def is_good(self) -> bool:
        """Always true: `prepare()` raises an error if there is no pack."""
        return self.report.is_good

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values that `json.dumps` accepts."""
        return self.report.to_dict()

    def __repr__(self) -> str:
        return f"{self.report!r}\n{super().__repr__()}"

    def _repr_html_(self) -> str:
        return self.report._repr_html_() + super()._repr_html_()
