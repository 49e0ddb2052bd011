"""Names, paths and error texts that contain markup never become HTML, in any report or pack."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest
from hostile_names import HOSTILE, UNREADABLE, check_alike, filled, kinds
from PIL import Image

import colabkit

PACKAGE = Path(colabkit.__file__).parent
OWN = (
    "foundation/reports.py",
    "notebook/recipe/report.py",
    "packs/dataset/opened_pack.py",
    "packs/preparing/prepared_pack.py",
    "storage/probing/report.py",
)


# The cases have numbers as IDs, since pytest cannot select a test by a name with such characters.
@pytest.mark.parametrize("name", [*HOSTILE, *UNREADABLE], ids=count())
def test_no_name_in_a_report_becomes_html_or_breaks_lines_and_all_reports_become_json(name: str) -> None:
    for kind in kinds():
        report = filled(kind, name)
        check_alike(report._repr_html_(), filled(kind, "plain")._repr_html_())
        assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
        rows = report.text_table().split("\n")[len(repr(report).split("\n")) :]
        assert all(row.isprintable() for row in rows), kind
        assert "\n".join(rows).encode("utf-8")


def test_all_classes_with_html_output_are_known() -> None:
    shows = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if "def _repr_html_" in path.read_text()}
    assert shows == set(OWN), "a new one needs a test here"
    assert not [path for path in PACKAGE.rglob("*.py") if "_repr_mimebundle_" in path.read_text()]


@pytest.mark.parametrize("name", [name.replace("/", "|") for name in HOSTILE], ids=count())
def test_a_pack_shows_hostile_classes_and_paths_as_text(name: str, tmp_path: Path) -> None:
    packs = [packed(tmp_path, name), packed(tmp_path, "plain")]
    assert [name in pack.classes for pack in packs] == [True, False]
    check_alike(*(pack._repr_html_() for pack in packs))


def packed(folder: Path, name: str) -> colabkit.Pack:
    for place in (name, "b"):
        (folder / name / place).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(folder / name / place / f"{name[:40]}.png")
    return colabkit.open_pack(colabkit.pack(folder / name, folder / f"{name[:40]}.h5", progress=False).path)


@pytest.mark.parametrize("name", HOSTILE, ids=count())
def test_an_error_about_a_hostile_path_is_one_line_of_text(name: str) -> None:
    with pytest.raises(colabkit.errors.ColabkitError) as caught:
        colabkit.open_pack(f"/no/such/{name}")
    (line,) = caught.value._render_traceback_()
    assert len(line.splitlines()) == 1
