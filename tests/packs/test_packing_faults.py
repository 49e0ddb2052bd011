"""Interrupted packing and full disks leave no incomplete files, for every way of writing a pack."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from packed_files import WORKS, files_of, names_in, packed, photos, photos_for
from strikes import ChangeHook, failures, fill_disk, interrupt
from trees import leftovers

from colabkit.errors import BadImage, NotEnoughSpace
from colabkit.foundation import file_changes
from colabkit.packs.packing.api import pack
from colabkit.packs.packing.verification import verify

every = pytest.mark.parametrize("options", WORKS.values(), ids=WORKS)


@pytest.fixture
def tree(tmp_path: Path, options: dict[str, Any]) -> Path:
    return photos_for(options, tmp_path / "tree")


@pytest.mark.full
@every
@pytest.mark.parametrize(("lasting", "threads"), [(False, 1), (True, 3)])
def test_a_disk_that_fills_up_at_any_operation_leaves_no_files(tmp_path, tree, file_hook, options, lasting, threads):
    out = tmp_path / "made" / "p.h5"
    work = partial(pack, tree, out, threads=threads, progress=False, **options)
    for _ in failures(file_hook, fill_disk, work, lasting=lasting, uncounted=["remove"]):
        assert not out.exists()
        assert leftovers(tmp_path) == []
        shutil.rmtree(out.parent, ignore_errors=True)
    assert verify(out, progress=False).is_good


@pytest.mark.full
@every
@pytest.mark.parametrize("lasting", [False, True])
def test_a_disk_that_fills_up_while_overwriting_keeps_the_old_pack(tmp_path, tree, file_hook, options, lasting):
    out = packed(photos(tmp_path / "other", per_class=1), tmp_path / "p.h5")
    old = out.read_bytes()
    work = partial(pack, tree, out, threads=1, overwrite=True, progress=False, **options)
    for _ in failures(file_hook, fill_disk, work, lasting=lasting, uncounted=["remove"]):
        assert out.read_bytes() == old
        assert leftovers(tmp_path) == []
    assert out.read_bytes() != old


@pytest.mark.full
@every
def test_ctrl_c_at_any_operation_leaves_no_files(tmp_path, tree, file_hook, options):
    work = partial(pack, tree, tmp_path / "p.h5", threads=2, progress=False, **options)
    for number, _ in failures(file_hook, interrupt, work, uncounted=["remove"]):
        assert names_in(tmp_path) == ["tree"], number


@pytest.mark.parametrize(
    "options", [WORKS["raw"], WORKS["source"], WORKS["source, one left out"], WORKS["raw, one left out"]]
)
def test_too_little_space_is_an_error_before_anything_is_written(tmp_path, tree, file_hook, monkeypatch, options):
    changes = ChangeHook(0, fill_disk)
    file_hook(changes)
    monkeypatch.setattr(file_changes, "free_bytes", lambda path: 4000)
    with pytest.raises(NotEnoughSpace, match=r"Cannot pack .*3.9 KiB free; expected at least"):
        pack(tree, tmp_path / "p.h5", progress=False, **options)
    assert changes.count == 0


@pytest.mark.parametrize("options", [WORKS["jpeg"], WORKS["raw, one left out"], WORKS["jpeg, one black"]])
def test_too_little_space_for_the_copy_without_gaps_is_an_error_and_leaves_no_files(
    tmp_path, tree, monkeypatch, options
):
    free = iter([10**9, 100])
    monkeypatch.setattr(file_changes, "free_bytes", lambda path: next(free))
    with pytest.raises(NotEnoughSpace, match=r"100 B free"):
        pack(tree, tmp_path / "p.h5", progress=False, **options)
    assert names_in(tmp_path) == ["tree"]


@every
def test_too_many_bad_files_leave_no_files(tmp_path, tree, options):
    for path in files_of(tree)[2:5]:
        path.write_bytes(b"")
    with pytest.raises(BadImage, match="Cannot pack"):
        pack(tree, tmp_path / "p.h5", max_bad=2, progress=False, **options)
    assert names_in(tmp_path) == ["tree"]
