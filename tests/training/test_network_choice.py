"""The network of `train_on()`: it is pretrained if possible, and training works without the weights or the network."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from colabkit.errors import Corrupt, FetchFailed
from colabkit.training import choose_network, network_choice

torchvision = pytest.importorskip("torchvision")

PHOTO = (128, 128)


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the weights in torch's cache, and make the internet unreachable."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    # Nothing listens on this port.
    monkeypatch.setattr(network_choice, "_ADDRESS", "http://127.0.0.1:9/weights")
    return tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth"


def test_cached_weights_are_used_for_photos(weights: Path) -> None:
    weights.parent.mkdir(parents=True)
    state = torchvision.models.resnet18().state_dict()
    torch.save(state, weights)
    found = choose_network("train", "auto", 3, PHOTO, 100, "cpu")
    assert found.name == "resnet18"
    assert "torch's cache" in found.reason
    assert found.model(torch.rand(2, 3, *PHOTO)).shape == (2, 3)
    assert torch.equal(found.model.state_dict()["layer4.0.conv1.weight"], state["layer4.0.conv1.weight"])
    trained = {id(one) for group in found.optimizer(10)[0].param_groups for one in group["params"]}
    assert id(found.model.layer4[0].conv1.weight) in trained
    assert id(found.model.conv1.weight) not in trained


@pytest.mark.parametrize(
    ("size", "samples", "reason"), [((32, 32), 100, "too small"), (PHOTO, 50_000, "without a GPU")]
)
def test_the_small_network_is_used_where_a_pretrained_one_does_not_suit(
    size: tuple[int, int], samples: int, reason: str
) -> None:
    found = choose_network("train", "auto", 3, size, samples, "cpu")
    assert found.name == "small"
    assert reason in found.reason


def test_without_a_network_connection_the_small_network_is_used_at_once(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_choice, "import_optional", lambda *_, **__: pytest.fail("torchvision is imported"))
    began = time.monotonic()
    found = choose_network("train", "auto", 3, PHOTO, 100, "cpu")
    assert (found.name, not weights.exists()) == ("small", True)
    assert "cannot be downloaded" in found.reason
    assert time.monotonic() - began < 20


def test_damaged_weights_are_not_used(weights: Path) -> None:
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"half a file")
    assert "are damaged" in choose_network("train", "auto", 3, PHOTO, 100, "cpu").reason
    with pytest.raises(Corrupt, match="Remove this file"):
        choose_network("train", "resnet18", 3, PHOTO, 100, "cpu")


def test_a_requested_network_without_weights_is_an_error(weights: Path) -> None:
    with pytest.raises(FetchFailed, match="use model='small'"):
        choose_network("train", "resnet18", 3, PHOTO, 100, "cpu")


def test_a_longer_training_resumes_the_learning_rate_at_its_own_place() -> None:
    network = choose_network("train", "small", 3, (8, 8), 100, "cpu")
    _, short = network.optimizer(10)
    _, long = network.optimizer(20)
    for _ in range(10):
        short.optimizer.step()
        short.step()
    long.load_state_dict(short.state_dict())
    assert short.get_last_lr()[0] == pytest.approx(0)
    long.optimizer.step()
    long.step()
    assert long.get_last_lr()[0] == pytest.approx(3e-3 * 0.42, rel=0.05)
