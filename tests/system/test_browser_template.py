"""The template in a real JupyterLab in Chromium, started with "Run All Cells" in the menu."""

from __future__ import annotations

import json
import shutil

import pytest
from jupyter_lab import PANEL, ROOT, Lab

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


def test_the_template_trains_with_run_all_cells_and_shows_no_error(lab: Lab) -> None:
    shutil.copy(ROOT / "notebooks" / "colabkit_template.ipynb", lab.folder)
    lab.open("colabkit_template.ipynb")
    lab.run_all()
    lab.wait_until_idle(240)
    lab.page.locator(PANEL).first.scroll_into_view_if_needed()
    lab.picture("template")
    text = json.dumps([cell.get("outputs") for cell in lab.save().cells])
    assert '"ename"' not in text, "a cell failed"
    assert "held-out images" in text
