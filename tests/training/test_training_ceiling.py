"""`headspace()` measures the speed of a step without data loading, and changes nothing."""

from __future__ import annotations

import random

import pytest
import torch
from simulated_gpu import SimulatedGpu
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import colabkit
from colabkit.augment import Normalize
from colabkit.errors import InvalidOption
from colabkit.loading import Loader
from colabkit.packs import PackedDataset
from colabkit.training import ceiling


class Setup:
    def __init__(self, data: PackedDataset) -> None:
        torch.manual_seed(1)
        self.loader = Loader(data, 4, shuffle=True, transform=Normalize())
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(self.model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.step = colabkit.supervised_step(self.model, optimizer, scheduler=scheduler)


@pytest.mark.parametrize("taken", [0, 2, 6])
def test_training_continues_as_without_a_measurement(data, taken):
    ends = []
    for measures in (False, True):
        setup = Setup(data)
        batches = iter(setup.loader)
        for _ in range(taken):
            setup.step(next(batches))
        setup.model[1].eval()
        if measures:
            report = colabkit.headspace(setup.step, setup.loader, seconds=0.05)
            assert report.samples_per_s > 0
        assert (setup.model.training, setup.model[1].training) == (True, False)
        rest = [setup.step(batch)["loss"].item() for batch in setup.loader]
        weights = [value.clone() for value in setup.model.state_dict().values()]
        ends.append((rest, weights, random.random(), torch.rand(1).item(), setup.loader.state_dict()))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(one, other) for one, other in zip(ends[0][1], ends[1][1], strict=True))
    assert ends[0][3:] == ends[1][3:]


def test_gradients_are_restored(data):
    setup = Setup(data)
    weight = setup.model[1].weight
    weight.grad = torch.full_like(weight, 3.0)
    colabkit.headspace(setup.step, setup.loader, seconds=0.02)
    assert torch.equal(weight.grad, torch.full_like(weight, 3.0))
    assert setup.model[1].bias.grad is None


def test_a_custom_step_requires_state(data):
    setup = Setup(data)
    calls = []

    def step(batch):
        calls.append(len(batch[1]))
        return setup.step(batch)

    with pytest.raises(InvalidOption, match=r"state= is missing; expected the objects that the step changes.*state="):
        colabkit.headspace(step, setup.loader)
    assert calls == []
    before = [value.clone() for value in setup.model.state_dict().values()]
    report = colabkit.headspace(step, setup.loader, state=setup.step.parts, batches=2, seconds="0.05s")
    assert all(torch.equal(one, now) for one, now in zip(before, setup.model.state_dict().values(), strict=True))
    assert (report.batches, report.batch_size, report.steps) == (2, 4, len(calls) - 3)
    assert repr(report).startswith("Step alone: ")
    assert "loader alone" in report._repr_html_()


def test_a_step_that_fails_changes_nothing(data):
    setup = Setup(data)
    position = setup.loader.state_dict()

    def step(batch):
        setup.step(batch)
        raise ValueError("planned")

    before = [value.clone() for value in setup.model.state_dict().values()]
    with pytest.raises(ValueError, match="planned"):
        colabkit.headspace(step, setup.loader, state=setup.step.parts)
    assert all(torch.equal(one, now) for one, now in zip(before, setup.model.state_dict().values(), strict=True))
    assert setup.loader.state_dict() == position


@pytest.mark.parametrize("workers", [0, 1])
def test_the_first_batches_of_another_loader_are_used_and_its_position_is_kept(data, workers):
    setup = Setup(data)
    seen = []

    def step(batch):
        seen.append(batch[0])
        setup.step((batch[0].float().div(255), batch[1]))

    own = torch.Generator().manual_seed(3)
    theirs = DataLoader(data, 4, shuffle=True, num_workers=workers, persistent_workers=workers > 0, generator=own)
    watched = colabkit.watch(theirs)
    weights = [value.clone() for value in setup.model.state_dict().values()]
    expected = [labels.tolist() for _, labels in DataLoader(data, 4, shuffle=True, generator=own.clone_state())]
    taken = []
    for _, labels in watched:
        taken.append(labels.tolist())
        if len(taken) == 2:
            drawn = torch.random.get_rng_state(), own.get_state()
            report = colabkit.headspace(step, watched, state=setup.step.parts, batches=2, seconds=0.05)
            assert (report.batches, report.batch_size) == (2, 4)
            assert torch.equal(torch.random.get_rng_state(), drawn[0])
            assert torch.equal(own.get_state(), drawn[1])
            assert watched.meters.batches == 2
    assert taken == expected
    assert all(torch.equal(one, now) for one, now in zip(weights, setup.model.state_dict().values(), strict=True))
    assert len({one.data_ptr() for one in seen}) == 2


