"""The network of `train_on()`: it is pretrained if possible, and training works without the weights or the network."""

from __future__ import annotations

import copy
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


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Take a step with fixed gradients, and return the first weight."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return next(model.parameters()).detach().clone()


@pytest.mark.parametrize("is_fused", [False, True])
def test_an_optimizer_resumes_whatever_device_and_memory_format_the_saved_run_had(is_fused: bool) -> None:
    """A run may be saved on a GPU and resumed on a CPU, and the reverse."""
    saved, _ = choose_network("train", "small", 3, PHOTO, 100, "cpu").optimizer(10)
    chosen = [choose_network("train", "small", 3, PHOTO, 100, "cpu") for _ in range(2)]
    (plain, _), (resumed, _) = (one.optimizer(10) for one in chosen)
    chosen[1].model.load_state_dict(chosen[0].model.state_dict())
    for group in resumed.param_groups:
        group["fused"] = is_fused or None
    generator = torch.Generator().manual_seed(0)
    for group in saved.param_groups:
        for weight in group["params"]:
            # Unlike the weights, these are not channels-last.
            moments = (torch.rand(weight.shape, generator=generator) for _ in range(2))
            saved.state[weight] = dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True), step=torch.tensor(3.0))
    # Loaded tensors are not copied.
    plain.load_state_dict(copy.deepcopy(saved.state_dict()))
    state = saved.state_dict()
    for group in state["param_groups"]:
        group["fused"] = not is_fused or None
    resumed.load_state_dict(state)
    assert [group["fused"] for group in resumed.param_groups] == [is_fused or None] * 2
    torch.testing.assert_close(trained(chosen[1].model, resumed), trained(chosen[0].model, plain))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_the_optimizer_is_fused_on_a_gpu() -> None:
    optimizer, _ = choose_network("train", "small", 3, PHOTO, 100, "cuda").optimizer(10)
    assert all(group["fused"] for group in optimizer.param_groups)
