"""`%%train` runs a cell's body as the step, restores its variables, shows one-line errors, and resumes exactly."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from magic_shells import loaded_shell, run, shown_by
from sampling import sampled

import colabkit
from colabkit.errors import InvalidOption, MissingSplit, SourceMissing
from colabkit.notebook.cells import NAMES
from colabkit.training.report import TrainingInterrupted

EPOCHS = 3


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    monkeypatch.chdir(tmp_path)
    with loaded_shell() as shell:
        shell.user_ns.update(seen=[], data=arrays(24))
        yield shell


@pytest.fixture
def pack(image_tree: Path, tmp_path: Path) -> Path:
    return colabkit.pack(image_tree, tmp_path / "p.h5", progress=False).path


def arrays(count: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(2 * count, dtype=np.float32).reshape(count, 2), np.arange(count) % 3


def train(shell: InteractiveShell, line: str, body: str) -> colabkit.TrainReport:
    done = run(shell, f"%%train {line}\n{body}")
    done.raise_error()
    # IPython sets `_` only if no other code has set it.
    report = done.result
    assert isinstance(report, colabkit.TrainReport)
    return report


def test_the_body_runs_once_per_batch_with_its_variables_in_scope(shell: InteractiveShell) -> None:
    body = "seen.append((epoch, step, x.shape, y.tolist(), len(batch)))\nloss = x.mean()"
    report = train(shell, "data --batch-size 10 --epochs 2 --no-shuffle --device cpu", body)
    seen = shell.user_ns["seen"]
    assert [entry[:2] for entry in seen] == [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4), (1, 5)]
    assert [tuple(entry[2]) for entry in seen[:3]] == [(10, 2), (10, 2), (4, 2)]
    assert seen[2][3] == [2, 0, 1, 2]
    assert {entry[4] for entry in seen} == {2}
    assert report.epochs[1].values["loss"] == pytest.approx(23.5)


def test_a_pack_is_named_by_its_path_a_variable_or_a_report(shell: InteractiveShell, pack: Path) -> None:
    spaced = pack.with_name("a pack of $mine {x}.h5")
    pack.rename(spaced)
    opened = colabkit.open_pack(spaced)
    report = colabkit.pack(opened["train"], pack.with_name("again.h5"), progress=False)
    shell.user_ns |= {"opened": opened, "split": opened["train"], "where": spaced, "packed": report}
    quoted = f"'{spaced}'"
    for name in (
        quoted,
        f'"{spaced.name}"',
        "opened",
        "split",
        "where",
        "$where",
        "{where}",
        "packed",
        "{split}",
        "$opened",
    ):
        assert train(shell, f"{name} --device cpu", "loss = x.float().mean()").epochs[0].samples == 24


def test_drive_paths_can_name_packs(
    shell: InteractiveShell, pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLABKIT_DRIVE", str(tmp_path))
    assert train(shell, "drive:p.h5 --batch-size 24", "pass").steps == 1


def test_a_loader_is_used_unchanged_and_loader_options_are_rejected(shell: InteractiveShell) -> None:
    shell.user_ns["loader"] = colabkit.Loader(shell.user_ns["data"], 8)
    assert train(shell, "loader --epochs 2", "loss = 1.0").steps == 6
    result = run(shell, "%%train loader --batch-size 64 --no-shuffle\npass")
    assert isinstance(result.error_in_exec, InvalidOption)
    assert (
        "'loader' is a Loader, to which --batch-size, --shuffle cannot be applied. Omit --batch-size, --shuffle"
        in str(result.error_in_exec)
    )


def test_loader_options_reach_the_loader(shell: InteractiveShell) -> None:
    shell.user_ns["double"] = lambda images: 2 * images
    body = "seen.append((x[:, 0] / 4).tolist())"
    train(shell, "data --batch-size 24 --transform double --seed 3", body)
    (first,) = shell.user_ns["seen"]
    loader = colabkit.Loader(shell.user_ns["data"], 24, shuffle=True, seed=3)
    assert first == next((x[:, 0] / 2).tolist() for x, _ in loader)


def test_unscaled_images_get_advice_that_fits_where_the_loader_was_created(shell: InteractiveShell) -> None:
    data = (np.zeros((4, 3, 6, 5), np.uint8), np.arange(4))
    shell.user_ns |= {"data": data, "loader": colabkit.Loader(data, 4), "net": torch.nn.Conv2d(3, 2, 3)}
    said = {"data": "and use --transform normalize.", "loader": "Pass transform=colabkit.augment.Normalize() to the"}
    for name, step in said.items():
        error = run(shell, f"%%train {name}\nloss = net(x).mean()").error_in_exec
        assert isinstance(error, InvalidOption)
        assert "the images are uint8" in str(error)
        assert step in str(error)
    shell.user_ns["normalize"] = colabkit.augment.Normalize()
    assert train(shell, "data --transform normalize", "loss = net(x).mean()").steps == 1
    with pytest.raises(RuntimeError, match="Byte"):
        train(shell, "data --transform normalize", "raise RuntimeError('Byte')")


@pytest.mark.parametrize(
    ("data", "x", "y"),
    [
        (np.zeros((4, 2)), torch.Tensor, type(None)),
        ({"a": np.zeros((4, 2)), "b": np.ones(4)}, torch.Tensor, torch.Tensor),
        ({"Y": np.ones(4), "X": np.zeros((4, 2))}, torch.Tensor, torch.Tensor),
        ((np.zeros((4, 2)), np.ones(4), np.full(4, 7)), torch.Tensor, torch.Tensor),
    ],
)
def test_batches_of_any_structure_have_x_and_y(shell: InteractiveShell, data: object, x: type, y: type) -> None:
    shell.user_ns["data"] = data
    train(shell, "data --batch-size 4", "seen.append((type(x), type(y), getattr(x, 'ndim', 0), batch))")
    ((x_type, y_type, dimensions, batch),) = shell.user_ns["seen"]
    assert (x_type, y_type, dimensions) == (x, y, 2), "x does not contain the samples"
    if isinstance(data, tuple):
        assert batch[2].tolist() == [7] * 4, "the batch lacks its third field"


def test_the_variables_of_the_body_are_restored_even_after_an_error(shell: InteractiveShell) -> None:
    shell.user_ns.update(x="mine", epoch=17)
    for body in ("x = y = 5\nkept = step", "1 / 0", "raise KeyboardInterrupt", "del x, y, step"):
        run(shell, f"%%train data\n{body}")
        assert {name: shell.user_ns.get(name) for name in NAMES if name in shell.user_ns} == {"x": "mine", "epoch": 17}
    assert shell.user_ns["kept"] == 0


def test_the_variables_are_restored_between_steps(shell: InteractiveShell) -> None:
    shell.user_ns.update(x="mine")
    shell.run_cell("def judge():\n    seen.append((x, 'step' in globals()))\n    return {'a': 1}").raise_error()
    train(shell, "data --batch-size 8 --validate judge --validate-every 1 --device cpu", "pass")
    assert shell.user_ns["seen"] == [("mine", False)] * 3


def test_a_loader_that_was_used_before_starts_at_epoch_0(shell: InteractiveShell) -> None:
    shell.user_ns["loader"] = colabkit.Loader(shell.user_ns["data"], 12)
    for _ in range(2):
        train(shell, "loader --epochs 2", "seen.append((epoch, step))")
    assert shell.user_ns["seen"] == [(0, 0), (0, 1), (1, 2), (1, 3)] * 2


def test_a_loss_counts_in_the_steps_that_set_it(shell: InteractiveShell) -> None:
    for body, steps in (
        ("loss = 0.5", [0, 1, 2]),
        ("if step != 1: loss = 0.5", [0, 2]),
        ("total = loss(x)", []),
        ("for loss in (1.0, 0.5): pass", [0, 1, 2]),
        ("def give():\n    global loss\n    loss = 0.5 + step\ngive()", [0, 1, 2]),
        ("loss = 0.5\ndel loss", []),
        ("loss = {'loss': 0.5, 'accuracy': 1.0}", [0, 1, 2]),
    ):
        shell.user_ns["loss"] = lambda scores: scores.mean()
        report = train(shell, "data --batch-size 8 --device cpu", body)
        assert [step - 1 for step, _ in report.curve.get("loss", [])] == steps, body
    assert report.epochs[0].values == {"loss": 0.5, "accuracy": 1.0}


def test_a_loss_that_is_not_a_number_is_a_one_line_error(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    run(shell, "%%train data --batch-size 8\nloss = x")
    (line,) = shown_by(capsys)[-1:]
    assert line.startswith(
        "InvalidOption: Cannot train: the cell sets loss to a Tensor of shape [8, 2]; expected a single number"
    )
    assert "Assign its mean to loss" in line
    run(shell, "%%train data --batch-size 8\nloss = 'hello'")
    (line,) = shown_by(capsys)[-1:]
    assert "sets loss to a str; expected a single number or a dict of numbers. Use another name" in line


def test_an_error_shows_the_line_of_the_cell_without_colabkits_frames(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.run_cell("def inner(value):\n    return value / 0")
    capsys.readouterr()
    result = run(shell, "%%train data --device cpu\n\nscale = 2\nbroken = inner(x.sum().item() and 3)\n")
    assert isinstance(result.error_in_exec, ZeroDivisionError)
    shown = shown_by(capsys)
    text = "\n".join(shown)
    trace = text[text.rindex("Traceback") :]
    assert "broken = inner(" in trace
    assert re.search(r"-+> ?4 broken = inner", trace), "the traceback does not point to line 4 of the cell"
    assert "return value / 0" in trace
    for hidden in ("colabkit/training", "colabkit/magics", "run_cell_magic", "loop.py"):
        assert hidden not in trace
    assert len(trace.splitlines()) < 25


def test_colabkit_debug_shows_the_full_traceback(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLABKIT_DEBUG", "1")
    run(shell, "%%train data --device cpu\n1 / 0")
    assert "colabkit/training/" in "\n".join(shown_by(capsys))


def test_bad_syntax_is_a_one_line_error_with_the_line_of_the_cell(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    for cell, said in (
        ("%%train data\na = 1\nb = = 2", "on line 3, 'b = = 2'"),
        ("%%train data\n\n\nreturn 5", "on line 4, 'return 5'"),
        ("%%train data\nif x:", "on line 2"),
        ("%%dashboard\nfor batch in loader", "on line 2, 'for batch in loader'"),
    ):
        assert isinstance(run(shell, cell).error_in_exec, InvalidOption)
        (line,) = shown_by(capsys)
        assert line.startswith("InvalidOption: Cannot run the cell: ")
        assert said in line


def test_magics_and_commands_in_the_body_work(shell: InteractiveShell) -> None:
    train(shell, "data --batch-size 12", "where = %pwd\nmany = !echo one two\nseen.append((where, many[0]))")
    assert shell.user_ns["seen"] == [(os.getcwd(), "one two")] * 2


def test_an_invalid_line_is_a_one_line_error(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    shell.user_ns |= {"model": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 2)}
    for line, error, said in (
        ("nowhere.h5", SourceMissing, "nowhere.h5"),
        ("dta", InvalidOption, "or use data."),
        ("data --split dev", InvalidOption, "--split is given, but 'data' is a tuple; expected a pack. Omit --split."),
        ("data --batch-size big", InvalidOption, "'big' is not a whole number"),
        ("data --device tpu", InvalidOption, "tpu"),
        ("data --transform nothing", InvalidOption, "Cannot use 'nothing'"),
        ("data --to runs", InvalidOption, "Add --state head model"),
        ("data --state seen", InvalidOption, "state['seen'] is a list"),
        ("'half", InvalidOption, "a quote is not closed"),
        ("", InvalidOption, "the following arguments are required: pack"),
        ("data --batch-sze 4", InvalidOption, "unknown option --batch-sze (did you mean --batch-size?)"),
    ):
        result = run(shell, f"%%train {line}\nhead(model(x))")
        assert isinstance(result.error_in_exec, error), line
        (shown,) = shown_by(capsys)
        assert said in shown


def test_a_missing_split_is_an_error(shell: InteractiveShell, pack: Path) -> None:
    assert isinstance(run(shell, "%%train p.h5 --split test\npass").error_in_exec, MissingSplit)


def test_ctrl_c_ends_after_the_step_with_a_checkpoint_and_one_line(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.user_ns |= {"model": torch.nn.Linear(2, 1), "signal": signal}
    line = "data --batch-size 8 --epochs 2 --state model --to runs"
    result = run(shell, f"%%train {line}\nif step == 3: signal.raise_signal(signal.SIGINT)\nseen.append((epoch, step))")
    assert isinstance(result.error_in_exec, TrainingInterrupted)
    assert result.error_in_exec.report.steps == 4
    assert result.error_in_exec.report.checkpoint is not None
    assert shell.user_ns["seen"] == [(0, 0), (0, 1), (0, 2), (1, 3)], "the interrupted step was not completed"
    last = shown_by(capsys)[-1]
    assert last.startswith("TrainingInterrupted: Training stopped after step 4: checkpoint ")
    assert not set(NAMES) & shell.user_ns.keys()
    report = train(shell, line, "seen.append((epoch, step))")
    assert shell.user_ns["seen"][4:] == [(1, 4), (1, 5)], "epoch and step numbers do not continue"
    assert report.resumed_from is not None


BODY = """
scores = model(x + 0.01 * torch.rand_like(x))
loss = torch.nn.functional.cross_entropy(scores, y) * (1 + 0.1 * step + epoch)
optimizer.zero_grad()
loss.backward()
optimizer.step()
"""
SETUP = """
import os, signal, torch
torch.set_num_threads(1)
torch.manual_seed(0)
draw = torch.Generator().manual_seed(1)
data = torch.randn(40, 6, generator=draw), torch.randint(0, 3, (40,), generator=draw)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""


