"""`Loader` over map-style datasets, whose samples are loaded one by one, in the caller or in worker processes."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch
from contract import StreamContract, make_pack
from sampling import sampled
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    StackDataset,
    Subset,
    default_collate,
    get_worker_info,
    random_split,
)
from torchvision import transforms as v1
from torchvision.datasets import FakeData, ImageFolder
from torchvision.transforms import v2
from trees import make_tree

from colabkit.augment import Compose, Normalize, PerSample, RandomHorizontalFlip
from colabkit.errors import BadImage, InvalidOption, LoaderFailed
from colabkit.foundation import epoch_order
from colabkit.loading import Loader
from colabkit.packs import FileDataset, open_pack

WORKERS = [0, 1, 2]
DEADLINE_S = 30.0


class Point(NamedTuple):
    x: Any
    y: Any


class Squares(Dataset):
    def __init__(
        self, count: int = 23, make: Callable[[int], Any] = lambda i: (torch.tensor([i, i * i]), i % 3)
    ) -> None:
        self.count = count
        self.make = make

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    def new() -> list[psutil.Process]:
        return [process for process in psutil.Process().children(recursive=True) if process not in before]

    before = set(psutil.Process().children(recursive=True))
    yield
    if new():
        # The frames of a caught error may keep a loader and its workers alive.
        gc.collect()
    assert psutil.wait_procs(new(), 10)[1] == []


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tree(tmp_path_factory.mktemp("images") / "tree", 8)


def to_tensor() -> v2.Compose:
    return v2.Compose([v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)])


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def assert_loads(dataset: Any, num_workers: int, collate: Any = None, **options: Any) -> None:
    count = len(dataset)
    loader = Loader(dataset, 5, shuffle=True, seed=4, num_workers=num_workers, collate_fn=collate, **options)
    assert len(loader) == -(-count // 5)
    for epoch in range(2):
        order = epoch_order(count, 4, epoch, 0, count).tolist()
        batches = list(loader)
        assert len(batches) == len(loader)
        for number, batch in enumerate(batches):
            samples = [dataset[index] for index in order[5 * number : 5 * number + 5]]
            assert same(batch, (collate or default_collate)(samples))


@pytest.mark.parametrize("num_workers", sampled([0, 2], 1))
class TestLoaderStream(StreamContract):
    @pytest.fixture(autouse=True)
    def _with(self, num_workers):
        self.num_workers = num_workers

    def batches(self):
        return 3

    def make(self, fail_at=None):
        samples = Squares(10)
        if fail_at is not None:
            bad = epoch_order(10, 2, 0, 0, 10)[4 * fail_at]
            samples.make = lambda i: (torch.tensor([i, i * i]), i % 3 if i != bad else int("planned"))
        return Loader(samples, 4, shuffle=True, seed=2, num_workers=self.num_workers)

    def samples(self, batch):
        return [(*value.tolist(), int(label)) for value, label in zip(*batch, strict=True)]

    def everything(self):
        return [(i, i * i, i % 3) for i in range(10)]


@pytest.mark.parametrize("num_workers", WORKERS)
def test_any_map_style_data_set_is_batched_by_the_default_collate(num_workers):
    assert_loads(Squares(), num_workers)


@pytest.mark.parametrize(
    "make",
    [
        float,
        str,
        lambda i: torch.full((2, 3), i),
        lambda i: np.full(3, i, np.float32),
        lambda i: {"x": torch.tensor(i), "name": f"sample {i}", "y": i % 2},
        lambda i: Point(torch.tensor([i]), i),
        lambda i: (torch.tensor(i), {"boxes": torch.full((2, 4), i), "more": [i, str(i)]}, (float(i), None or i)),
        lambda i: [torch.tensor(i), torch.tensor(-i)],
    ],
    ids=["number", "text", "tensor", "array", "dict", "namedtuple", "nested", "list"],
)
@pytest.mark.parametrize("num_workers", sampled([0, 2], 1))
def test_samples_may_have_any_structure(make, num_workers):
    assert_loads(Squares(12, make), num_workers)


@pytest.mark.parametrize(
    "make",
    [
        lambda x, i: x,
        lambda x, i: (x, i),
        lambda x, i: [x, str(i)],
        lambda x, i: {"x": x, "y": i},
        Point,
    ],
    ids=["alone", "tuple", "list", "dict", "namedtuple"],
)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_transform_of_samples_changes_only_their_first_field(make, num_workers):
    loader = Loader(
        Squares(12, lambda i: make(torch.tensor([i]), i)), 4, transform=PerSample(torch.neg), num_workers=num_workers
    )
    expected = [default_collate([make(torch.tensor([-i]), i) for i in range(first, first + 4)]) for first in (0, 4, 8)]
    assert all(map(same, loader, expected))
    assert len(loader) == 3


@pytest.mark.parametrize("num_workers", [0, 2])
def test_data_sets_of_torchvision_load_with_their_own_transforms(tree, num_workers):
    assert_loads(FakeData(13, (3, 8, 8), 4, transform=to_tensor()), num_workers)
    folder = ImageFolder(tree, transform=to_tensor())
    assert_loads(folder, num_workers)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_subsets_and_concatenations_of_data_sets_and_packs_load(tmp_path, tree, num_workers):
    packs = [open_pack(make_pack(tmp_path / f"{n}.h5", seed=n, train=6 + n))["train"] for n in range(2)]
    assert_loads(ConcatDataset(packs), num_workers)
    folder = ImageFolder(tree, transform=to_tensor())
    first, second = random_split(Squares(), [15, 8], torch.Generator().manual_seed(3))
    for dataset in (Subset(folder, [3, 3, 20, 7]), ConcatDataset([Squares(6), Squares(7)]), first, second):
        assert_loads(dataset, num_workers)
    assert_loads(StackDataset(a=Squares(9), b=Squares(9, float)), num_workers)


def test_subsets_of_a_pack_are_views_and_load_as_rows(tmp_path):
    data = open_pack(make_pack(tmp_path / "p.h5", train=20))["train"]
    part, rest = random_split(data, [13, 7], torch.Generator().manual_seed(3))
    for subset in (part, rest, Subset(data, range(4, 9)), Subset(Subset(data, [9, 8, 7, 6]), [3, 1])):
        images, labels = (torch.cat(field) for field in zip(*Loader(subset, 3), strict=True))
        expected = [subset[i] for i in range(len(subset))]
        assert torch.equal(images, torch.stack([image for image, _ in expected]))
        assert labels.tolist() == [label for _, label in expected]
        assert "PackedDataset" in repr(Loader(subset, 3))


@pytest.mark.parametrize("num_workers", sampled([0, 2], 1))
@pytest.mark.parametrize(
    "collate",
    [
        lambda samples: {"x": torch.stack([x for x, _ in samples]), "y": [y for _, y in samples]},
        lambda samples: Point(torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])),
        lambda samples: [{"deep": (default_collate(samples), len(samples))}],
        len,
        default_collate,
    ],
    ids=["dict", "namedtuple", "nested", "number", "torch's"],
)
def test_collate_fn_makes_the_batch(collate, num_workers):
    assert_loads(Squares(12), num_workers, collate)


def test_collate_fn_receives_the_samples_of_a_pack_and_of_arrays(tmp_path):
    data = open_pack(make_pack(tmp_path / "p.h5", train=12))["train"]
    assert_loads(data, 2, lambda samples: {"x": torch.stack([x for x, _ in samples]), "y": [y for _, y in samples]})
    assert_loads(torch.arange(24).view(12, 2), 0, torch.stack)


def test_options_for_rows_raise_an_error_for_samples_loaded_one_by_one():
    for options in ({"fields": ["X"]}, {"as_dict": True}, {"size": 8}, {"on_bad": "skip"}):
        name = next(iter(options))
        for reason, more in (
            (r"the dataset \(Squares\) loads", {}),
            ("collate_fn= takes", {"collate_fn": default_collate}),
            ("PerSample transforms", {"transform": PerSample(torch.neg)}),
            ("torchvision transforms", {"transform": v2.RandomHorizontalFlip()}),
        ):
            message = f"{reason} samples one by one, so the Loader does not support {name}=. Omit {name}=, or"
            with pytest.raises(InvalidOption, match=message):
                Loader(Squares(), 4, **options, **more)


def broken(index: int) -> torch.Tensor:
    if index == 7:
        raise ValueError("planned, and\nin two lines")
    return torch.tensor(index)


def fails_on_seven(batch: Any) -> Any:
    if 7 in [int(x) for x in batch]:
        raise KeyError("planned")
    return batch


@pytest.mark.parametrize("num_workers", WORKERS)
def test_an_error_of_a_data_set_names_sample_and_cause_in_one_line(num_workers):
    got = []
    with pytest.raises(LoaderFailed, match=r"Cannot make a batch: sample 7 raised ValueError: planned, and") as caught:
        got.extend(Loader(Squares(12, broken), 3, num_workers=num_workers))
    assert [batch.tolist() for batch in got] == [[0, 1, 2], [3, 4, 5]]
    assert "\n" not in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert str(caught.value).endswith("Run dataset[7] to see the error.")
    assert isinstance(caught.value.__cause__, ValueError)
    assert str(caught.value.__cause__) == "planned, and\nin two lines"
    # The line of user code is shown even if it ran in a worker process.
    text = "".join(traceback.format_exception(caught.value))
    assert 'raise ValueError("planned, and\\nin two lines")' in text
    assert f'{__file__}", line {broken.__code__.co_firstlineno + 2}, in broken' in text


class UnpicklableError(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


@pytest.mark.parametrize("kind", ["made with other arguments", "made in a function", "holding a lock"])
def test_an_error_that_cannot_be_pickled_is_still_reported(kind):
    class LocalError(Exception):
        pass

    def fails(index: int) -> torch.Tensor:
        if index < 7:
            return torch.tensor(index)
        error = {"made with other arguments": UnpicklableError(code=5), "made in a function": LocalError("code 5")}.get(
            kind
        )
        raise error or ValueError("code 5", threading.Lock())

    with pytest.raises(
        LoaderFailed, match=r"sample 7 raised \w+: .*code 5.*Run dataset\[7\] to see the error"
    ) as caught:
        list(Loader(Squares(12, fails), 3, num_workers=2))
    assert "code 5" in str(caught.value.__cause__)
    assert 'raise error or ValueError("code 5", threading.Lock())' in caught.value.__cause__.__notes__[0]


@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize("make", [lambda samples: (x for x in samples), lambda samples: [threading.Lock()]])
def test_a_batch_that_cannot_be_pickled_raises_an_error_and_does_not_hang(make, persistent_workers):
    loader = Loader(Squares(12), 3, num_workers=1, persistent_workers=persistent_workers, collate_fn=make)
    with pytest.raises(LoaderFailed, match=r"sending a batch .* raised TypeError: cannot pickle .*num_workers=0"):
        list(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_collate_fn_may_drop_samples_but_not_with_transforms_that_draw_for_each_sample(num_workers):
    def without_the_second(samples: list[Any]) -> Any:
        return default_collate([samples[0], *samples[2:]])

    images = torch.zeros(8, 3, 4, 4, dtype=torch.uint8)
    options: dict[str, Any] = {"collate_fn": without_the_second, "num_workers": num_workers}
    assert [len(batch) for batch in Loader(images, 4, **options)] == [3, 3]
    halved = [len(batch) for batch in Loader(images, 4, transform=lambda batch: batch // 2, **options)]
    assert halved == [3, 3]
    with pytest.raises(LoaderFailed, match="Cannot transform a batch: collate_fn made a batch of 3 from 4 samples"):
        list(Loader(images, 4, transform=RandomHorizontalFlip(), **options))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("around", ["alone", "subset", "concat", "both"])
def test_a_broken_file_of_an_image_folder_is_named_by_its_path(tmp_path, around, num_workers):
    tree = make_tree(tmp_path / "tree", 3)
    path = tree / "bees" / "001.png"
    path.write_bytes(path.read_bytes()[:60])
    folder = ImageFolder(tree, transform=to_tensor())
    dataset = {
        "alone": folder,
        "subset": Subset(folder, range(8, 1, -1)),
        "concat": ConcatDataset([FakeData(4, transform=to_tensor()), folder]),
        "both": Subset(ConcatDataset([folder, folder]), [0, 13, 2]),
    }[around]
    with pytest.raises(LoaderFailed, match=r"bees/001\.png") as caught:
        list(Loader(dataset, 1, num_workers=num_workers))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_of_a_transform_names_the_sample_of_a_pack_or_the_file(tmp_path, tree, num_workers):
    data = open_pack(make_pack(tmp_path / "p.h5", train=20))["train"]
    with pytest.raises(LoaderFailed, match=r"train\[0\] of .*p\.h5.*ZeroDivisionError"):
        list(Loader(data, 4, transform=PerSample(lambda image: 1 / 0), num_workers=num_workers))
    with pytest.raises(LoaderFailed, match=r"ants/000\.png.*ZeroDivisionError"):
        list(Loader(FileDataset(tree), 4, transform=PerSample(lambda image: 1 / 0), num_workers=num_workers))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_errors_of_colabkit_keep_their_type_and_message(tmp_path, num_workers):
    tree = make_tree(tmp_path / "tree", 3)
    (tree / "bees" / "001.png").write_bytes(b"no image")
    with pytest.raises((BadImage, LoaderFailed), match=r"Cannot decode 'bees/001\.png'") as caught:
        list(Loader(FileDataset(tree), 4, transform=PerSample(lambda image: image), num_workers=num_workers))
    assert str(caught.value).count("Cannot") == 1


@pytest.mark.parametrize("num_workers", WORKERS)
def test_errors_of_collating_and_old_transforms_are_one_line_with_advice(num_workers):
    images = torch.zeros(6, 3, 4, 4, dtype=torch.uint8)
    use_newer = r"Replace ToTensor with v2\.ToDtype\(torch\.float32, scale=True\), or with Normalize of colab"
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (Squares(12, torch.tensor), {"collate_fn": fails_on_seven}, "collate_fn raised KeyError: 'planned'"),
        (Squares(4, torch.zeros), {}, r".*sample 0 has the shape \(0,\), but sample 1 has \(1,\).*or pass collate_fn="),
        *(
            (images, {"transform": transform}, f".*{use_newer}")
            for transform in (v1.ToTensor(), v1.Compose([v1.ToTensor()]), PerSample(v1.ToTensor()))
        ),
    ]
    for dataset, options, message in cases:
        with pytest.raises(LoaderFailed, match=f"Cannot make a batch: {message}") as caught:
            list(Loader(dataset, 3, num_workers=num_workers, **options))
        assert "\n" not in str(caught.value)


def test_a_full_dev_shm_is_named_instead_of_collate_fn():
    def collate(samples: list[Any]) -> None:
        raise RuntimeError(
            "unable to allocate shared memory(shm) for file </torch_5_6_7>: No space left on device (28)"
        )

    with pytest.raises(
        LoaderFailed, match=r"Cannot make a batch: /dev/shm has [\d.]+ \S+ free, too little for the"
    ) as e:
        list(Loader(list(range(8)), 4, num_workers=1, collate_fn=collate))
    assert "collate_fn" not in str(e.value)


def test_a_worker_process_that_is_killed_or_exits_raises_an_error_and_does_not_hang():
    def dies(when: int, index: int) -> torch.Tensor:
        if index == when and get_worker_info() is not None:
            os._exit(3) if when == 3 else os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(index)

    for when, num_workers in ((0, 2), (9, 2), (3, 1)):
        began = time.monotonic()
        with pytest.raises(LoaderFailed, match=r"Cannot make a batch: .*worker.*(killed|exited|gone)") as caught:
            list(Loader(Squares(12, partial(dies, when)), 2, num_workers=num_workers))
        assert "\n" not in str(caught.value)
        assert time.monotonic() - began < DEADLINE_S


@pytest.mark.parametrize("num_workers", WORKERS)
def test_an_error_of_a_sampler_raises_an_error_of_the_loader(num_workers):
    class FailingIndices(list):
        kind: type[Exception]

        def __iter__(self) -> Iterator[int]:
            yield from (0, 1)
            raise self.kind("planned")

    for dataset, FailingIndices.kind in itertools.product((Squares(), torch.arange(23)), (ValueError, RuntimeError)):
        with pytest.raises(
            LoaderFailed, match=f"Cannot make a batch: .*sampl.* raised {FailingIndices.kind.__name__}: planned. "
        ):
            list(Loader(dataset, 2, sampler=FailingIndices(range(4)), num_workers=num_workers))
    with pytest.raises(InvalidOption, match="sample indices from 0 to 22"):
        list(Loader(Squares(), 2, sampler=[0, 23], num_workers=num_workers))


def test_a_loader_is_usable_after_an_error():
    samples = Squares(12, broken)
    loader = Loader(samples, 3, num_workers=2)
    with pytest.raises(LoaderFailed):
        list(loader)
    samples.make = torch.tensor
    assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


@pytest.mark.parametrize(
    "of_one", [PerSample(torch.neg), v2.RandomHorizontalFlip(0.5), torch.nn.Sequential(v2.RandomCrop(2))]
)
def test_transforms_of_single_samples_raise_an_error_among_transforms_of_batches(of_one):
    with pytest.raises(
        InvalidOption,
        match=r"transforms single samples; expected transforms of batches\. Put all transforms into one PerSample",
    ) as caught:
        Compose([of_one, Normalize()])
    assert "\n" not in str(caught.value)


def process_ids(loader: Loader) -> list[int]:
    return [int(process) for batch in loader for process in batch[0]]


def test_persistent_workers_make_every_epoch_and_end_with_the_loader() -> None:
    options: dict[str, Any] = {"shuffle": True, "seed": 3, "num_workers": 2}
    loader = Loader(Squares(make=lambda i: (os.getpid(), i)), 4, persistent_workers=True, **options)
    restarted = Loader(Squares(make=lambda i: (os.getpid(), i)), 4, **options)
    first = set(process_ids(loader))
    assert len(first) == 2
    # The workers must survive an abandoned epoch.
    next(iter(loader))
    for epoch in range(3):
        loader.set_epoch(epoch)
        restarted.set_epoch(epoch)
        made, again = list(loader), list(restarted)
        assert all(torch.equal(one[1], other[1]) for one, other in zip(made, again, strict=True))
        assert {int(process) for batch in made for process in batch[0]} <= first
        assert not {int(process) for batch in again for process in batch[0]} & first


def test_random_samples_are_the_same_in_persistent_workers() -> None:
    def drawn(**options: Any) -> list[list[float]]:
        loader = Loader(Squares(make=lambda i: torch.rand(())), 4, shuffle=True, num_workers=2, **options)
        return [torch.cat(list(loader)).tolist() for _ in range(3)]

    assert drawn(persistent_workers=True) == drawn()


def test_persistent_workers_that_an_interrupt_ended_are_replaced() -> None:
    loader = Loader(Squares(make=lambda i: (os.getpid(), i)), 4, num_workers=2, persistent_workers=True)
    first = set(process_ids(loader))
    for process in first:
        # Ctrl-C in a terminal interrupts all processes, including the workers.
        os.kill(process, signal.SIGINT)
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    later = process_ids(loader)
    assert len(later) == 23
    assert not first & set(later)


def test_a_nested_iteration_has_its_own_processes() -> None:
    loader = Loader(Squares(make=lambda i: i), 4, num_workers=1, persistent_workers=True)
    whole = [batch.tolist() for batch in loader]
    for batch, expected in zip(loader, whole, strict=True):
        assert batch.tolist() == expected
        assert [inner.tolist() for inner in loader] == whole


def test_workers_persist_after_an_error_of_a_sample() -> None:
    def make(number: int) -> int:
        if number == 17:
            raise ValueError("seventeen")
        return os.getpid()

    loader = Loader(Squares(make=make), 4, num_workers=1, persistent_workers=True)
    for _ in range(2):
        with pytest.raises(LoaderFailed, match="seventeen"):
            list(loader)


@pytest.mark.parametrize(
    ("dataset", "options"),
    [(Squares(), {"num_workers": 0}), (torch.arange(23), {}), (torch.arange(23), {"num_workers": 2})],
)
def test_persistent_workers_without_worker_processes_raise_an_error(dataset: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=r"persistent_workers=True requires worker processes, but .*\. Omit "):
        Loader(dataset, 4, persistent_workers=True, **options)


def test_facts_report_whether_processes_persist() -> None:
    def keeps_workers(**options: Any) -> bool | None:
        facts = Loader(Squares(), 4, **options).meters.facts
        assert facts is not None
        return facts.keeps_workers

    assert keeps_workers(num_workers=2) is False
    assert keeps_workers(num_workers=2, persistent_workers=True) is True
    # Without worker processes, nothing has to be restarted for an epoch.
    assert keeps_workers(num_workers=0) is True


# torch leaves errors of queues that it failed to start, which pytest would report.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_system_that_allows_no_threads_raises_one_typed_error(allow_threads):
    allow_threads(0)
    with pytest.raises(LoaderFailed, match="start new thread"):
        list(Loader(list(range(8)), 2, num_workers=2))
