"""`watch()`: any loader yields the same batches, and its steps are timed and published."""

from __future__ import annotations

import itertools
import threading
from collections import UserDict, namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clocks import PromptClock
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset
from trees import make_tree

import colabkit
from colabkit.foundation import errors, meters
from colabkit.foundation.telemetry import sampler
from colabkit.loading import Loader
from colabkit.loading.inspection import samples_in
from colabkit.monitoring.diagnosing import api
from colabkit.monitoring.diagnosing.api import watch

DATA = TensorDataset(torch.arange(10), torch.arange(10) % 3)
Pair = namedtuple("Pair", "images labels")  # noqa: PYI024  # as torch's collate makes them


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


class NamedLoader:
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches
        self.name = "theirs"

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __repr__(self) -> str:
        return "NamedLoader()"


class FailingLoader:
    def __iter__(self) -> Iterator[int]:
        yield from (1, 2)
        raise OSError(5, "it broke")


def test_a_watched_data_loader_yields_the_same_batches() -> None:
    torch.manual_seed(7)
    plain = [batch[0].tolist() for batch in DataLoader(DATA, 4, shuffle=True)]
    torch.manual_seed(7)
    assert [batch[0].tolist() for batch in watch(DataLoader(DATA, 4, shuffle=True))] == plain


def test_the_machine_is_sampled_during_a_long_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_LONG_PASS_S", 0.0)

    def samplers() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "colabkit-telemetry"]

    for loader in (watch(DataLoader(DATA, 4)), Loader(DATA, 4, num_workers=1), watch(Loader(DATA, 4, num_workers=1))):
        assert samplers() == []
        for _ in loader:
            assert samplers() == ["colabkit-telemetry"]
        assert samplers() == []


def test_short_passes_are_observed_together_once_they_have_taken_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_LEAST_PASS_S", 0.0)
    monkeypatch.setattr(sampler, "_GAP_S", 60.0)
    for loader in (watch(DataLoader(DATA, 4)), Loader(DATA, 4, num_workers=1)):
        monkeypatch.setattr(sampler, "_LONG_PASS_S", 0.0)
        list(loader)
        # The passes are now shorter than this time, but together they are longer.
        monkeypatch.setattr(sampler, "_LONG_PASS_S", loader.meters.spent.seconds)
        last = sampler._shared.last
        for _ in range(3):
            for _ in loader:
                assert sampler._shared.sampler is last
            assert sampler._shared.sampler is None


def test_a_short_pass_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_LONG_PASS_S", 1e9)
    for loader in (watch(DataLoader(DATA, 4)), Loader(DATA, 4, num_workers=1)):
        names = {thread.name for _ in loader for thread in threading.enumerate()}
        assert "colabkit-telemetry" not in names


def test_length_attributes_and_methods_are_forwarded_to_the_loader() -> None:
    loader = DataLoader(DATA, 4)
    watched = watch(loader)
    assert len(watched) == 3
    assert watched.dataset is DATA
    assert watched.batch_size == 4
    assert watched.sampler is loader.sampler
    assert repr(watched) == f"watch({loader!r})"
    assert watch(NamedLoader([])).name == "theirs"
    with pytest.raises(AttributeError, match="no_such"):
        watched.no_such  # noqa: B018


def test_the_path_of_a_custom_dataset_is_the_folder_of_its_listed_files(tmp_path: Path) -> None:
    listing = TensorDataset(torch.zeros(2))
    for paths, found in (([tmp_path / "a" / "1.jpg", tmp_path / "b" / "2.jpg"], str(tmp_path)), (["a", "b"], None)):
        listing.paths = paths  # type: ignore[attr-defined]
        facts = watch(DataLoader(listing)).meters.facts
        assert facts is not None
        assert (facts.path, facts.source) == (found, None)


def test_a_loader_without_a_length_can_be_iterated() -> None:
    for loader in (NamedLoader([1, 2, 3]), (number for number in (1, 2, 3)), DataLoader(Stream(), 2)):
        watched = watch(loader)
        with pytest.raises(TypeError):
            len(watched)
        assert len(list(watched)) == 3
    assert list(itertools.islice(watch(itertools.count()), 3)) == [0, 1, 2]


