"""Optional packages: whether one is missing or broken, and what to do."""

from __future__ import annotations

import sys

import pytest

from colabkit.errors import MissingPackage
from colabkit.foundation import import_optional


def test_a_missing_package_is_to_be_installed():
    with pytest.raises(MissingPackage, match=r"is not installed.* Run pip install no_such_package_at_all"):
        import_optional("no_such_package_at_all.part", "plot", "to draw")


def test_an_installed_package_that_cannot_be_imported_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text('raise ImportError("numpy.core.multiarray failed to import")')
    (tmp_path / "incomplete_package.py").write_text("import no_such_package_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    for name, cause in (("broken_package", "numpy.core.multiarray"), ("incomplete_package", "no_such_package_at_all")):
        with pytest.raises(MissingPackage, match=f"installed but cannot be imported .*{cause}.*Restart") as caught:
            import_optional(name, "plot", "to draw")
        assert "is not installed" not in str(caught.value)
        sys.modules.pop(name, None)
