"""The pack that `prepare()` returns, with its report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self, TypeAlias

from colabkit.foundation import PYTHON, Report, Text, format_bytes, format_seconds
from colabkit.packs.dataset.open_split import open_sealed
from colabkit.packs.dataset.opened_pack import Pack
from colabkit.packs.format.layout import PackInfo, count_omitted, name_inferred

Way: TypeAlias = Literal["local", "saved", "packed", "arriving"]
"""A route of `prepare()`."""


@dataclass(frozen=True, repr=False)
class PrepareReport(Report):
    """Report on the route that `prepare()` used, and on the duration of each route.

    Attributes:
        path: path of the local pack.
        way: `"local"`: a local pack existed; `"saved"`: the pack in `to` was staged; `"packed"`: the source was
            packed; `"arriving"`: the source is still being packed in the background.
        local_s: seconds to find and open the local pack.
        saved_s: seconds to stage the saved pack, in this call or an earlier one on this machine; None if unknown.
        packed_s: seconds to pack the source, in this call or an earlier one on this machine; None if unknown.
        saved_path: path of the saved pack; None if there is none.
        pack_bytes: size of the pack in bytes.
        left_out: files that are not samples or are missing, with the reason.
        bad: samples that could not be decoded, with the reason.
        inferred: inferred values, such as the task and the splits, by the option that overrides each.
    """

    path: Path
    way: Literal["local", "saved", "packed", "arriving"]
    local_s: float
    saved_s: float | None
    packed_s: float | None
    saved_path: Path | None
    pack_bytes: int
    left_out: tuple[tuple[str, str], ...]
    bad: tuple[tuple[str, str], ...]
    inferred: Mapping[str, str]
    _unsaved: ClassVar[Text] = ""
    _unused: ClassVar[Text] = ""
    _checked: ClassVar[Text] = ""
    _late: ClassVar[Text] = ""

    @property
    def unsaved(self) -> str:
        """Reason why there is no saved pack; empty if there is one."""
        return self._words.render(self._unsaved)

    @property
    def unused(self) -> str:
        """Path of an existing pack that could not be used, and the reason; otherwise empty."""
        return self._words.render(self._unused)

    @property
    def checked(self) -> str:
        """The facts about the source that were compared, and those that were not.

        Empty if the source was packed or cannot change.
        """
        return self._words.render(self._checked)

    @property
    def late(self) -> str:
        """Reason why `start="now"` returned a pack only when it was complete; otherwise empty."""
        return self._words.render(self._late)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary of JSON-serializable values."""
        texts = {"unsaved": self._unsaved, "unused": self._unused, "checked": self._checked, "late": self._late}
        return {**super().to_dict(), **{name: PYTHON.render(text) for name, text in texts.items()}}

    def _summary(self) -> str:
        local, saved = f"{str(self.path)!r}, {format_bytes(self.pack_bytes)}", f"{str(self.saved_path)!r}"
        if self.way == "saved":
            lines = [f"Staged the saved pack {saved} to {local}"]
        else:
            done = {"local": "Used the local pack", "arriving": "In the background, packing the source to"}
            lines = [f"{done.get(self.way, 'Packed the source to')} {local}"]
            lines += [f"Saved at {saved}" if self.saved_path else f"Not saved: {self.unsaved}"]
        lines += [f"Packed before the call returned: {self.late}"] if self.late else []
        lines += [f"Checked: {self.checked}"] if self.checked else []
        lines += [f"Pack not used: {self.unused}"] if self.unused else []
        lines += count_omitted(self.left_out, self.bad)
        lines += [f"Inferred: {self._words.render(name_inferred(self.inferred))}"] if self.inferred else []
        return "\n".join([*lines, f"Times: {self._times}"])

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [("path", str(self.path))]
        if self.saved_path:
            rows.append(("saved at", str(self.saved_path)))
        else:
            rows.append(("not saved", self.unsaved))
        if self.unused:
            rows.append(("pack not used", self.unused))
        if self.late:
            rows.append(("packed before the call returned", self.late))
        if self.checked:
            rows.append(("checked", self.checked))
        if self.inferred:
            rows.append(("inferred", self._words.render(name_inferred(self.inferred))))
        return [*rows, ("times", self._times)]

    @property
    def _times(self) -> str:
        """The durations of the routes that were used on this machine."""
        seconds = {"local pack": self.local_s, "saved pack": self.saved_s, "packing the source": self.packed_s}
        return ", ".join(f"{name} {format_seconds(taken)}" for name, taken in seconds.items() if taken is not None)


def with_reasons(report: PrepareReport, unsaved: Text, unused: Text, checked: Text, late: Text = "") -> PrepareReport:
    """Set the properties of the report with these names, and return the report."""
    object.__setattr__(report, "_unsaved", unsaved)
    object.__setattr__(report, "_unused", unused)
    object.__setattr__(report, "_checked", checked)
    object.__setattr__(report, "_late", late)
    return report


class PreparedPack(Pack):
    """A pack with a `report` on how `prepare()` obtained it.

    Example:
        >>> import colabkit
        >>> pack = colabkit.prepare("samples:digits", to=None)
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

    @property
    def is_complete(self) -> bool:
        """Whether all samples are packed; False only while `prepare(start="now")` packs them in the background."""
        return True

    def finish(self) -> Self:
        """Wait until the pack is complete and saved, and return it. If saving fails, the report states the reason.

        Raises:
            ColabkitError: the error that ended packing.
        """
        return self

    def close(self) -> None:
        """End work in the background. An incomplete pack is removed; a complete one remains, but is no longer saved."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary of JSON-serializable values."""
        return self.report.to_dict()

    def __repr__(self) -> str:
        return f"{self.report!r}\n{super().__repr__()}"

    def _repr_html_(self) -> str:
        return self.report._repr_html_() + super()._repr_html_()
