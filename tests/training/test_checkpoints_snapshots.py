"""`save()` takes a snapshot: later changes do not reach the file, and tensors are loaded unchanged."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_folders import HeldDisk

from colabkit.errors import InvalidOption
from colabkit.foundation.environment.limits import MemoryReport
from colabkit.training.checkpoints import snapshots
from colabkit.training.checkpoints.folder import CheckpointFolder

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def through_file(folder: Path, content: dict[str, Any]) -> dict[str, Any]:
    with CheckpointFolder(folder) as checkpoints:
        checkpoints.save(1, content, wait=True)
        newest = checkpoints.newest()
        assert newest is not None
        return dict(newest.content)


def test_changes_after_save_do_not_reach_the_file(tmp_path, file_hook):
    held = HeldDisk(file_hook, "create")
    weights, numbers = torch.ones(1000), {"list": [1, {"deep": 2}], "view": torch.zeros(4, 6)[:, 2:4]}
    with CheckpointFolder(tmp_path) as checkpoints:
        checkpoints.save(1, {"weights": weights, "numbers": numbers})
        assert held.reached.wait(30)
        weights.mul_(7)
        numbers["list"][1]["deep"] = 3
        numbers["list"].append(4)
        numbers["view"].add_(1)
        numbers["new"] = 5
        held.release()
        checkpoints.finish()
        content = checkpoints.newest().content
    assert torch.equal(content["weights"], torch.ones(1000))
    assert content["numbers"]["list"] == [1, {"deep": 2}]
    assert torch.equal(content["numbers"]["view"], torch.zeros(4, 2))
    assert "new" not in content["numbers"]


def test_a_save_waits_for_the_previous_one_whose_buffers_it_reuses(tmp_path, file_hook):
    held = HeldDisk(file_hook, "create")
    weights = torch.zeros(50)
    with CheckpointFolder(tmp_path) as checkpoints:
        assert checkpoints.is_free
        checkpoints.save(1, {"weights": weights})
        assert held.reached.wait(30)
        assert not checkpoints.is_free
        releasing = threading.Timer(0.05, held.release)
        releasing.start()
        weights.fill_(2)
        checkpoints.save(2, {"weights": weights})
        assert held.is_released
        releasing.join()
        checkpoints.finish()
    for step in (1, 2):
        saved = torch.load(tmp_path / f"checkpoint-{step:08d}.pt", weights_only=True)["content"]
        assert torch.equal(saved["weights"], torch.full((50,), 2.0 * (step - 1)))


def test_buffers_are_reused(tmp_path):
    copier = snapshots.ContentCopier()

    def places(content: dict[str, Any]) -> set[int]:
        return {value.data_ptr() for value in copier.copy("save", content).content.values()}

    content = {"a": torch.ones(100_000), "b": torch.ones(200_000), "c": torch.ones(100_000)}
    first = places(content)
    assert len(first) == 3
    assert places(content) == first
    assert places({"c": content["c"], "a": content["a"], "b": content["b"]}) == first
    assert len(places({**content, "d": torch.ones(5)}) & first) == 3


TENSORS = {
    "scalar": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 3),
    "bool": lambda: torch.tensor([True, False]),
    "bfloat16": lambda: torch.randn(9).bfloat16(),
    "complex": lambda: torch.randn(5, dtype=torch.complex64),
    "conjugated": lambda: torch.randn(5, dtype=torch.complex64).conj(),
    "channels-last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(3, 4).t(),
    "strided": lambda: torch.arange(100)[10:50:7],
    "expanded": lambda: torch.randn(3, 1).expand(3, 5),
    "parameter": lambda: torch.nn.Parameter(torch.randn(3)),
    "float8": lambda: torch.randn(8).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_is_loaded_with_its_values_dtype_and_strides(tmp_path, name):
    tensor = TENSORS[name]()
    back = through_file(tmp_path, {"tensor": tensor})["tensor"]
    assert (back.dtype, back.shape, back.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert torch.equal(back.float() if name == "float8" else back, tensor.float() if name == "float8" else tensor)
    assert not back.requires_grad


@pytest.mark.filterwarnings("ignore:Validating sparse")
def test_sparse_tensors_are_loaded(tmp_path):
    back = through_file(tmp_path, {"sparse": torch.eye(3).to_sparse()})["sparse"]
    assert torch.equal(back.to_dense(), torch.eye(3))


def test_tied_weights_stay_tied(tmp_path):
    weight = torch.randn(4, 4)
    back = through_file(tmp_path, {"a": weight, "deep": [{"b": weight.t()}, weight[1:]], "apart": weight.clone()})
    back["a"][2, 3] = 77.0
    assert back["deep"][0]["b"][3, 2] == 77.0
    assert back["deep"][1][1, 3] == 77.0
    assert back["apart"][2, 3] != 77.0


def test_only_the_slice_of_a_large_tensor_is_saved(tmp_path):
    large = torch.randn(1000, 1000)
    with CheckpointFolder(tmp_path) as checkpoints:
        checkpoints.save(1, {"row": large[500], "next": large[501, :10]}, wait=True)
        assert checkpoints.latest.stat().st_size < 20_000
        content = checkpoints.newest().content
    assert torch.equal(content["row"], large[500])
    assert torch.equal(content["next"], large[501, :10])


def test_containers_are_loaded_unchanged(tmp_path):
    cycle: list[Any] = [1]
    cycle.append(cycle)
    one = {"x": 1}
    model = torch.nn.BatchNorm1d(3)
    content = {
        "ordered": OrderedDict(b=1, a=(2, [3])),
        "counter": Counter("aab"),
        "keys": {1: "int", None: "none", (1, "x"): "tuple"},
        "same": [one, one],
        "cycle": cycle,
        "model": model.state_dict(),
        "dtype": torch.float16,
        "size": torch.Size([2, 3]),
        "set": {1, 2},
    }
    back = through_file(tmp_path, content)
    for name in ("ordered", "counter", "keys", "same", "dtype", "size", "set"):
        assert back[name] == content[name]
        assert type(back[name]) is type(content[name])
    assert list(back["ordered"]) == ["b", "a"]
    assert back["same"][0] is back["same"][1]
    assert back["cycle"][1] is back["cycle"]
    assert back["model"]._metadata == model.state_dict()._metadata
    torch.nn.BatchNorm1d(3).load_state_dict(back["model"])


class Colour(IntEnum):
    RED = 1


@pytest.mark.parametrize("value", [object(), np.datetime64("2020"), np.zeros(3), Colour.RED, Path("x"), lambda: 0])
def test_objects_that_cannot_be_loaded_safely_are_refused_immediately(tmp_path, value):
    with CheckpointFolder(tmp_path / "run") as checkpoints:
        with pytest.raises(
            InvalidOption, match=r"Cannot save .+: the state has an object of the type [\w.<>]+; expected"
        ) as caught:
            checkpoints.save(1, {"state": [{"deep": value}]})
        assert "\x1b" not in str(caught.value)
        assert checkpoints.is_free
        checkpoints.save(1, {"state": 1}, wait=True)
        assert checkpoints.newest().content == {"state": 1}


def test_without_memory_for_a_copy_the_original_tensors_are_written_before_save_returns(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshots, "memory_limits", lambda _: MemoryReport(1 << 30, 1000, "test"))
    monkeypatch.setattr(snapshots, "_UNCHECKED_BYTES", 1000)
    weights = torch.ones(100_000)
    with CheckpointFolder(tmp_path) as checkpoints:
        checkpoints.save(1, {"weights": weights})
        assert checkpoints.is_free
        weights.fill_(2)
        assert torch.equal(checkpoints.newest().content["weights"], torch.ones(100_000))
    with CheckpointFolder(tmp_path / "file") as checkpoints:
        (tmp_path / "file").write_text("x")
        # Even without a snapshot, a failed save raises an error only with `wait=True`.
        checkpoints.save(1, {"weights": weights})
        assert "Cannot save" in checkpoints.failures[0][1]
        with pytest.raises(OSError, match="Cannot save"):
            checkpoints.save(2, {"weights": weights}, wait=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_gpu_tensors_are_loaded_and_later_changes_do_not_reach_the_file(tmp_path, file_hook):
    held = HeldDisk(file_hook, "create")
    weight = torch.randn(64, 3, 7, 7, device="cuda").to(memory_format=torch.channels_last)
    expected = weight.cpu()
    with CheckpointFolder(tmp_path) as checkpoints:
        checkpoints.save(1, {"weight": weight, "tied": weight[3:]})
        weight.zero_()
        held.release()
        checkpoints.finish()
        content = checkpoints.newest().content
    assert content["weight"].device.type == "cpu"
    assert content["weight"].stride() == expected.stride()
    assert torch.equal(content["weight"], expected)
    assert content["tied"].untyped_storage().data_ptr() == content["weight"].untyped_storage().data_ptr()


def test_copies_are_on_the_cpu_for_any_default_device():
    given = {"part": torch.arange(10.0)[::2], "empty": torch.empty(0, 3)}
    with torch.device("meta"):
        found = snapshots.ContentCopier().copy("save", given)
    assert found.is_apart
    assert torch.equal(found.content["part"], given["part"])
    assert found.content["empty"].device.type == "cpu"


@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_page_locked_memory_is_freed_after_the_last_copy_from_a_gpu(tmp_path, monkeypatch, is_on_gpu):
    freed: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: freed.append(True), raising=False)
    monkeypatch.setattr(snapshots._StorageRange, "kind", property(lambda extent: (extent.size, is_on_gpu)))
    through_file(tmp_path, {"weight": torch.arange(10.0)})
    assert freed == [True] * is_on_gpu


def test_numpy_numbers_are_loaded_as_python_numbers(tmp_path):
    given = {"rate": np.float64(0.1), "half": np.float32(0.5), "count": np.int64(3), "is_on": np.bool_(True)}
    found = through_file(tmp_path, {"numbers": [given]})["numbers"][0]
    assert found == {"rate": 0.1, "half": 0.5, "count": 3, "is_on": True}
    assert [type(one) for one in found.values()] == [float, float, int, bool]


def test_tensors_that_share_numpy_memory_are_loaded_in_their_own_lengths(tmp_path):
    memory = np.arange(10.0)
    for first, second in ((memory, memory[:5]), (memory[:5], memory)):
        given = {"one": torch.from_numpy(first), "other": torch.from_numpy(second)}
        found = through_file(tmp_path / str(len(first)), given)
        assert all(torch.equal(found[name], tensor) for name, tensor in given.items())
