"""`headspace()`: the speed of a step without waiting, and nothing is changed by measuring it."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import colabkit
from colabkit.augment import Normalize
from colabkit.dataset import PackedDataset
from colabkit.errors import InvalidOption
from colabkit.loader import Loader


class Setup:
    def __init__(self, data: PackedDataset) -> None:
        torch.manual_seed(1)
        self.loader = Loader(data, 4, shuffle=True, transform=Normalize())
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(self.model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.step = colabkit.supervised_step(self.model, optimizer, scheduler=scheduler)


@pytest.mark.parametrize("taken", [0, 2, 6])
def test_training_goes_on_as_if_nothing_had_been_measured(data, taken):
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


def test_gradients_stay(data):
    setup = Setup(data)
    weight = setup.model[1].weight
    weight.grad = torch.full_like(weight, 3.0)
    colabkit.headspace(setup.step, setup.loader, seconds=0.02)
    assert torch.equal(weight.grad, torch.full_like(weight, 3.0))
    assert setup.model[1].bias.grad is None


def test_a_step_of_ones_own_says_what_it_changes(data):
    setup = Setup(data)
    calls = []

    def step(batch):
        calls.append(len(batch[1]))
        return setup.step(batch)

    with pytest.raises(InvalidOption, match=r"what it changes.*state="):
        colabkit.headspace(step, setup.loader)
    assert calls == []
    before = [value.clone() for value in setup.model.state_dict().values()]
    report = colabkit.headspace(step, setup.loader, state=setup.step.parts, batches=2, seconds="0.05s")
    assert all(torch.equal(one, now) for one, now in zip(before, setup.model.state_dict().values(), strict=True))
    assert (report.batches, report.batch_size, report.steps) == (2, 4, len(calls) - 3)
    assert repr(report).startswith("The step alone: ")
    assert "loader alone" in report._repr_html_()


def test_a_step_that_fails_leaves_all_as_it_was(data):
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
def test_loaders_of_others_are_measured_with_as_well_and_nobody_is_told(data, workers):
    setup = Setup(data)
    seen = []

    def step(batch):
        seen.append(batch[0])
        setup.step((batch[0].float().div(255), batch[1]))

    theirs = DataLoader(data, 4, shuffle=True, num_workers=workers)
    watched = colabkit.watch(theirs)
    before = torch.random.get_rng_state()
    for loader in (theirs, watched):
        report = colabkit.headspace(step, loader, state=setup.step.parts, batches=2, seconds=0.05)
        assert (report.batches, report.batch_size) == (2, 4)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert watched.meters.batches == 0
    assert len({one.data_ptr() for one in seen}) <= 4


def test_a_loader_that_gives_the_same_memory_again_and_again_is_copied(data):
    setup = Setup(data)
    buffer, seen = torch.zeros(4, 3, 2, 6), set()

    def batches():
        for number in range(4):
            yield buffer.fill_(number), torch.zeros(4, dtype=torch.int64)

    colabkit.headspace(lambda batch: seen.add(batch[0][0, 0, 0, 0].item()), batches(), state={}, seconds=0.02)
    assert seen == {0.0, 1.0, 2.0, 3.0}
    with pytest.raises(InvalidOption, match=r"a loader without batches"):
        colabkit.headspace(setup.step, [])


@pytest.mark.parametrize("options", [{"batches": 0}, {"seconds": 0}, {"seconds": "soon"}])
def test_what_cannot_be_meant_is_one_line(data, options):
    setup = Setup(data)
    with pytest.raises(InvalidOption, match=r"^Cannot measure the headspace: "):
        colabkit.headspace(setup.step, setup.loader, **options)
    with pytest.raises(InvalidOption, match=r"^Cannot measure the headspace: .* Pass headspace\(step, loader\)\.$"):
        colabkit.headspace(setup.step, data)


def test_what_no_state_holds_is_put_back_too_and_half_a_step_is_refused(data):
    setup = Setup(data)
    setup.model.register_buffer("count", torch.zeros(()), persistent=False)

    def count(module: nn.Module, arguments: object) -> None:
        module.count.add_(1)

    setup.model.register_forward_pre_hook(count)
    colabkit.headspace(setup.step, setup.loader, seconds=0.02)
    assert setup.model.count == 0
    half = colabkit.supervised_step(setup.model, torch.optim.SGD(setup.model.parameters(), lr=0.1), accumulate=2)
    half(next(iter(setup.loader)))
    with pytest.raises(InvalidOption, match=r"gradients that wait.*step\.flush"):
        colabkit.headspace(half, setup.loader)