def forked(work: Callable[[], object]) -> int:
    """Run work in a fork of this process, and return the number of the signal that killed it, or -1 if none did."""
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            work()
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) * -1


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("step", sampled([0, 5, 9], 2))
def test_a_killed_and_repeated_run_ends_bit_for_bit_like_an_uninterrupted_run(
    shell: InteractiveShell, step: int
) -> None:
    line = f"data --batch-size 8 --epochs {EPOCHS} --state model optimizer --save-every 2 --device cpu --to"
    shell.run_cell(SETUP).raise_error()
    whole = train(shell, f"{line} whole", BODY)
    expected = [weight.clone() for weight in shell.user_ns["model"].parameters()]
    kill = f"if step == {step}: os.kill(os.getpid(), signal.SIGKILL)\n"
    cell = f"%%train {line} killed\n{kill}{BODY}"
    assert forked(lambda: [shell.run_cell(text) for text in (SETUP, cell)]) == signal.SIGKILL
    shell.run_cell(SETUP).raise_error()
    report = train(shell, f"{line} killed", BODY)
    assert report.resumed_from is not None
    for mine, theirs in zip(shell.user_ns["model"].parameters(), expected, strict=True):
        assert torch.equal(mine, theirs)
    assert [record.values for record in report.epochs] == [record.values for record in whole.epochs]


def test_help_covers_the_cell_and_the_line_magic(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    run(shell, "%%train --help\nseen.append(1)").raise_error()
    help_of_cell = capsys.readouterr().out
    assert "usage: %%train" in help_of_cell
    assert "--batch-size" in help_of_cell
    assert shell.user_ns["seen"] == []
    run(shell, "%train --help")
    help_of_line = capsys.readouterr().out
    assert "usage: %train" in help_of_line
    assert help_of_cell.strip() in help_of_line
    assert shell.find_cell_magic("train").__doc__ == help_of_cell.rstrip("\n") + "\n"
