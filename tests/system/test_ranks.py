"""`train()` in several processes: they share the samples, one writes, and more or fewer processes can resume."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training_rank
import warm_python
import warm_torchrun
from contract import seal_fields
from torch import distributed
from warm_python import warm_launches

import colabkit
from colabkit.errors import InvalidOption, LaunchFailed
from colabkit.foundation import meters
from colabkit.foundation.units import format_things
from colabkit.training.ranks import Ranks
from colabkit.types import SavedCheckpoint

COUNT = 41
BATCH = 4
EVERY_SAMPLE_ONCE = {epoch: list(range(COUNT)) for epoch in range(2)}
TORCHRUN_S = 200.0


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a pack of the numbers from 0 to 40."""
    rows = np.arange(COUNT, dtype=np.int64).reshape(-1, 1)
    return seal_fields(tmp_path_factory.mktemp("packs") / "numbers.h5", {"X": {"train": rows}}, {"X": "array"}, None)


def trained(
    pack: Path, folder: Path, world_size: int, *, stop_after: int = -1, by_torchrun: bool = False, restarts: int = 0
) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    for old in records(folder):
        old.unlink()
    arguments = [str(pack), str(folder), str(BATCH * 2 // world_size), "2", str(stop_after)]
    if by_torchrun:
        script = str(Path(training_rank.__file__))
        counts = [f"--nproc-per-node={world_size}", f"--max-restarts={restarts}"]
        launcher = [warm_torchrun.__file__, "--standalone", *counts]
        # With a shared store, restarted ranks can find the addresses of the ended ones.
        own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **own_store}
        command = [sys.executable, *launcher, script, *arguments]
        done = warm_python.run(command, timeout=TORCHRUN_S, env=environ, text=True, stderr=subprocess.STDOUT)
        assert done.returncode == 0, done.stdout
    else:
        colabkit.notebook_launch(training_rank.main, arguments, world_size)
    return [json.loads(path.read_text()) for path in records(folder)]


def records(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*-*.json") if not path.name.startswith("checkpoint"))


def by_epoch(ranks: list[dict[str, Any]]) -> dict[int, list[int]]:
    epochs: dict[int, list[int]] = {}
    for rank in ranks:
        for epoch, samples in rank["seen"]:
            epochs.setdefault(epoch, []).extend(samples)
    return epochs


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, numbers: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the records of uninterrupted training runs in one process and in two."""
    folders = [tmp_path_factory.mktemp("whole") for _ in range(2)]
    with warm_launches():
        return {1: trained(numbers, folders[0], 1), 2: trained(numbers, folders[1], 2, by_torchrun=True)}


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.full
def test_one_and_two_processes_use_the_same_samples_and_produce_the_same_weights(whole):
    one, two = whole[1], whole[2]
    assert [len(one), len(two)] == [1, 2]
    for ranks in (one, two):
        assert {epoch: sorted(samples) for epoch, samples in by_epoch(ranks).items()} == EVERY_SAMPLE_ONCE
        assert all(rank["samples"] == [COUNT, COUNT] for rank in ranks)
    assert two[0]["weights"] == two[1]["weights"]
    assert two[0]["weights"] == pytest.approx(one[0]["weights"], rel=1e-3)
    assert two[0]["loss"] == two[1]["loss"] == pytest.approx(one[0]["loss"], rel=1e-3)
    shares = [{sample for epoch, samples in rank["seen"] for sample in samples if epoch == 0} for rank in two]
    assert shares[0].isdisjoint(shares[1])
    assert (two[0]["checkpoint"] != "None", two[1]["checkpoint"]) == (True, "None")


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.full
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 2)])
def test_training_resumes_with_a_different_number_of_processes(tmp_path, numbers, whole, before, after):
    first = trained(numbers, tmp_path, before, stop_after=3)
    assert [rank["stopped"] for rank in first] == ["Ctrl-C"] * before
    assert len({rank["steps"] for rank in first}) == 1
    rest = trained(numbers, tmp_path, after)
    assert {epoch: sorted(samples) for epoch, samples in by_epoch(first + rest).items()} == EVERY_SAMPLE_ONCE
    assert rest[0]["samples"] == [COUNT, COUNT]
    changed_settings = (
        [] if before == after else [f"the checkpoint is from a run of {format_things(before, 'process')}, now {after}"]
    )
    assert rest[0]["changed_settings"] == changed_settings
    assert rest[0]["loss"] == pytest.approx(whole[after][0]["loss"], rel=1e-3)
    if before == after:
        assert rest[0]["weights"] == whole[after][0]["weights"]
        assert rest[0]["loss"] == whole[after][0]["loss"]


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.full
def test_torchrun_restarts_the_ranks_after_one_was_killed_and_each_sample_is_used_once(tmp_path, numbers, monkeypatch):
    monkeypatch.setenv("KILLED_RANK", f"1 5 {tmp_path / 'killed'}")
    ranks = trained(numbers, tmp_path / "run", 2, by_torchrun=True, restarts=1)
    assert (tmp_path / "killed").exists()
    assert [rank["history"] for rank in ranks] == [[[1] * COUNT] * 2] * 2


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.full
@pytest.mark.parametrize("after", [1, 3])
def test_torchrun_resumes_on_other_ranks_after_one_was_killed_and_each_sample_is_used_once(
    tmp_path, numbers, monkeypatch, after
):
    monkeypatch.setenv("KILLED_RANK", f"1 5 {tmp_path / 'killed'}")
    with pytest.raises(AssertionError, match=r"exitcode *: -9"):
        trained(numbers, tmp_path / "run", 2, by_torchrun=True)
    ranks = trained(numbers, tmp_path / "run", after, by_torchrun=True)
    assert [rank["history"] for rank in ranks] == [[[1] * COUNT] * 2] * after


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.full
def test_functions_of_a_notebook_run_in_processes_of_one_group(tmp_path):
    def work(folder: Path, factor: int) -> list[int]:
        total = torch.tensor([distributed.get_rank() + 1])
        distributed.all_reduce(total)
        (folder / f"{distributed.get_rank()}").write_text(str(os.getpid()))
        return [distributed.get_world_size(), factor * int(total)]

    assert colabkit.notebook_launch(work, (tmp_path, 10), processes=2) == [2, 30]
    pids = {int(path.read_text()) for path in tmp_path.iterdir()}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert not distributed.is_initialized()


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.full
def test_training_in_a_launched_group_divides_the_samples(tmp_path, numbers):
    data = colabkit.open_pack(numbers)["train"]

    def work() -> tuple[int, list[int], list[int]]:
        model = torch.nn.Linear(1, 2)
        step = colabkit.supervised_step(model, torch.optim.SGD(model.parameters(), lr=1e-4))
        seen: list[int] = []
        saved: list[SavedCheckpoint] = []

        def own(batch: torch.Tensor) -> object:
            seen.extend(batch.flatten().tolist())
            return step((batch.float().reshape(-1, 1), batch.flatten().long() % 2))

        loader = colabkit.Loader(data, 4)
        report = colabkit.train(own, loader, state=step.parts, to=tmp_path, on_checkpoint=saved.append)
        assert [len(one.files) for one in saved] == [0 if distributed.get_rank() else 2]
        return report.epochs[0].samples, sorted(seen), [one.step for one in saved]

    samples, seen, steps = colabkit.notebook_launch(work, processes=2)
    assert (samples, steps) == (COUNT, [6])
    assert len(seen) in (COUNT // 2, COUNT // 2 + 1)
    assert len(list(tmp_path.glob("*.pt"))) == 2


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.full
def test_ranks_stop_at_the_end_of_an_epoch_if_gradients_are_pending_after_each_step():
    def work() -> tuple[int, str | None]:
        def stop(done: meters.StepDone) -> None:
            raise StopIteration

        model = torch.nn.Linear(1, 2)
        step = colabkit.supervised_step(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=8)
        loader = colabkit.Loader((torch.zeros(12, 1), torch.arange(12) % 2), 2)
        report = colabkit.train(step, loader, epochs=5, on_step=stop)
        return report.steps, report.stopped

    assert colabkit.notebook_launch(work, processes=2) == (3, "on_step")


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.full
def test_a_failed_process_raises_one_line_that_names_it():
    def work() -> None:
        if distributed.get_rank() == 1:
            raise ValueError("planned")
        distributed.barrier()

    with pytest.raises(LaunchFailed, match="in 2 processes: process 1 failed with ValueError: planned") as caught:
        colabkit.notebook_launch(work, processes=2)
    assert re.search(r", in work\n(    .*\n)?ValueError: planned", caught.value.__notes__[0])


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.full
def test_results_that_cannot_be_returned_and_sudden_ends_raise():
    with pytest.raises(LaunchFailed, match="process 0 failed with InvalidOption: Cannot return the result"):
        colabkit.notebook_launch(lambda: (number for number in range(3)), processes=2)
    with pytest.raises(LaunchFailed, match=r"process \d failed with exit code 3"):
        colabkit.notebook_launch(lambda: os._exit(3), processes=2)


@pytest.mark.parametrize(
    ("function", "args", "processes"), [(3, (), 2), (print, (), 0), (print, (), "two"), (print, 2, None)]
)
def test_an_invalid_launch_raises_one_line(function, args, processes):
    with pytest.raises(InvalidOption):
        colabkit.notebook_launch(function, args, processes)


@pytest.mark.full
def test_a_process_with_threads_launches_others_and_shows_their_output(capsys):
    matrix, stop = torch.rand(256, 256), threading.Event()
    busy = [threading.Thread(target=lambda: [matrix @ matrix for _ in iter(stop.is_set, True)]) for _ in range(3)]
    for thread in busy:
        thread.start()

    def work() -> tuple[str, float]:
        # One write for the text and the end of its line, so that another process cannot write in between.
        print(f"rank {distributed.get_rank()} of {threading.active_count()} thread\n", end="")
        return multiprocessing.current_process().name, float((matrix @ matrix).sum())

    try:
        assert colabkit.notebook_launch(work, processes=2)[1] == pytest.approx(float((matrix @ matrix).sum()), rel=1e-3)
    finally:
        stop.set()
        for thread in busy:
            thread.join()
    assert {"rank 0 of 1 thread", "rank 1 of 1 thread"} <= set(capsys.readouterr().out.splitlines())


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.full
def test_classes_of_the_notebook_keep_their_identity_in_results(monkeypatch):
    class Answer:
        rank = -1

    def work() -> Answer:
        answer = Answer()
        answer.rank = distributed.get_rank()
        return answer

    found = colabkit.notebook_launch(work, processes=2)
    assert (type(found), found.rank) == (Answer, 0)


def test_objects_that_cannot_be_copied_to_another_process_are_named():
    lock = threading.Lock()

    def work() -> None:
        lock.acquire()

    with pytest.raises(InvalidOption, match=r"the function uses 'lock' \(a lock\) that cannot be pickled.*inside"):
        colabkit.notebook_launch(work, processes=2)
    with pytest.raises(InvalidOption, match=r"the function uses 'argument 1' \(a generator\)"):
        colabkit.notebook_launch(print, [(number for number in range(3))], processes=2)


def test_a_single_process_does_not_communicate():
    with Ranks() as alone:
        assert (alone.rank, alone.count, alone.is_first) == (0, 1, True)
        assert alone.agreed(5, 0.1, [1, 0]) == [1, 0]
        assert alone.from_all("x") == ["x"]
        assert alone.from_first("x") == "x"


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_terminated_processes_leave_a_checkpoint_and_restore_signal_handlers(tmp_path, numbers, number):
    data = colabkit.open_pack(numbers)["train"]
    former = signal.signal(signal.SIGTERM, lambda *_: heard.append(signal.SIGTERM))
    heard: list[int] = []

    def work() -> None:
        def press(done: meters.StepDone) -> None:
            if done.step == 3 and distributed.get_rank() == 0:
                # Send the signal to the process that called `notebook_launch()`, not to the training processes.
                os.kill(os.getppid(), number)

        colabkit.train(lambda batch: None, colabkit.Loader(data, 2), epochs=99, state={}, to=tmp_path, on_step=press)

    try:
        with pytest.raises(KeyboardInterrupt):
            colabkit.notebook_launch(work, processes=2)
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, former)
    assert heard == ([signal.SIGTERM] if number == signal.SIGTERM else [])
    assert max(int(path.stem.partition("-")[2]) for path in tmp_path.glob("*.pt")) >= 3


def test_a_path_object_in_sys_path_does_not_prevent_a_launch(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    assert colabkit.notebook_launch(lambda: 5, processes=1) == 5


@pytest.mark.full
def test_processes_can_use_cuda_after_torch_was_asked_for_a_gpu() -> None:
    def work() -> tuple[bool, float]:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        # CUDA is unusable in a fork of a process that has queried it, even without a GPU.
        return torch.cuda._is_in_bad_fork(), torch.ones(4, device=device).sum().item()

    torch.cuda.is_available()
    assert colabkit.notebook_launch(work, processes=1) == (False, 4.0)