def test_invalid_arguments_are_one_line_errors_and_a_watched_loader_is_not_wrapped_twice() -> None:
    for rubbish in (None, 5, "photos", b"photos", {"train": [1]}, DATA, [1, 2], [DataLoader(DATA)], [DATA]):
        message = r"^Cannot watch: the argument is (None|an? \w+); expected an iterable of batches"
        with pytest.raises(errors.InvalidOption, match=message):
            watch(rubbish)  # type: ignore[arg-type]
    watched = watch(NamedLoader([1]))
    assert watch(watched) is watched
    assert colabkit.watch is watch


def test_batches_samples_passes_and_steps_are_counted() -> None:
    watched = watch(DataLoader(DATA, 4))
    for _ in range(3):
        for _ in watched:
            pass
    spent = watched.meters.snapshot()
    assert (spent.batches, spent.samples, spent.passes, spent.steps) == (9, 30, 3, 9)
    assert [step.samples for step in spent.recent] == [4, 4, 2] * 3
    assert [step.is_first for step in spent.recent] == [True, False, False] * 3
    assert spent.seconds == pytest.approx(sum(step.seconds for step in spent.recent))
    assert spent.parts == ()


def test_waiting_and_work_are_measured_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    # The clock is read twice when the first batch is requested, and twice per batch. The last request is not timed.
    now = itertools.chain([0.0, 0.0, 3.0, 4.0, 6.0], itertools.repeat(7.0))
    monkeypatch.setattr(api.time, "perf_counter", lambda: next(now))
    watched = watch(NamedLoader([torch.zeros(8), torch.zeros(8)]))
    for _ in watched:
        pass
    spent = watched.meters.snapshot()
    assert (spent.wait_s, spent.compute_s, spent.first_s) == (5.0, 2.0, 3.0)


def test_steps_are_counted_during_a_long_pass_and_no_gpu_step_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = watch(NamedLoader(list(range(100))))
    for number in watched:
        assert watched.meters.spent.steps == watched.meters.snapshot().steps == number
    monkeypatch.setattr(api, "_clock", lambda totals, _: PromptClock(totals))
    watched = watch(NamedLoader(list(range(1000))))
    list(watched)
    assert watched.meters.snapshot().steps == 1000


def test_events_report_passes_and_batches_that_are_already_counted(heard: list[meters.Event]) -> None:
    watched, seen = watch(DataLoader(DATA, 4)), []
    unsubscribe = meters.subscribe(lambda event: seen.append(event.meters.samples))
    try:
        for _ in range(2):
            list(watched)
    finally:
        unsubscribe()
    started = meters.EpochStarted(watched.meters, 0, 3, 10)
    taken = [meters.BatchTaken(watched.meters)] * 3
    assert heard == [started, *taken, meters.EpochStarted(watched.meters, 1, 3, 10), *taken]
    assert seen == [0, 4, 8, 10, 10, 14, 18, 20]
    heard.clear()
    stranger = watch(NamedLoader([1]))
    list(stranger)
    assert heard[0] == meters.EpochStarted(stranger.meters, 0, None, None)
    assert stranger.meters.facts == meters.LoaderFacts("foreign", encoding="python")


def test_leaving_a_pass_early_keeps_the_counts_and_closes_the_loaders_iterator() -> None:
    ended = threading.Event()

    def batches() -> Iterator[int]:
        try:
            yield from range(100)
        finally:
            ended.set()

    watched = watch(batches())
    for number in watched:
        if number == 5:
            break
    assert watched.meters.snapshot().steps == 5
    del number
    watched = None
    assert ended.is_set()


def test_errors_of_the_loader_and_of_the_loop_pass_unchanged() -> None:
    failing = watch(FailingLoader())
    with pytest.raises(OSError, match="it broke"):
        list(failing)
    assert failing.meters.snapshot().steps == 2
    watched = watch(NamedLoader([1, 2, 3]))
    with pytest.raises(ZeroDivisionError):
        [number / 0 for number in watched]
    assert list(watched) == [1, 2, 3]
    assert watched.meters.snapshot().passes == 2