def test_the_position_of_a_watched_loader_is_kept(data):
    setup = Setup(data)
    before = setup.loader.state_dict()
    watched = colabkit.watch(setup.loader)
    colabkit.headspace(setup.step, watched, seconds=0.02)
    assert (setup.loader.state_dict(), watched.meters.batches) == (before, 0)


class OneBufferLoader:
    """A loader that returns the same memory for each batch."""

    def __iter__(self):
        buffer = torch.zeros(4, 3, 2, 2)
        for number in range(4):
            yield buffer.fill_(number), torch.zeros(4)


def test_batches_of_a_loader_that_reuses_memory_are_copied():
    seen = set()
    colabkit.headspace(lambda batch: seen.add(batch[0].mean().item()), OneBufferLoader(), state={}, seconds=0.02)
    assert seen == {0.0, 1.0, 2.0, 3.0}


def test_an_iterator_is_refused_and_not_advanced():
    batches = iter(OneBufferLoader())
    with pytest.raises(
        InvalidOption, match=r"^Cannot measure the headspace: loader is a generator, which can be iterated only once"
    ):
        colabkit.headspace(lambda batch: None, batches, state={})
    assert len([*batches]) == 4
    with pytest.raises(InvalidOption, match=r"^Cannot measure the headspace: the loader has no batches"):
        colabkit.headspace(lambda batch: None, [], state={})


def test_batches_of_unknown_size_have_the_batch_size_of_the_loader():
    theirs = DataLoader(TensorDataset(torch.zeros(32, 3)), 16, collate_fn=lambda samples: {"graph", "of", "nodes"})
    assert colabkit.headspace(lambda batch: None, theirs, state={}, seconds=0.02).batch_size == 16


def test_throughput_uses_the_samples_of_each_step(data, monkeypatch):
    monkeypatch.setattr(ceiling, "_seconds_of", lambda step, batches, gpus: [0.001 * len(batch) for batch in batches])
    uneven = DataLoader(torch.zeros(12, 3), 8)
    report = colabkit.headspace(len, uneven, state={}, seconds=1)
    assert (report.samples_per_s, report.batch_size) == (pytest.approx(1000), 8)


@pytest.mark.parametrize("options", [{"batches": 0}, {"seconds": 0}, {"seconds": "soon"}])
def test_invalid_arguments_are_refused(data, options):
    setup = Setup(data)
    with pytest.raises(InvalidOption, match=r"^Cannot measure the headspace: "):
        colabkit.headspace(setup.step, setup.loader, **options)
    with pytest.raises(InvalidOption, match=r"^Cannot measure .*Pass colabkit\.Loader\(dataset, batch_size=64\)\.$"):
        colabkit.headspace(setup.step, data)


def test_buffers_outside_the_state_are_restored_and_pending_gradients_are_refused(data):
    setup = Setup(data)
    setup.model.register_buffer("count", torch.zeros(()), persistent=False)

    def count(module: nn.Module, arguments: object) -> None:
        module.count.add_(1)

    setup.model.register_forward_pre_hook(count)
    colabkit.headspace(setup.step, setup.loader, seconds=0.02)
    assert setup.model.count == 0
    half = colabkit.supervised_step(setup.model, torch.optim.SGD(setup.model.parameters(), lr=0.1), accumulate=2)
    half(next(iter(setup.loader)))
    with pytest.raises(InvalidOption, match=r"accumulated gradients.*step\.flush"):
        colabkit.headspace(half, setup.loader)


class GpuWeights:
    """The weights of a custom step, on a simulated GPU."""

    def __init__(self) -> None:
        self.values = torch.arange(1 << 20, dtype=torch.float32).to("cuda")

    def state_dict(self) -> dict[str, object]:
        return {"values": self.values, "step": 1}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.values = state["values"]


def test_steps_on_a_gpu_are_queued_as_in_training_and_the_state_is_saved_on_the_host(monkeypatch):
    gpu = SimulatedGpu()
    gpu.install(monkeypatch)
    allocated = []

    def step(batch: torch.Tensor) -> None:
        gpu.host.now += 0.004
        gpu.compute(0.010, batch, weights.values)
        allocated.append(gpu.allocated)

    with gpu:
        weights = GpuWeights()
        before = gpu.allocated
        loader = Loader(torch.zeros(32, 4), 4, device="cuda")
        report = colabkit.headspace(step, loader, state={"weights": weights}, seconds=0.5)
        assert report.step_s == pytest.approx(0.010)
        assert max(allocated) - before < 1 << 20
        assert weights.values.device.type == "cuda"
        assert torch.equal(weights.values.cpu(), torch.arange(1 << 20, dtype=torch.float32))
