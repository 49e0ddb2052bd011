"""`write_template()` writes the template notebook together with colabkit's wheel, as one file to upload.

The wheel is built from the files of the installed package, so neither its source tree nor a network is needed. The same
files give the same wheel, byte for byte.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import lzma
import os
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import colabkit
from colabkit.foundation import (
    InvalidOption,
    MissingPackage,
    Report,
    TargetExists,
    cannot,
    checked_call,
    file_changes,
    format_bytes,
    option,
    user_path,
    write_atomically,
)

_NAME = "colabkit_template.ipynb"
_ACT = "write the template"
_PACKAGE_FILES = (".ipynb", ".py", ".pyi", ".typed", ".zip")
# The earliest time that a zip archive can store.
_TIME = (1980, 1, 1, 0, 0, 0)
_WHEEL = "Wheel-Version: 1.0\nGenerator: colabkit\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
# Characters per line of the wheel. Longer lines slow down editors, and shorter ones make the visible cell taller.
_LINE_CHARS = 16_000


@dataclass(frozen=True, repr=False)
class TemplateReport(Report):
    """Result of `write_template()`.

    Attributes:
        path: path of the notebook.
        file_bytes: size of the notebook.
        wheel: file name of the wheel in it.
        sha256: SHA-256 of the wheel, which the notebook verifies before it installs the wheel.
    """

    path: Path
    file_bytes: int
    wheel: str
    sha256: str

    def _summary(self) -> str:
        what = f"Wrote {str(self.path)!r}, {format_bytes(self.file_bytes)}, with {self.wheel} inside"
        return f"{what}\nUpload it to Colab or any Jupyter, and run all cells"

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            ("notebook", str(self.path)),
            ("size", format_bytes(self.file_bytes)),
            ("wheel", self.wheel),
            ("SHA-256 of the wheel", self.sha256),
        ]


@checked_call()
def write_template(to: str | os.PathLike[str] = _NAME, *, overwrite: bool = False) -> TemplateReport:
    """Write the template notebook with colabkit inside, so that it is the only file to upload.

    The notebook contains the wheel of this colabkit and its SHA-256. In an environment without colabkit, the notebook
    verifies and installs the wheel. Then it trains on the images that its form names.

    Args:
        to: an existing folder, or the path of the notebook, which must end in `.ipynb`. It may start with `drive:`.
        overwrite: replace an existing file.

    Returns:
        A report of the notebook's path and size, and of the wheel in it.

    Raises:
        InvalidOption: if `to` is neither a folder nor the path of a notebook.
        TargetExists: if the file exists and `overwrite` is false.
        MissingPackage: if colabkit is imported from a folder but not installed.
        NotMounted, FileFailed, NotEnoughSpace: if the file cannot be written.

    Example:
        >>> import colabkit
        >>> report = colabkit.write_template()
        >>> report.path.name
        'colabkit_template.ipynb'
    """
    final = user_path(to, _ACT)
    with file_changes.translated(_ACT):
        if final.is_dir():
            final /= _NAME
        if final.suffix != ".ipynb":
            found = f"{str(final)!r} does not end in .ipynb"
            expected = "the path of a notebook or an existing folder"
            raise InvalidOption(cannot(_ACT, found, expected, "Add .ipynb to the name"))
        if os.path.lexists(final) and not overwrite:
            advice = ("Use ", option("overwrite", True), " to replace it, or choose another path")
            raise TargetExists(cannot(_ACT, f"{str(final)!r} already exists", "", advice))
        name, wheel = _build_wheel()
        digest = hashlib.sha256(wheel).hexdigest()
        notebook = _with_wheel(name, wheel, digest).encode()
        write_atomically(final, notebook, durable=True, replace=overwrite)
    return TemplateReport(final, len(notebook), name, digest)


def _with_wheel(name: str, wheel: bytes, digest: str) -> str:
    """Return the template with a cell that holds the wheel, in front of the cell that installs it."""
    notebook = json.loads(Path(__file__).with_suffix(".ipynb").read_text(encoding="utf-8"))
    # Compressing all files together takes a third less space than compressing each of them.
    text = base64.b64encode(lzma.compress(wheel, preset=9)).decode()
    lines = [text[begin : begin + _LINE_CHARS] for begin in range(0, len(text), _LINE_CHARS)]
    source = _WHEEL_CELL.format(version=colabkit.__version__, name=name, digest=digest, text="\n".join(lines))
    cell = {
        "cell_type": "code",
        "execution_count": None,
        "id": "wheel",
        "metadata": {"cellView": "form", "jupyter": {"source_hidden": True}},
        "outputs": [],
        "source": source.splitlines(keepends=True),
    }
    cells: list[dict[str, Any]] = notebook["cells"]
    cells.insert(next(number for number, one in enumerate(cells) if one["id"] == "install"), cell)
    return json.dumps(notebook, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


_WHEEL_CELL = """\
# @title colabkit {version}, for the next cell to install
import hashlib
import lzma
import tempfile
from base64 import b64decode
from contextlib import suppress
from pathlib import Path