def test_nested_passes_are_counted_separately() -> None:
    watched = watch(NamedLoader([1, 2, 3]))
    pairs = [(one, other) for one in watched for other in watched]
    assert len(pairs) == 9
    spent = watched.meters.snapshot()
    assert (spent.batches, spent.passes, spent.steps) == (12, 4, 12)
    assert list(zip(watched, watched, strict=True)) == [(1, 1), (2, 2), (3, 3)]


def test_a_batch_is_released_before_the_next_one_is_loaded() -> None:
    alive: list[bool] = []

    class Batch:
        def __del__(self) -> None:
            alive.pop()

    def batches() -> Iterator[Batch]:
        for _ in range(4):
            assert not alive
            alive.append(True)
            yield Batch()

    for batch in watch(batches()):
        del batch


# Each batch with its number of samples.
BATCHES: tuple[tuple[Any, int], ...] = (
    (torch.zeros(7, 3), 7),
    (np.zeros((7, 3)), 7),
    (torch.tensor(1.0), 1),
    ([torch.zeros(7, 3), torch.zeros(7)], 7),
    ((np.zeros((7, 3)), {"a": 1}), 7),
    (Pair(torch.zeros(7), torch.zeros(7)), 7),
    ({"image": torch.zeros(7, 3), "label": torch.zeros(7)}, 7),
    ({"views": torch.zeros(14, 3), "label": torch.zeros(7)}, 7),
    ([torch.zeros(7, 3)], 7),
    (UserDict(image=torch.zeros(7)), 7),
    ({"inputs": {"ids": torch.zeros(7, 3)}}, 7),
    ([{"ids": torch.zeros(7)}, torch.zeros(7)], 7),
    # Collate functions for object detection return batches in this form.
    (((torch.zeros(3, 5, 5), torch.zeros(3, 9, 4)), ({"boxes": 1}, {"boxes": 2})), 2),
    ((torch.zeros(7, 3), ["a"] * 7), 7),
    (["a", "b", "c"], 3),
    ({"text": ["a", "b", "c"]}, 3),
    ([], 0),
    ({}, 0),
    ("text", 1),
    (5, 1),
    (None, 1),
    ((torch.zeros(7, 3), torch.zeros(7), torch.tensor(0.5)), 7),
    ((torch.zeros(7, 3), torch.zeros(7), None, 0.5), 7),
    ((torch.zeros(7, 3), (torch.zeros(7), torch.zeros(7, 2))), 7),
    ((torch.zeros(7, 3), [torch.zeros(2, 4), torch.zeros(3, 4)]), 2),
    ({"epoch": 1, "task": "birds", "image": torch.zeros(7, 3)}, 7),
    ((torch.tensor(1.0), torch.tensor(2.0)), 1),
    (torch.eye(7).to_sparse(), 7),
    ((torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged), torch.zeros(2)), 2),
    (torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.strided), 2),
    ((torch.zeros(7, 2), torch.nested.nested_tensor([torch.zeros(2)] * 3, layout=torch.jagged)), 3),
    (type("Odd", (), {"shape": "7"})(), 7),
    (type("Odd", (), {"shape": (None, 3)})(), 1),
    (type("Odd", (), {"shape": lambda self: (7,)})(), 1),
)


def test_samples_are_counted_by_the_last_field_of_a_batch() -> None:
    for batch, samples in BATCHES:
        assert samples_in(batch) == samples, batch


class Graphs:
    """A third-party batch without the usual attributes."""


def test_a_batch_of_unknown_type_counts_as_the_batch_size_of_its_loader() -> None:
    watched = watch(DataLoader(DATA, 5, collate_fn=lambda _: Graphs()))
    assert [type(batch) for batch in watched] == [Graphs, Graphs]
    assert watched.meters.samples == 10


