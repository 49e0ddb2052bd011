"""`train()` returns the same values with and without listeners, and makes few Python calls in each step."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from simulated_gpu import SimulatedGpu
from torch import Tensor, nn
from trainings import history, train

from colabkit.loading import Loader
from colabkit.training import run
from colabkit.training.report import TrainReport
from colabkit.training.step_factory import supervised_step

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("scores_of", [lambda x: x, lambda x: x.view(-1, 3), lambda x: x.detach() + 0 * x.sum()])
@pytest.mark.parametrize("is_soft", [False, True])
def test_values_do_not_depend_on_listeners(scores_of: Callable[[Tensor], Tensor], is_soft: bool) -> None:
    # Without a listener, train() computes the accuracies of several small batches together.
    images, labels = torch.randn(157, 5), torch.arange(157) % 3

    def trained(**options: object) -> TrainReport:
        torch.manual_seed(1)
        model = nn.Linear(5, 3)
        model.register_forward_hook(lambda module, inputs, output: scores_of(output))
        step = supervised_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        targets = nn.functional.one_hot(labels, 3).float() if is_soft else labels
        return train(step, Loader((images, targets), 3), epochs=2, **options)

    quiet, heard = trained(), trained(on_step=lambda done: None)
    assert history(quiet) == history(heard)
    assert quiet.curve == heard.curve
    assert len(quiet.curve["accuracy"]) == 106


@pytest.mark.parametrize("kind", [nn.MSELoss, nn.CrossEntropyLoss])
def test_targets_are_released_after_their_step(kind: type[nn.Module]) -> None:
    # The Loader can reuse the memory of released targets, which may be as large as that of images.
    earlier: list[weakref.ref[Tensor]] = []
    alive = []

    class NotedLoss(kind):  # type: ignore[misc, valid-type]
        def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
            alive.append(sum(target() is not None for target in earlier))
            earlier.append(weakref.ref(targets))
            return super().forward(scores, targets)

    model = nn.Linear(5, 100)
    step = supervised_step(model, torch.optim.SGD(model.parameters(), lr=0.1), NotedLoss())
    train(step, Loader((torch.randn(90, 5), torch.rand(90, 100)), 3))
    assert max(alive) == 0


def test_a_step_costs_few_calls_of_functions() -> None:
    # Count calls instead of seconds, because their number does not depend on the machine.
    folder = str(Path(run.__file__).parent)

    def calls(steps: int) -> int:
        found = 0

        def count(frame: FrameType, event: str, argument: object) -> None:
            nonlocal found
            found += event in ("call", "c_call") and frame.f_code.co_filename.startswith(folder)

        loss, loader = torch.zeros(()), Loader(torch.zeros(steps, 1), 1)
        sys.setprofile(count)
        try:
            train(lambda batch: loss, loader)
        finally:
            sys.setprofile(None)
        return found

    # These calls include reading the values, which happens after up to 1,000 steps.
    assert (calls(1_500) - calls(500)) / 1_000 <= 30


def test_the_seconds_of_an_epoch_include_its_queued_steps_but_no_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimulatedGpu()
    gpu.install(monkeypatch)
    monkeypatch.setattr(run, "perf_counter", lambda: gpu.host.now)

    def step(batch: Tensor) -> None:
        gpu.compute(1.0, batch)
        gpu.host.now += 0.1

    def validate() -> dict[str, float]:
        gpu.current.record_event().synchronize()
        gpu.host.now += 50.0
        return {"loss": 1.0}

    for options in ({}, {"validate": validate}, {"validate": validate, "validate_every": 3}):
        with gpu:
            report = train(step, Loader(torch.zeros(32, 4), 4, device="cuda"), epochs=2, **options)
        assert [record.seconds for record in report.epochs] == pytest.approx([8.0, 8.0], abs=0.5)
        assert [record.compute_s for record in report.epochs] == pytest.approx([8.0, 8.0], abs=0.5)


@pytest.mark.parametrize("keep", ["ram", "gpu"])
def test_training_that_runs_out_of_memory_names_the_samples_in_gpu_memory(monkeypatch, keep) -> None:
    gpu = SimulatedGpu()
    gpu.install(monkeypatch)

    def step(batch: Tensor) -> None:
        raise torch.OutOfMemoryError("planned")

    with gpu:
        loader = Loader(torch.zeros(32, 4), 4, device="cuda", keep=keep)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            train(step, loader)
    note = f"The Loader keeps its samples in the same memory: {loader.tier}. Use keep='ram'."
    assert getattr(caught.value, "__notes__", []) == ([note] if keep == "gpu" else [])