WHEEL_NAME = "{name}"
WHEEL_SHA256 = "{digest}"


def unpack_wheel():
    wheel = b""
    with suppress(ValueError, EOFError, lzma.LZMAError):
        wheel = lzma.decompress(b64decode(WHEEL))
    if hashlib.sha256(wheel).hexdigest() != WHEEL_SHA256:
        raise CannotInstall("the wheel in this notebook is damaged. Upload the notebook again.")
    path = Path(tempfile.mkdtemp(), WHEEL_NAME)
    path.write_bytes(wheel)
    return str(path)


# The wheel, compressed with LZMA and encoded as base64.
WHEEL = '''
{text}
'''
"""


def _build_wheel() -> tuple[str, bytes]:
    """Return the name and the bytes of an uncompressed wheel of the installed colabkit."""
    try:
        installed = distribution("colabkit")
    except PackageNotFoundError:
        found = "colabkit is imported from a folder but not installed, so its requirements are unknown"
        raise MissingPackage(cannot(_ACT, found, "", "Run pip install in the folder of its setup.py")) from None
    if installed.version != colabkit.__version__:
        found = f"the installed version is {installed.version}, but the imported one is {colabkit.__version__}"
        raise MissingPackage(cannot(_ACT, found, "the same version", "Install colabkit again"))
    stem = f"colabkit-{installed.version}"
    info = {f"{stem}.dist-info/{name}": content for name, content in _metadata(installed).items()}
    content = {**dict(_package_files()), **info}
    # Fixed times and order make the result reproducible.
    with io.BytesIO() as file:
        with zipfile.ZipFile(file, "w") as archive:
            for name, data in {**content, f"{stem}.dist-info/RECORD": _record(stem, content)}.items():
                entry = zipfile.ZipInfo(name, _TIME)
                entry.external_attr = 0o100644 << 16
                archive.writestr(entry, data)
        return f"{stem}-py3-none-any.whl", file.getvalue()


def _package_files() -> Iterator[tuple[str, bytes]]:
    package = Path(colabkit.__file__).parent
    for path in sorted(package.rglob("*")):
        inside = path.relative_to(package)
        if path.suffix in _PACKAGE_FILES and not any(part.startswith(".") for part in inside.parts):
            yield f"colabkit/{inside.as_posix()}", path.read_bytes()


def _metadata(installed: Distribution) -> dict[str, bytes]:
    """Return the files of the `.dist-info` folder, without the description, which is the whole README."""
    # An editable installation may have only the file that setuptools writes next to the source code.
    text = installed.read_text("METADATA") or installed.read_text("PKG-INFO") or ""
    headers = text.partition("\n\n")[0].rstrip()
    found = {"METADATA": f"{headers}\n".encode(), "WHEEL": _WHEEL.encode()}
    if commands := installed.read_text("entry_points.txt"):
        found["entry_points.txt"] = commands.encode()
    for file in installed.files or ():
        if file.name == "LICENSE":
            # The metadata next to the source code uses this file name.
            found["licenses/LICENSE"] = file.read_binary()
    return dict(sorted(found.items()))


def _record(stem: str, content: Mapping[str, bytes]) -> bytes:
    file = io.StringIO()
    rows = csv.writer(file, lineterminator="\n")
    for name, data in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        rows.writerow((name, f"sha256={digest}", len(data)))
    rows.writerow((f"{stem}.dist-info/RECORD", "", ""))
    return file.getvalue().encode()
