"""`%%dashboard` shows the panel for one cell, `%dashboard` for all following cells that loop over a Loader."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from magic_shells import loaded_shell, run, shown_by
from torch.utils.data import DataLoader, TensorDataset

import colabkit
from colabkit.errors import InvalidOption
from colabkit.foundation import meters
from colabkit.monitoring.panel import api as panel_api
from colabkit.monitoring.panel.api import is_any_open

LOOP = "for batch in loader: pass"


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    with loaded_shell() as shell:
        shell.user_ns["loader"] = colabkit.Loader((np.zeros((24, 2), np.float32), np.zeros(24, np.int64)), 4)
        yield shell
    assert not is_any_open()
    assert not meters.listeners


def test_a_cell_runs_with_the_panel_and_its_last_expression_is_displayed(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    run(shell, f"%%dashboard\ntotal = 6 * 7\n{LOOP}\ntotal").raise_error()
    shown = "\n".join(shown_by(capsys))
    assert shown.count("step 6/6") == 1
    assert "42" in shown
    assert shell.user_ns["_"] == 42


def test_values_are_displayed_as_in_any_cell(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    for body, is_shown in {"6 * 7": True, "6 * 7;": False, "6 * 7; # yes": False, "a = 5": False}.items():
        run(shell, f"%%dashboard\n{body}").raise_error()
        assert any("42" in line for line in shown_by(capsys)) == is_shown, body
    shell.ast_node_interactivity = "all"
    run(shell, "%%dashboard --screen none\n6 * 7\n6 * 8").raise_error()
    assert [line.split()[-1] for line in shown_by(capsys)] == ["42", "48"]


def test_a_cell_with_an_unknown_loader_suggests_watch(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.push({"foreign": DataLoader(TensorDataset(torch.zeros(8, 2)), 4), "watch": colabkit.watch})
    run(shell, "%%dashboard\nfor batch in foreign: pass").raise_error()
    assert [line for line in shown_by(capsys) if "colabkit.watch(loader)" in line]
    run(shell, "%%dashboard\nfor batch in watch(foreign): pass").raise_error()
    run(shell, "%%dashboard --screen none\nfor batch in foreign: pass").raise_error()
    assert not [line for line in shown_by(capsys) if "No panel" in line]


def test_switching_the_panel_off_suggests_watch_if_no_loop_was_detected(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    def hints(*cells: str) -> int:
        for cell in ("%dashboard", *cells, "%dashboard --off", "%dashboard --off"):
            run(shell, cell).raise_error()
        return sum("colabkit.watch(loader)" in line for line in shown_by(capsys))

    shell.push({"foreign": DataLoader(TensorDataset(torch.zeros(8, 2)), 4)})
    assert hints("for batch in foreign: pass", "a = 5") == 1
    assert hints("for batch in foreign: pass", LOOP, "a = 5") == 0
    assert hints("%dashboard --screen none", "for batch in foreign: pass") == 0
    assert hints() == 0, "a hint is shown although no other cell ran"


def test_the_options_match_the_function(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    run(shell, f"%%dashboard --screen none\n{LOOP}").raise_error()
    assert shown_by(capsys) == []
    result = run(shell, f"%%dashboard --screen window\n{LOOP}")
    assert isinstance(result.error_in_exec, InvalidOption)


def test_an_error_shows_the_cells_line_and_stops_the_panel(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(shell, "%%dashboard\nfor batch in loader:\n    broken = 1 / 0")
    assert isinstance(result.error_in_exec, ZeroDivisionError)
    shown = "\n".join(shown_by(capsys))
    assert "stopped by ZeroDivisionError" in shown
    trace = shown[shown.rindex("Traceback") :]
    assert "3     broken = 1 / 0" in trace
    assert "colabkit/magics" not in trace
    assert "run_cell_magic" not in trace


def test_the_panel_is_shown_in_each_cell_that_loops_until_it_is_switched_off(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    run(shell, "%dashboard").raise_error()
    assert "%dashboard --off" in shown_by(capsys)[0]
    run(shell, "a = 5")
    assert shown_by(capsys) == [], "a cell without a loop shows a panel"
    for _ in range(2):
        run(shell, LOOP).raise_error()
        assert sum("step 6/6" in line for line in shown_by(capsys)) == 1
    run(shell, "import colabkit")
    run(shell, "report = colabkit.train(lambda batch: 0.5, loader)").raise_error()
    assert sum("step 6/6" in line for line in shown_by(capsys)) == 1, "train() and %dashboard do not share one panel"
    run(shell, "%dashboard --off").raise_error()
    run(shell, LOOP)
    assert shown_by(capsys) == []
    run(shell, "report = colabkit.train(lambda batch: 0.5, loader)").raise_error()
    assert sum("step 6/6" in line for line in shown_by(capsys)) == 1, "train() shows no panel of its own"


def test_a_cell_that_looks_at_one_batch_shows_no_panel(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    run(shell, "%dashboard")
    shown_by(capsys)
    run(shell, "batch = next(iter(loader))").raise_error()
    assert shown_by(capsys) == []
    run(shell, "batches = iter(loader)\nfirst, second = next(batches), next(batches)").raise_error()
    assert sum("step 2/6" in line for line in shown_by(capsys)) == 1


def test_the_panel_shows_that_its_cell_failed(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    run(shell, "%dashboard")
    run(shell, "for batch in loader:\n    1 / 0")
    assert "stopped by ZeroDivisionError" in "\n".join(shown_by(capsys))


def test_a_panel_opened_by_the_cell_is_the_only_one(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    run(shell, "import colabkit")
    run(shell, "%dashboard")
    shown_by(capsys)
    run(shell, f"with colabkit.dashboard():\n    {LOOP}").raise_error()
    assert sum("step 6/6" in line for line in shown_by(capsys)) == 1
    run(shell, f"%%dashboard\n{LOOP}").raise_error()
    assert sum("step 6/6" in line for line in shown_by(capsys)) == 1


def test_nested_cells_leave_no_panel_open(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    run(shell, "%dashboard")
    run(shell, f"get_ipython().run_cell({LOOP!r})").raise_error()
    assert sum("step 6/6" in line for line in shown_by(capsys)) == 1
    assert not is_any_open()


def test_unloading_closes_the_panel(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    run(shell, "%unload_ext colabkit").raise_error()
    before = {event: len(found) for event, found in shell.events.callbacks.items()}
    run(shell, "%load_ext colabkit\n%dashboard").raise_error()
    run(shell, "%unload_ext colabkit").raise_error()
    assert {event: len(found) for event, found in shell.events.callbacks.items()} == before
    shown_by(capsys)
    run(shell, LOOP)
    assert shown_by(capsys) == []
    assert not is_any_open()
    run(shell, "%load_ext colabkit")


def test_a_loop_in_the_cell_that_switches_the_panel_off_counts(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    run(shell, "%dashboard")
    run(shell, "a = 5")
    shown_by(capsys)
    run(shell, f"{LOOP}\n%dashboard --off").raise_error()
    shown = "\n".join(shown_by(capsys))
    assert "step 6/6" in shown
    assert "watch(" not in shown


def test_invalid_options_do_not_switch_the_panel_on(shell: InteractiveShell) -> None:
    assert isinstance(run(shell, "%dashboard --refresh-s 0.1").error_in_exec, InvalidOption)
    run(shell, LOOP)
    assert not is_any_open()
    run(shell, "%dashboard --off").raise_error()


def test_in_a_notebook_long_operations_are_shown_on_a_panel_of_their_own(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []

    def stage(**options: object) -> None:
        opened.append(len(panel_api._open))

    monkeypatch.setattr(colabkit, "stage", stage, raising=False)
    run(shell, "%stage photos").raise_error()
    monkeypatch.setattr(shell, "kernel", object(), raising=False)
    run(shell, "%stage photos").raise_error()
    run(shell, "%stage photos --no-progress").raise_error()
    run(shell, "%%dashboard\n%stage photos").raise_error()
    assert opened == [0, 1, 0, 1], "in a terminal there is a bar, and one panel is enough"
