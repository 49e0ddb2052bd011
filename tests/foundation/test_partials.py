"""After any failure or kill, a partial is published completely or not at all, and leftovers are removed later."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from forks import in_fork, is_killed_at, make_pair, pair_text
from trees import leftovers

from colabkit.errors import TargetExists
from colabkit.foundation import file_changes, partials

OTHER_BOOT = "00000000"


def test_a_published_partial_is_complete_and_leaves_no_other_files(tmp_path):
    with partials.Partial(tmp_path / "made" / "final") as partial:
        file_changes.write_file(partial.path, b"data")
        assert partial.path.parent == tmp_path / "made"
        assert not (tmp_path / "made" / "final").exists()
        partial.publish()
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["final"]
    assert (tmp_path / "made" / "final").read_bytes() == b"data"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("fill", [make_pair, lambda path, text: file_changes.write_file(path, text.encode())])
def test_an_unpublished_partial_is_removed(tmp_path, error, fill):
    def fail() -> None:
        with partials.Partial(tmp_path / "final") as partial:
            fill(partial.path, "text")
            raise error

    with pytest.raises(error):
        fail()
    with partials.Partial(tmp_path / "final") as partial:
        fill(partial.path, "text")
    assert list(tmp_path.iterdir()) == []


def test_publish_does_not_replace_what_was_created_meanwhile_even_a_dangling_symlink(tmp_path):
    final = tmp_path / "final"
    for put in (lambda: final.symlink_to(tmp_path / "nowhere"), lambda: final.write_bytes(b"theirs")):
        with partials.Partial(final) as partial:
            file_changes.write_file(partial.path, b"ours")
            put()
            with pytest.raises(TargetExists):
                partial.publish()
        assert os.readlink(final) if final.is_symlink() else final.read_bytes() == b"theirs"
        final.unlink()
        assert leftovers(tmp_path) == []


def test_publish_replaces_files_and_folders_on_request(tmp_path):
    for text in ("old", "new"):
        with partials.Partial(tmp_path / "file") as partial:
            file_changes.write_file(partial.path, text.encode())
            partial.publish(replace=True)
        with partials.Partial(tmp_path / "folder") as partial:
            make_pair(partial.path, text)
            partial.publish(replace=True)
    assert (tmp_path / "file").read_text() == pair_text(tmp_path / "folder") == "new"
    assert leftovers(tmp_path) == []


def replace_folder(final: Path) -> None:
    with partials.Partial(final) as partial:
        make_pair(partial.path, "new")
        partial.publish(replace=True)


def test_a_failure_at_any_operation_of_a_replacement_leaves_the_old_or_the_new_version(tmp_path, file_hook):
    seen: set[str | None] = set()
    for number in itertools.count(1):
        final = tmp_path / str(number) / "final"
        make_pair(final, "old")
        left = iter(range(number - 1))

        def fail(operation: str, path: Path, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                file_hook(None)
                raise OSError(errno.ENOSPC, "full")

        file_hook(fail)
        with contextlib.suppress(OSError):
            replace_folder(final)
        is_over = file_changes.hook is not None
        file_hook(None)
        assert pair_text(final) in ("old", "new"), f"lost at operation {number}"
        assert leftovers(tmp_path) == [], f"left behind at operation {number}"
        seen.add(pair_text(final))
        if is_over:
            break
    assert number > 5
    assert seen == {"old", "new"}


def test_a_kill_at_any_operation_of_a_replacement_leaves_the_old_the_new_or_no_version(tmp_path):
    number = 1
    final = tmp_path / "final"
    while True:
        file_changes.remove(final)
        make_pair(final, "old")
        if not is_killed_at(number, lambda: replace_folder(final)):
            break
        was_there = pair_text(final)
        assert was_there in ("old", "new", None)
        with partials.Partial(final):
            assert pair_text(final) == (was_there or "old"), "what was taken away comes back"
        replace_folder(final)
        assert pair_text(final) == "new"
        assert leftovers(tmp_path) == [], f"not reclaimed after a kill at operation {number}"
        number += 1
    assert number > 5


def test_the_next_partial_removes_those_of_killed_processes(tmp_path):
    def die() -> None:
        with partials.Partial(tmp_path / "final") as partial:
            make_pair(partial.path, "half")
            os._exit(0)

    in_fork(die)
    assert len([name for name in leftovers(tmp_path) if name.endswith(".partial")]) == 1
    with partials.Partial(tmp_path / "other"):
        pass
    assert leftovers(tmp_path) != [], "a partial of another path was taken away"
    with partials.Partial(tmp_path / "final"):
        assert leftovers(tmp_path) == []


def test_leftover_partials_are_found_for_any_spelling_of_the_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def die() -> None:
        with partials.Partial(Path("final")) as partial:
            file_changes.write_file(partial.path, b"half")
            os._exit(0)

    in_fork(die)
    assert leftovers(tmp_path) != []
    with partials.Partial(tmp_path / "final"):
        assert leftovers(tmp_path) == []


def test_the_partial_of_a_running_process_is_not_removed(tmp_path):
    ready, release = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        with partials.Partial(tmp_path / "final") as partial:
            file_changes.write_file(partial.path, b"in work")
            os.write(ready[1], b"x")
            os.read(release[0], 1)
            os._exit(0)
    os.read(ready[0], 1)
    try:
        with partials.Partial(tmp_path / "final"):
            assert len(leftovers(tmp_path)) == 1
    finally:
        os.write(release[1], b"x")
        os.waitpid(pid, 0)
        for fd in (*ready, *release):
            os.close(fd)


def test_two_partials_of_one_process_do_not_collide(tmp_path):
    with partials.Partial(tmp_path / "final") as first, partials.Partial(tmp_path / "final") as second:
        file_changes.write_file(first.path, b"1")
        file_changes.write_file(second.path, b"2")
        first.publish()
    assert (tmp_path / "final").read_bytes() == b"1"
    assert leftovers(tmp_path) == []


def test_a_partial_that_is_being_removed_is_not_removed_a_second_time(tmp_path, file_hook):
    removed: list[Path] = []

    def enter_another(operation: str, path: Path) -> None:
        removed.append(path)
        if len(removed) == 1:
            with partials.Partial(tmp_path / "final"):
                pass

    with partials.Partial(tmp_path / "final") as partial:
        file_changes.make_folder(partial.path)
        file_hook(enter_another)
    assert removed == [partial.path]


def left_by(tmp_path: Path, **changes: str) -> Path:
    with partials.Partial(tmp_path / "final") as partial:
        match = partials._PARTIAL.fullmatch(partial.path.name)
    assert match
    parts = {**match.groupdict(), **changes}
    path = tmp_path / ".colabkit-{key}-{boot}-{pid}-{start}-1.partial".format(**parts)
    path.write_text("half")
    return path


def test_a_reused_process_id_does_not_keep_a_partial(tmp_path):
    path = left_by(tmp_path, start="1")
    with partials.Partial(tmp_path / "final"):
        assert not path.exists()


def test_a_leftover_of_another_user_does_not_stop_the_work(tmp_path, file_hook):
    path = left_by(tmp_path, start="1")

    def refuse(operation: str, changed: Path) -> None:
        if operation == "remove" and changed == path:
            raise PermissionError(errno.EPERM, "Operation not permitted", str(changed))

    file_hook(refuse)
    with partials.Partial(tmp_path / "final") as partial:
        partial.path.write_text("done")
        partial.publish()
    assert partials.discard_abandoned(tmp_path / "final") == 0, "it could not be removed"


def test_a_process_that_proc_hides_counts_as_running_while_it_exists(monkeypatch):
    def hidden(path: str) -> str:
        raise FileNotFoundError(path)

    boot, pid, _ = partials.owner().split("-")
    monkeypatch.setattr(partials, "read_file", hidden)
    assert partials.owner() == f"{boot}-{pid}-0"
    assert partials.is_running(f"{boot}-{pid}-12345")
    monkeypatch.setattr(os, "kill", lambda pid, signal: (_ for _ in ()).throw(PermissionError()))
    assert partials.is_running(f"{boot}-1-1"), "a process of another user"
    monkeypatch.setattr(os, "kill", lambda pid, signal: (_ for _ in ()).throw(ProcessLookupError()))
    assert partials.is_running(f"{boot}-1-0") is False


@pytest.mark.parametrize(("age_s", "stays"), [(0, True), (23 * 3600, True), (25 * 3600, False)])
def test_another_machines_partial_is_removed_only_after_a_day(tmp_path, age_s, stays):
    path = left_by(tmp_path, boot=OTHER_BOOT)
    then = path.stat().st_mtime - age_s
    os.utime(path, (then, then))
    with partials.Partial(tmp_path / "final"):
        assert path.exists() == stays


def test_a_process_whose_name_is_cut_within_a_character_can_write(tmp_path):
    def write() -> None:
        pr_set_name = 15
        assert ctypes.CDLL(None).prctl(pr_set_name, "обучение".encode()[:15]) == 0
        with partials.Partial(tmp_path / "final") as partial:
            partial.path.write_text("done")
            partial.publish()

    assert in_fork(write) == 0
    assert (tmp_path / "final").read_text() == "done"


def test_files_that_only_resemble_a_partial_are_not_removed(tmp_path):
    path = left_by(tmp_path, start="1")
    look_alike = path.with_name(path.name + ".txt")
    look_alike.write_text("mine")
    with partials.Partial(tmp_path / "final"):
        assert look_alike.read_text() == "mine"


def test_a_failing_removal_does_not_hide_the_original_error(tmp_path, file_hook):
    def fail(operation: str, path: Path) -> None:
        if operation == "remove":
            raise OSError(errno.EIO, "broken")

    def use(error: Exception | None) -> None:
        with partials.Partial(tmp_path / "final") as partial:
            file_hook(None)
            file_changes.write_file(partial.path, b"x")
            file_hook(fail)
            if error:
                raise error

    with pytest.raises(ValueError, match="first"):
        use(ValueError("first"))
    with pytest.raises(OSError, match="broken"):
        use(None)
