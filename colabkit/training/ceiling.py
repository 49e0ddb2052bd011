"""`headspace()`: measure how fast training would be if it never waited for data."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from colabkit.foundation import (
    InvalidOption,
    Report,
    cannot,
    check_duration,
    check_whole_number,
    checked_call,
    format_rate,
    format_seconds,
    format_things,
    kind_of,
)
from colabkit.loading import Loader, map_tensors, samples_in, set_mark, tensors_in
from colabkit.training.checkpoints.snapshots import random_state, restore_random_state
from colabkit.training.models import Stateful, plain
from colabkit.training.ranks import Ranks
from colabkit.training.trainer import check_step, state_of

_WARM_UP = 3


@dataclass(frozen=True, repr=False)
class HeadspaceReport(Report):
    """The speed of a step on cached batches.

    Attributes:
        samples_per_s: samples per second of the median step: the training throughput with an infinitely fast loader.
        step_s: median duration of a step in seconds.
        steps: number of timed steps.
        batch_size: number of samples in the largest cached batch.
        batches: number of cached batches.
        loading_samples_per_s: samples per second of the loader alone, measured while it loaded the cached batches.
    """

    samples_per_s: float
    step_s: float
    steps: int
    batch_size: int
    batches: int
    loading_samples_per_s: float

    def _summary(self) -> str:
        per_step = f"{format_seconds(self.step_s)} per step of {format_things(self.batch_size, 'image')}"
        return f"Step alone: {format_rate(self.samples_per_s, 'images')}, {per_step}; no loader can exceed this"

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                "step alone",
                format_rate(self.samples_per_s, "images"),
                f"{format_things(self.steps, 'step')} on {format_things(self.batches, 'batch')}",
            ),
            ("loader alone", format_rate(self.loading_samples_per_s, "images"), "while it loaded these batches"),
        ]


@checked_call()
def headspace(
    step: Callable[[Any], object],
    loader: Iterable[Any],
    *,
    state: Mapping[str, Stateful] | None = None,
    batches: int = 4,
    seconds: float | str = 3.0,
) -> HeadspaceReport:
    """Measure how fast `step` runs on a few cached batches: the training speed if the data were always ready.

    Weights, buffers, optimizer, random generators, gradients and the loader's position are restored afterwards. Pass
    the report to `doctor(..., headspace=)`.

    Args:
        step: step function, as for `train()`.
        loader: loader whose batches are cached: the next batches of a `Loader`, or the first batches of a `DataLoader`
            or of any other object that can be iterated repeatedly.
        state: objects that the step changes, by name, so that they can be restored. None means the model and optimizer
            of `supervised_step`.
        batches: number of batches to cache.
        seconds: how long to measure, in seconds or as text such as `"5s"`.

    Returns:
        The speed of the step alone and of the loader alone.

    Raises:
        InvalidOption: if an argument is invalid, `state` is missing for a step without `state_dict()`, accumulated
            gradients are pending, or the loader is empty or can be iterated only once.

    Example:
        >>> import colabkit, torch
        >>> data = colabkit.prepare("samples:digits", to=None)["train"]
        >>> loader = colabkit.Loader(data, batch_size=64)
        >>> model = colabkit.small_network(10, (8, 8, 3))
        >>> step = colabkit.supervised_step(model, torch.optim.Adam(model.parameters()))
        >>> ceiling = colabkit.headspace(step, loader, seconds=0.5)
        >>> ceiling.batch_size, ceiling.samples_per_s > 0
        (64, True)
    """
    act = "measure the headspace"
    check_step(act, "headspace", step, loader, is_any_loader=True)
    # Unwrap a loader wrapped by `watch()`, so that these batches do not count as training.
    loader = getattr(loader, "watched", loader)
    if isinstance(loader, Iterator):
        found = f"loader is {kind_of(loader)}, which can be iterated only once"
        raise InvalidOption(cannot(act, found, "", "Pass the loader itself"))
    check_whole_number(act, "batches", batches, 1)
    duration = check_duration(act, "seconds", seconds, example=3)
    with restored_training(act, step, state), Ranks() as processes:
        began = time.perf_counter()
        cached = _first_batches(loader, batches)
        loading_s = time.perf_counter() - began
        if not cached:
            raise InvalidOption(cannot(act, "the loader has no batches", "", "Pass a loader with at least one batch"))
        size = getattr(loader, "batch_size", None)
        sizes = [max(1, samples_in(batch, size if isinstance(size, int) else 1)) for batch in cached]
        endless = cycle(zip(cached, sizes, strict=True))
        usual_s = [_seconds_of(step, [next(endless)[0]], _used_gpus(loader))[0] for _ in range(_WARM_UP)][-1]
        # Gradients are synchronized, so all processes must take the same number of steps.
        steps = processes.from_first(max(2, round(duration / max(usual_s, 1e-6))))
        taken = [*islice(endless, steps)]
        seconds_of = _seconds_of(step, [batch for batch, _ in taken], _used_gpus(loader))
    return HeadspaceReport(
        samples_per_s=1 / median(seconds / size for seconds, (_, size) in zip(seconds_of, taken, strict=True)),
        step_s=median(seconds_of),
        steps=steps,
        batch_size=max(sizes),
        batches=len(cached),
        loading_samples_per_s=sum(sizes) / max(loading_s, 1e-9),
    )


def _first_batches(loader: Iterable[Any], batches: int) -> list[Any]:
    """Return copies of the batches to measure.

    The position of a `Loader` stays the same, and so does the state of the generators of another loader.
    """
    if isinstance(loader, Loader):
        return loader.peek(batches)
    owners = (loader, getattr(loader, "sampler", None))
    generators = [one for owner in owners if isinstance(one := getattr(owner, "generator", None), torch.Generator)]
    states = [generator.get_state() for generator in generators]
    if isinstance(loader, DataLoader):
        loader = copy.copy(loader)
        # Start new workers, since the user's persistent ones may be in the middle of an epoch.
        vars(loader)["persistent_workers"] = False
    coming = iter(loader)
    try:
        return [map_tensors(batch, _cloned) for batch in islice(coming, batches)]
    finally:
        if isinstance(coming, Generator):
            coming.close()
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().pin_memory() if tensor.is_pinned() else tensor.clone()


def _used_gpus(loader: Iterable[Any]) -> list[torch.device]:
    """Return the GPUs that the step may use; the caller synchronizes them before it reads the time."""
    if isinstance(loader, Loader) and loader.device.type == "cuda":
        return [loader.device]
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return []
    used = [number for number in range(torch.cuda.device_count()) if torch.cuda.memory_allocated(number)]
    return [torch.device("cuda", number) for number in used]


def _seconds_of(step: Callable[[Any], object], batches: Sequence[Any], gpus: Sequence[torch.device]) -> list[float]:
    """Return the duration of each step in seconds.

    As in training, the host does not wait for the GPUs between two steps.
    """
    ends, marks = [time.perf_counter()], [[set_mark(gpu) for gpu in gpus]]
    for batch in batches:
        step(batch)
        ends.append(time.perf_counter())
        marks.append([set_mark(gpu) for gpu in gpus])
    if not gpus:
        return [end - start for start, end in pairwise(ends)]
    for gpu in gpus:
        torch.cuda.synchronize(gpu)
    return [
        # An idle GPU may reach both marks within the resolution of its clock.
        max(1e-9, *(start.elapsed_time(end) / 1000 for start, end in zip(starts, ends, strict=True)))
        for starts, ends in pairwise(marks)
    ]


class _HostCopy:
    """A copy of a state that holds the tensors of GPUs in host memory, so that it takes no GPU memory."""

    def __init__(self, state: Any) -> None:
        copies = {id(one): (one.detach().cpu(), one.device) for one in tensors_in(state) if one.device.type != "cpu"}
        self.state = copy.deepcopy(state, {number: on_host for number, (on_host, _) in copies.items()})
        self._devices = copies.values()

    def on_devices(self) -> Any:
        """Return a copy with the tensors on their devices."""
        return copy.deepcopy(self.state, {id(on_host): on_host.to(device) for on_host, device in self._devices})


@contextmanager
def restored_training(
    act: str, step: Callable[[Any], object] | None, state: Mapping[str, Stateful] | None
) -> Iterator[None]:
    """Restore the objects that a step changes, and the random generators, after the block.

    Args:
        act: verb and object of error messages.
        step: step function, as for `train()`; None restores only the random generators.
        state: objects that the step changes, by name; None means the model and optimizer of `supervised_step`.

    Raises:
        InvalidOption: if `state` is invalid, it is missing for a step without `state_dict()`, or accumulated gradients
            are pending.
    """
    parts = {} if step is None else state_of(act, state, step, is_saved=True)
    if isinstance(step, Stateful):
        parts["the step"] = step
    if not getattr(step, "is_whole", True):
        pending = "the step has accumulated gradients that it has not applied yet"
        raise InvalidOption(cannot(act, pending, "", "Call step.flush() first"))
    with _restored(parts):
        yield


@contextmanager
def _restored(parts: Mapping[str, Stateful]) -> Iterator[None]:
    """Restore the state, buffers, gradients and modes of `parts`, and the random generators, after the block."""
    states = {name: _HostCopy(part.state_dict()) for name, part in parts.items()}
    modules = [part for part in map(plain, parts.values()) if isinstance(part, nn.Module)]
    modes = [(module, module.training) for root in modules for module in root.modules()]
    gradients = [
        (p, _HostCopy(None if p.grad is None else p.grad.detach())) for root in modules for p in root.parameters()
    ]
    buffers = [(buffer, _HostCopy(buffer.detach())) for root in modules for buffer in root.buffers()]
    random = random_state()
    try:
        yield
    finally:
        for name, part in parts.items():
            # Modules and optimizers move the tensors themselves, without a complete copy on the GPU.
            is_moving = isinstance(plain(part), nn.Module | torch.optim.Optimizer)
            part.load_state_dict(states[name].state if is_moving else states[name].on_devices())
        for module, training in modes:
            module.training = training
        for buffer, content in buffers:
            buffer.copy_(content.state)
        for parameter, gradient in gradients:
            parameter.grad = gradient.on_devices()
        restore_random_state(random)
