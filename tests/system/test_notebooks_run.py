"""Every notebook runs twice in one kernel, with this environment's packages and with Colab's.

With this environment's packages, a notebook other than the template keeps its default settings; in Colab's kernel, it
runs with smaller ones. The code that the template suggests to paste into a new cell runs, too. Without `--full`, only
the template runs, with this environment's packages. The notebook about Ray Train does not run here, because starting
its clusters takes minutes on two CPUs; `test_ray_train.py` runs the same function.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import pytest
from kernels import KINDS
from nbformat.v4 import new_code_cell
from notebook_files import FOLDER, SHOWN, TEMPLATE, cell_named, code_cells, kinds, read
from notebook_runs import NotebookRun, colab_kernel, warm_kernel, with_parameters

MOST_S = 600
SMALLER: dict[str, dict[str, object]] = {
    "colabkit_template": {"EPOCHS": "3"},
    "resume_bit_for_bit": {"STOP_AFTER": 7},
    "why_is_my_training_slow": {"STEPS": 100, "LATENCY_MS": 5, "BATCH_SIZE": 16},
    "quick_start": {"EPOCHS": 1},
    "big_data": {"EPOCHS": 1},
    "own_loop": {"EPOCHS": 1},
    "lightning": {"EPOCHS": 1},
    "accelerate": {"EPOCHS": 1},
    "keras": {"EPOCHS": 1},
}
FRAMEWORKS = ("lightning", "accelerate", "keras")

Twice: TypeAlias = tuple[NotebookRun, NotebookRun]


@pytest.fixture(scope="module", params=["newest", pytest.param("colab", marks=pytest.mark.full)])
def stack(request: pytest.FixtureRequest) -> str:
    """Return the packages to run with: `"newest"` for those of this environment, or `"colab"`."""
    return request.param


class Runs:
    """The runs of the notebooks: for each stack (a set of packages), a notebook runs twice in one kernel.

    With `--full`, all runs are queued at the first request, so that two of them always run concurrently.

    Args:
        folder: folder for all files that the notebooks write.
        pool: a pool for the runs.
        is_full: whether all notebooks and both stacks are needed.
    """

    def __init__(self, folder: Path, pool: ThreadPoolExecutor, is_full: bool) -> None:
        self._is_full = is_full
        self._folder = folder
        self._pool = pool
        self._begun: dict[tuple[str, str], Future[Twice]] = {}

    def of(self, name: str, stack: str) -> Twice:
        wanted = (name, stack)
        for each in itertools.product(SMALLER, KINDS) if self._is_full else (wanted,):
            if each not in self._begun:
                self._begun[each] = self._pool.submit(self._twice, *each)
        return self._begun[wanted].result()

    def _twice(self, name: str, stack: str) -> Twice:
        folder = self._folder / f"{name}-{stack}"
        is_newest, is_template = stack == "newest", name == TEMPLATE.stem
        notebook = with_parameters(name, **SMALLER[name] if is_template or not is_newest else {})
        if is_template:
            pasted = re.findall(r"```python\n(.+?)```", cell_named(notebook, "own-text").source, re.DOTALL)
            notebook.cells += [new_code_cell(source.strip(), id="own") for source in pasted]
        with warm_kernel(folder) if is_newest else colab_kernel(folder) as one:
            return one.run(notebook), one.run(notebook)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Runs]:
    with ThreadPoolExecutor(2) as pool:
        yield Runs(tmp_path_factory.mktemp("runs"), pool, pytestconfig.getoption("--full"))
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def template(runs: Runs, stack: str) -> Twice:
    return runs.of("colabkit_template", stack)


@pytest.fixture
def resume(runs: Runs, stack: str) -> Twice:
    return runs.of("resume_bit_for_bit", stack)


@pytest.fixture
def slow(runs: Runs, stack: str) -> Twice:
    return runs.of("why_is_my_training_slow", stack)


@pytest.fixture
def loop(runs: Runs, stack: str) -> Twice:
    return runs.of("own_loop", stack)


@pytest.fixture
def start(runs: Runs, stack: str) -> Twice:
    return runs.of("quick_start", stack)


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, text
    return float(found[1].replace(",", ""))


def rows(ran: NotebookRun, cell: str) -> list[list[str]]:
    """Return the rows of the table that a cell shows, without the header."""
    (table,) = ran.data(cell, "text/markdown")
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


@pytest.mark.full
def test_the_template_trains_and_tests_a_network_and_saves_it(template: Twice) -> None:
    first, _ = template
    assert first.text("install") == ""
    assert "Found 1,797 images, 10 classes" in first.text("train")
    (panel,) = first.panels("train")
    assert "epoch 3/3" in panel
    assert number(r"([\d.]+)% of 359 held-out images", first.text("train")) >= 90
    assert Path(re.findall(r"Model: '(.+model\.pt)'", first.text("train"))[0]).is_file()


@pytest.mark.full
def test_the_template_shows_predictions_and_a_confusion_matrix(template: Twice) -> None:
    for ran in template:
        report = ran.data("train", "text/html")[-1]
        assert report.count("src='data:image/png;base64,") >= 8
        assert "Confusion matrix" in report


@pytest.mark.full
def test_the_template_opens_the_launcher(template: Twice) -> None:
    for ran in template:
        assert ran.data("launcher", "application/vnd.jupyter.widget-view+json")


@pytest.mark.full
def test_running_the_template_again_has_nothing_left_to_train(template: Twice) -> None:
    _, second = template
    assert "complete since an earlier call, so nothing was trained" in second.text("train")
    assert second.panels("train") == []


@pytest.mark.full
def test_the_code_that_the_template_suggests_trains_another_model_on_the_same_pack(template: Twice) -> None:
    first, second = template
    assert number(r" accuracy ([\d.]+),", first.text("own")) >= 0.8
    assert "nothing was left to do" in second.text("own")


@pytest.mark.full
def test_training_resumes_bit_for_bit_after_an_interruption(resume: Twice, stack: str) -> None:
    stopped_after = {"newest": 4, "colab": 7}[stack]
    for ran in resume:
        assert f"Training stopped after step {8 + stopped_after}" in ran.text("resume")
        assert "Resumed from" in ran.text("resume")
        assert ran.text("same") == "'All 16 losses and all weights equal those of the uninterrupted run, bit for bit'"
        assert len(ran.panels("resume")) == 2


@pytest.mark.full
def test_a_slow_drive_handles_many_requests_at_once(slow: Twice) -> None:
    speeds = [float(files.replace(",", "")) for _, files in rows(slow[0], "probe")]
    assert speeds[0] < speeds[1]
    assert min(speeds[2:]) > 2 * speeds[0]
    assert "Probed 'slow-training/drive'" in slow[0].text("probe-disk")


@pytest.mark.full
def test_the_doctor_reports_the_cause_of_slow_training_and_a_remedy(slow: Twice) -> None:
    for ran in slow:
        assert "waits for data" in ran.text("naive-doctor")
        advice = "Pack the images once, cropped to one size, and give your random transforms"
        assert advice in ran.text("naive-doctor")
        assert not re.search("Not enough", ran.text("staged-doctor") + ran.text("packed-doctor"))
        # The two stacks share the CPUs, so these tiny steps may still wait a little.
        waits = re.search(r"waits for data (?!only)(\d+)%", ran.text("packed-doctor"))
        assert waits is None or int(waits[1]) < 50
        for cell in ("naive", "staged", "packed"):
            assert len(ran.panels(cell)) == 1


@pytest.mark.full
def test_the_table_shows_the_doctors_measurements(slow: Twice, stack: str) -> None:
    latency_ms = {"newest": 20, "colab": 5}[stack]
    for ran in slow:
        measured = [float(cells[1].replace(",", "")) for cells in rows(ran, "compare")]
        naive, staged, packed = measured
        assert naive < staged
        assert naive <= 1.2 * 2 * 1000 / latency_ms, "two workers wait for the drive"
        assert packed > 2 * naive
        times = [float(cells[2].replace(",", "")) for cells in rows(ran, "compare")]
        assert times == pytest.approx([speed / naive for speed in measured], rel=0.1)
        assert f"{naive:,.0f} images/s" in ran.text("naive-doctor")
        assert f"{packed:,.0f} images/s" in ran.text("packed-doctor")


@pytest.mark.full
def test_local_copies_are_removed_and_staged_again(slow: Twice) -> None:
    for ran in slow:
        assert "Staged 1,797 files" in ran.text("drive")
        assert "Staged 1,797 files" in ran.text("stage")
        assert ran.text("clean").count(" freed") == 2
        assert "Packed 1,797 images" in ran.text("pack")


@pytest.mark.full
def test_a_plain_loop_and_a_cell_train_with_the_panel(loop: Twice, stack: str) -> None:
    epochs = {"newest": 3, "colab": 1}[stack]
    for ran in loop:
        for cell in ("loop", "cell"):
            assert len(ran.panels(cell)) == 1
            assert number(r"accuracy ([\d.]+)", ran.text(f"{cell}-accuracy")) >= 0.85
        assert f"Trained {epochs} epoch" in ran.text("cell")
        assert "'samples': 32" in ran.text("state")


@pytest.mark.full
def test_the_quick_start_trains_in_one_line_and_step_by_step(start: Twice, stack: str) -> None:
    epochs = {"newest": 3, "colab": 1}[stack]
    first, second = start
    assert number(r"([\d.]+)% of 359 held-out images", first.text("line")) >= 80
    assert "Staged 1,797 files" in first.text("stage")
    assert "Packed 1,797 images" in first.text("pack")
    assert f"Trained {epochs} epoch" in first.text("train")
    for cell in ("line", "train"):
        assert len(first.panels(cell)) == 1
        assert second.panels(cell) == []
    for ran in start:
        assert number(r"accuracy ([\d.]+)", ran.text("evaluate")) >= 0.7
    found = {"newest": "in a typical step", "colab": "Too few steps for a diagnosis: 36 of 50"}
    assert found[stack] in first.text("doctor")


@pytest.mark.full
@pytest.mark.every_case
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_frameworks_train_on_a_loader(name: str, runs: Runs, stack: str) -> None:
    for ran in runs.of(name, stack):
        pattern = r"'accuracy': ([\d.]+)" if name == "keras" else r"accuracy ([\d.]+)"
        assert number(pattern, ran.text("accuracy")) >= (0.9 if stack == "newest" else 0.5)
        assert len(ran.panels({"accelerate": "loop"}.get(name, "fit"))) == 1


@pytest.mark.full
def test_lightning_resumes_in_the_middle_of_an_epoch(runs: Runs, stack: str) -> None:
    for ran in runs.of("lightning", stack):
        assert ran.data("resume", "text/plain") == ["'90 steps after 2 epochs of 45 batches'"]


@pytest.mark.full
@pytest.mark.every_case
@pytest.mark.parametrize("name", [path.stem for path in SHOWN if path.stem in SMALLER])
def test_the_stored_outputs_are_of_the_same_kinds_as_those_of_a_run(name: str, runs: Runs) -> None:
    first, _ = runs.of(name, "newest")
    cells = code_cells(read(FOLDER / f"{name}.ipynb"))
    assert {cell.id: kinds(cell) for cell in code_cells(first.notebook)} == {cell.id: kinds(cell) for cell in cells}


@pytest.mark.full
def test_notebooks_finish_in_time_without_warnings(runs: Runs, stack: str) -> None:
    for name in SMALLER:
        for ran in runs.of(name, stack):
            assert ran.seconds < MOST_S
            assert not re.search(r"Traceback|Warning|failed", ran.text())
