"""IPython completes options, fixed values, variables and paths in a magic's line."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from far_mounts import FuseMount, has_fuse
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell
from magic_shells import loaded_shell
from sampling import sampled
from trees import needs

from colabkit.errors import TimedOut
from colabkit.notebook import lines as completion
from colabkit.notebook.verbs import LINES

AGREED_S, MOST_S = completion._LIST_S, 20.0
FOUND = (r"bird\ list.csv", r"bird\ songs/", "birds.h5", "birds/")


@pytest.fixture(params=sampled([False, True], 1), ids=["plain", "jedi"])
def shell(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[InteractiveShell]:
    monkeypatch.chdir(tmp_path)
    # A busy machine may need more than two seconds to start an interpreter.
    monkeypatch.setattr(completion, "_LIST_S", 60.0)
    for name in ("birds", "bird songs", "it's", ".hidden"):
        (tmp_path / name).mkdir()
    for name in ("birds.h5", "bird list.csv", "$price", "{birds}"):
        (tmp_path / name).touch()
    (tmp_path / "bird songs" / "loud ones").mkdir()
    with loaded_shell() as shell:
        shell.Completer.use_jedi = request.param
        shell.user_ns.update(my_loader=1, my_step=2, _own=3)
        yield shell


def offered(shell: InteractiveShell, line: str) -> list[str]:
    with provisionalcompleter():
        found = [*shell.Completer.completions(line, len(line))]
    return [line[: match.start] + match.text + line[match.end :] for match in found]


def check(shell: InteractiveShell, line: str, expected: Iterable[str]) -> None:
    """Check the completions of a line; jedi must not add any."""
    assert sorted(offered(shell, line)) == sorted(expected)


def test_options_of_a_magic_are_offered(shell: InteractiveShell) -> None:
    names = ("extract", "progress", "refresh", "dry-run")
    check(shell, "%stage birds --no-", {f"%stage birds --no-{name}" for name in names})
    check(shell, "%%train birds.h5 --batch", ["%%train birds.h5 --batch-size"])
    check(shell, "%train my_step my_loader --batch", [])
    check(shell, "%dashboard --o", ["%dashboard --off"])
    assert "%%dashboard --off" not in offered(shell, "%%dashboard --")


def test_special_values_are_offered(shell: InteractiveShell) -> None:
    for line, words in (
        ("%pack a b --encoding ", {"raw", "source", "jpeg", "auto"}),
        ("%pack a b --encoding s", {"source"}),
        ("%pack a b --encoding=s", {"source"}),
        ("%pack a b --on-bad ", {"raise", "skip", "blank"}),
        ("%stage birds --to t", {"tmpfs"}),
        ("%dashboard --screen l", {"lines"}),
        ("%%train birds.h5 --device ", {"cuda", "cpu"}),
        ("found = %publish birds drive: --verify ", {"full", "size"}),
        ("%train my_step my_loader --mode m", {"min", "max"}),
    ):
        begun = line[: max(line.rfind(" "), line.rfind("=")) + 1]
        check(shell, line, {begun + word for word in words})


def test_verbs_of_colabkit_and_their_options_are_offered(shell: InteractiveShell) -> None:
    check(shell, "%colabkit ", {f"%colabkit {verb.name}" for verb in LINES})
    check(shell, "%colabkit st", ["%colabkit stage", "%colabkit status"])
    check(shell, "%colabkit pack a b --enc", ["%colabkit pack a b --encoding"])
    check(shell, "%colabkit nothing --enc", [])


def test_variables_are_offered_for_objects(shell: InteractiveShell) -> None:
    check(shell, "%train my_", {"%train my_loader", "%train my_step"})
    check(
        shell,
        "%train my_step my_loader --state my_step my_",
        {
            "%train my_step my_loader --state my_step my_loader",
            "%train my_step my_loader --state my_step my_step",
        },
    )
    check(shell, "%%train my_", {"%%train my_loader", "%%train my_step"})
    check(shell, "%doctor my_l", {"%doctor my_loader"})
    check(shell, "%doctor _ow", ["%doctor _ow"])


def test_paths_are_offered_with_the_required_quoting(shell: InteractiveShell) -> None:
    for line, lines in (
        ("%stage bir", [r"%stage bird\ list.csv", r"%stage bird\ songs/", "%stage birds.h5", "%stage birds/"]),
        (
            "%stage ./bir",
            [r"%stage ./bird\ list.csv", r"%stage ./bird\ songs/", "%stage ./birds.h5", "%stage ./birds/"],
        ),
        (r"%stage bird\ songs/", [r"%stage bird\ songs/loud\ ones/"]),
        ('%stage "bird so', ['%stage "bird songs/']),
        ("%stage 'bird songs/lo", ["%stage 'bird songs/loud ones/"]),
        ("%stage it", [r"%stage it\'s/"]),
        ('%stage "it', ["%stage \"it's/"]),
        ("%stage .hid", ["%stage .hidden/"]),
        (r"%stage \$p", [r"%stage \$price"]),
        ("%stage birds --to bird", [f"%stage birds --to {name}" for name in FOUND]),
        ("near = %stage birds.", ["near = %stage birds.h5"]),
        ("%%train birds.", ["%%train birds.h5"]),
    ):
        check(shell, line, lines)


def test_an_offered_path_is_parsed_as_the_same_path(shell: InteractiveShell, tmp_path: Path) -> None:
    from colabkit.notebook.lines import split_line

    names = ["two words", "one's", 'say "hi"', "back\\slash", "$my_step", "{my_step}", "tab\there"]
    for name in names:
        (tmp_path / name).touch()
    lines = offered(shell, "%verify ./")
    found = {split_line(line.removeprefix("%verify "), shell.user_ns)[0] for line in lines}
    assert {f"./{name}" for name in names} <= found


def test_drive_paths_are_offered(shell: InteractiveShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLABKIT_DRIVE", str(tmp_path))
    check(shell, "%stage drive:bird", [f"%stage drive:{name}" for name in FOUND])
    check(shell, '%stage "drive:bird songs/l', ['%stage "drive:bird songs/loud ones/'])
    check(shell, "%prepare a --to drive:birds.", ["%prepare a --to drive:birds.h5"])


def test_without_drive_nothing_is_offered(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLABKIT_DRIVE", "/no/such/place")
    check(shell, "%stage drive:bi", ["%stage drive:bi"])


def test_completion_gives_up_on_a_hung_mount(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "_LIST_S", AGREED_S)
    asked = []

    def hangs(command: list[str], act: str, timeout: float) -> None:
        asked.append(timeout)
        raise TimedOut(act)

    monkeypatch.setattr(completion.processes, "run", hangs)
    check(shell, "%stage drive_/bir", ["%stage drive_/bir"])
    assert asked
    assert max(asked) <= 2.0


@pytest.mark.full
def test_a_hung_drive_does_not_block_completion(
    shell: InteractiveShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("FUSE", has_fuse())
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "birds.h5").touch()
    with FuseMount(tmp_path / "far", tmp_path / "root", "fuse.drive") as mount:
        monkeypatch.setenv("COLABKIT_DRIVE", str(mount.point))
        check(shell, "%verify drive:bi", ["%verify drive:birds.h5"])
        mount.hang()
        monkeypatch.setattr(completion, "_LIST_S", AGREED_S)
        began = time.monotonic()
        check(shell, "%verify drive:bi", ["%verify drive:bi"])
        assert time.monotonic() - began < MOST_S
        mount.go_on()


def test_long_folders_are_truncated(shell: InteractiveShell, tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    for number in range(260):
        (tmp_path / "many" / f"{number:03}").touch()
    assert sum(line[-3:].isdigit() for line in offered(shell, "%verify many/")) == 200


def test_other_lines_are_left_to_ipython(shell: InteractiveShell) -> None:
    shell.user_ns["stages"] = ["a"]
    with provisionalcompleter():
        assert "stages" in [match.text for match in shell.Completer.completions("stag", 4)]
    check(shell, "%stagex --no", [])


def test_unloading_ends_completion(shell: InteractiveShell) -> None:
    dispatcher = shell.strdispatchers["complete_command"]
    assert any("stage" in pattern.pattern for pattern in dispatcher.regexs)
    shell.extension_manager.unload_extension("colabkit")
    assert not any("stage" in pattern.pattern for pattern in dispatcher.regexs)
    assert "%stage birds --no-extract" not in offered(shell, "%stage birds --no-")
    shell.extension_manager.load_extension("colabkit")