def test_watching_does_not_change_batches_of_any_type() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.strided)
    empty, texts = (torch.zeros(0, 3), torch.zeros(0)), (["a", "b"], torch.zeros(2))
    for batch in (torch.eye(4).to_sparse(), nested, empty, texts, Graphs()):
        for loader in ([batch] * 3, NamedLoader([batch] * 3)):
            assert all(given is batch for given in watch(loader))
            assert len(list(watch(loader))) == 3


def test_facts_are_read_from_the_attributes_of_a_data_loader() -> None:
    data = TensorDataset(torch.zeros(10, 2))
    for options, keeps_workers, is_pinned in (
        ({"num_workers": 2, "persistent_workers": True, "pin_memory": True}, True, True),
        ({"num_workers": 2}, False, False),
        # This loader has no workers.
        ({}, True, False),
    ):
        assert watch(DataLoader(data, 4, **options)).meters.facts == meters.LoaderFacts(
            "foreign",
            samples=10,
            batch_size=4,
            workers=options.get("num_workers", 0),
            encoding="python",
            is_pinned=is_pinned,
            keeps_workers=keeps_workers,
            shuffle=False,
            prefetch=2 if options else None,
        )


def test_streams_and_batches_that_are_dicts_are_facts() -> None:
    class Stream(IterableDataset[dict[str, torch.Tensor]]):
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            yield from ({"x": torch.zeros(2)} for _ in range(4))

    loader = watch(DataLoader(Stream(), 2))
    assert len([*loader]) == 2
    assert loader.meters.facts is not None
    assert (loader.meters.facts.is_stream, loader.meters.facts.has_mappings) == (True, True)


def test_facts_of_an_image_folder_and_of_its_subsets_contain_its_path(tmp_path: Path) -> None:
    folder = pytest.importorskip("torchvision.datasets").ImageFolder(make_tree(tmp_path / "tree", 2))
    for data in (folder, Subset(folder, [0, 1])):
        facts = watch(DataLoader(data, 2)).meters.facts
        assert facts is not None
        assert (facts.path, facts.is_remote) == (str(tmp_path / "tree"), False)


def test_files_are_the_source_of_a_dataset_only_if_it_holds_all_of_them(tmp_path: Path) -> None:
    folder = pytest.importorskip("torchvision.datasets").ImageFolder(make_tree(tmp_path / "tree", 4))
    every, doubled = Subset(folder, range(len(folder))), Subset(folder, [0] * len(folder))
    relabeled = type(folder)(tmp_path / "tree", target_transform=lambda label: 1 - label)
    for data, source in (
        (doubled, None),
        (relabeled, None),
        (folder, str(tmp_path / "tree")),
        (every, str(tmp_path / "tree")),
        (Subset(folder, [0, 1]), None),
        (Subset(Subset(folder, [0, 1]), [1, 0]), None),
    ):
        facts = watch(DataLoader(data, 2)).meters.facts
        assert facts is not None
        assert facts.source == source


def test_the_order_of_custom_batches_is_that_of_their_sampler() -> None:
    shuffled = torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(DATA), 4, drop_last=False)
    for batch_sampler, shuffle in ((shuffled, True), ([[0, 1], [5, 4]], None)):
        facts = watch(DataLoader(DATA, batch_sampler=batch_sampler)).meters.facts
        assert facts is not None
        assert facts.shuffle is shuffle


@pytest.mark.parametrize(("allocated", "device"), [((0, 0), "cpu"), ((512, 0), "cuda:0"), ((1, 512), "cuda:1")])
def test_a_loop_with_tensors_on_a_gpu_counts_as_running_on_that_gpu_whichever_is_current(
    monkeypatch: pytest.MonkeyPatch, allocated: tuple[int, int], device: str
) -> None:
    watched = watch(NamedLoader([1]))
    clocks: list[str] = []
    monkeypatch.setattr(api, "_clock", lambda totals, gpu: clocks.append(str(gpu)) or meters.HostClock(totals))
    for name, answer in {"is_available": True, "is_initialized": True, "device_count": 2}.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda number: allocated[number])
    list(watched)
    assert watched.meters.facts == meters.LoaderFacts("foreign", encoding="python", device=device)
    assert clocks == [device.replace("cpu", "None")]
