"""The network, optimizer and learning rates of `train_on()`: a ResNet-18 with ImageNet weights, or a small network.

The weights come from torch's cache, or are downloaded once within a deadline. Without them, the small network is used.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import math
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from colabkit.foundation import (
    ColabkitError,
    Corrupt,
    FetchFailed,
    TimedOut,
    cannot,
    file_changes,
    format_count,
    import_optional,
    option,
    write_atomically,
)
from colabkit.storage import answer_of
from colabkit.training.models import small_network

NetworkName: TypeAlias = Literal["small", "resnet18"]

_FILE, _SHA256 = "resnet18-f37072fd.pth", "f37072fd"
"""Name of the file of weights in torch's cache, which contains the first digits of its SHA-256."""

_ADDRESS = f"https://download.pytorch.org/models/{_FILE}"
_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Seconds within which the server must answer, and within which the 45 MiB of weights must arrive.
_ANSWER_S, _DOWNLOAD_S = 5.0, 60.0
_BLOCK_BYTES = 1 << 20
_LEAST_SIDE = 64
# Maximum number of images for ResNet-18 on a CPU, where an epoch of more images takes too long.
_MOST_ON_CPU = 5_000
_FROZEN_ON_CPU = ("conv1", "bn1", "layer1", "layer2", "layer3")
_WARMUP_SHARE, _WARMUP_STEPS = 0.1, 500


@dataclass(frozen=True, slots=True)
class ChosenNetwork:
    """A network for classification.

    Attributes:
        name: `"small"` for `small_network()`, or `"resnet18"`.
        model: the network, on its device.
        reason: reason for the choice, as text.
        mean: mean of the normalized images, one value per channel.
        std: their standard deviation.
        rates: learning rate of the head, and of all other layers.
    """

    name: NetworkName
    model: nn.Module
    reason: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rates: tuple[float, float]

    @property
    def title(self) -> str:
        """The name for reports."""
        return "small network" if self.name == "small" else "ResNet-18"

    def optimizer(self, steps: int) -> tuple[Optimizer, LambdaLR]:
        """Return an optimizer, and a scheduler that warms up and then follows a cosine over `steps` updates.

        The scheduler saves only its update count, so a resumed run can be longer than planned.
        """
        head = list(_head_of(self.model).parameters())
        known = set(map(id, head))
        body = [one for one in self.model.parameters() if id(one) not in known and one.requires_grad]
        groups = [{"params": head, "lr": self.rates[0]}, {"params": body, "lr": self.rates[1]}]
        # On a GPU, an optimizer that is not fused makes the gradient scaler of fp16 wait for the GPU in each step.
        optimizer = AdamW(groups, weight_decay=0.01, fused=head[0].is_cuda or None)
        optimizer.register_load_state_dict_pre_hook(_keep_fused)
        optimizer.register_load_state_dict_post_hook(_keep_strides)
        return optimizer, LambdaLR(optimizer, _cosine(steps))


def _keep_fused(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Let the device of the optimizer, not that of the saved run, decide whether it is fused."""
    groups = zip(state["param_groups"], optimizer.param_groups, strict=True)
    return {**state, "param_groups": [{**saved, "fused": own["fused"]} for saved, own in groups]}


def _keep_strides(optimizer: Optimizer) -> None:
    """Give loaded moments the strides of their weights, because fused optimizers ignore them."""
    for weight, moments in optimizer.state.items():
        for name, moment in moments.items():
            if moment.shape == weight.shape and moment.stride() != weight.stride():
                moments[name] = torch.empty_like(weight, dtype=moment.dtype).copy_(moment)


def _head_of(model: nn.Module) -> nn.Module:
    return list(model.children())[-1]


def _cosine(steps: int) -> Callable[[int], float]:
    warmup = max(1, min(_WARMUP_STEPS, round(_WARMUP_SHARE * steps)))

    def factor(done: int) -> float:
        return min((done + 1) / warmup, 0.5 * (1 + math.cos(math.pi * min(1.0, done / max(1, steps)))))

    return factor


def choose_network(
    act: str, name: NetworkName | Literal["auto"], classes: int, size: tuple[int, int], samples: int, device: str
) -> ChosenNetwork:
    """Return a network for images of the given size.

    Args:
        act: verb and object for messages.
        name: the requested network; `"auto"` is ResNet-18 if the images and the device suit it and its weights are
            available, otherwise the small network.
        classes: number of classes.
        size: height and width of the images.
        samples: number of training images.
        device: `"cpu"` or `"cuda"`.

    Raises:
        MissingPackage: if ResNet-18 is requested and torchvision is not installed.
        FetchFailed, TimedOut, Corrupt: if ResNet-18 is requested and its weights cannot be downloaded or read.
    """
    reason = "you requested it"
    if name == "auto":
        reason = _obstacle(size, samples, device)
        if not reason:
            try:
                return _resnet(act, classes, device, "")
            except ColabkitError as error:
                found = error.message.found if error.message is not None else str(error)
                reason = str(found)
    elif name == "resnet18":
        return _resnet(act, classes, device, "you requested it;")
    model = small_network(classes, (*size, 3)).to(device)
    return ChosenNetwork("small", model, reason, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (3e-3, 3e-3))


def _obstacle(size: tuple[int, int], samples: int, device: str) -> str:
    """Return the reason why ResNet-18 is not suitable; empty if it is."""
    if min(size) < _LEAST_SIDE:
        return f"images of {size[1]}×{size[0]} pixels are too small for a pretrained network"
    if device == "cpu" and samples > _MOST_ON_CPU:
        return f"a pretrained network takes too long for {format_count(samples)} images without a GPU"
    return ""


def _resnet(act: str, classes: int, device: str, reason: str) -> ChosenNetwork:
    advice = ("Run pip install torchvision, or use ", option("model", "small"))
    # Importing torchvision takes seconds, so look for the weights first.
    weights, origin = _weights(act) if importlib.util.find_spec("torchvision") else ({}, "")
    resnet18 = import_optional("torchvision.models", act, "for ResNet-18", next_step=advice).resnet18
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = resnet18()
        model.load_state_dict(weights)
        model.fc = nn.Linear(model.fc.in_features, classes)
    reason = f"{reason} its ImageNet weights {origin}".strip()
    if device == "cpu":
        for name in _FROZEN_ON_CPU:
            getattr(model, name).requires_grad_(False)
        reason += "; without a GPU, only the last layers are trained"
    return ChosenNetwork("resnet18", model.to(device), reason, *_IMAGENET, (1e-3, 1e-4))


def _weights(act: str) -> tuple[dict[str, Any], str]:
    """Return the weights of ResNet-18, and whether they were cached or downloaded."""
    path = Path(torch.hub.get_dir()) / "checkpoints" / _FILE
    if path.is_file():
        try:
            return torch.load(path, map_location="cpu", weights_only=True), "were in torch's cache"
        except Exception as error:
            # A damaged file can cause errors of many types.
            found = f"the weights {str(path)!r} are damaged"
            advice = ("Remove this file, or use ", option("model", "small"))
            raise Corrupt(cannot(act, found, "", advice)) from error
    try:
        answer_of(_ask_server, can_hang=True, stalled_s=_ANSWER_S, tries=1)
        data = answer_of(_download, can_hang=True, stalled_s=_DOWNLOAD_S, tries=1)
    except TimedOut as error:
        found = f"the ImageNet weights of ResNet-18 did not arrive from {_ADDRESS} in time"
        raise TimedOut(cannot(act, found, "", _ADVICE)) from error
    except (OSError, ValueError) as error:
        cause = getattr(error, "reason", error)
        found = f"the ImageNet weights of ResNet-18 cannot be downloaded from {_ADDRESS} ({cause})"
        raise FetchFailed(cannot(act, found, "", _ADVICE)) from error
    if not hashlib.sha256(data).hexdigest().startswith(_SHA256):
        found = f"the ImageNet weights of ResNet-18 from {_ADDRESS} have the wrong checksum"
        raise FetchFailed(cannot(act, found, _SHA256, _ADVICE))
    with file_changes.translated(act):
        write_atomically(path, data)
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True), "were downloaded"


_ADVICE = ("Check the network, or use ", option("model", "small"))


def _ask_server() -> None:
    with urllib.request.urlopen(urllib.request.Request(_ADDRESS, method="HEAD"), timeout=_ANSWER_S):
        pass


def _download() -> bytes:
    until = time.monotonic() + _DOWNLOAD_S
    data = bytearray()
    with urllib.request.urlopen(_ADDRESS, timeout=_ANSWER_S) as answer:
        while block := answer.read(_BLOCK_BYTES):
            data += block
            if time.monotonic() > until:
                # The caller has abandoned this download.
                raise TimeoutError("the download took too long")
    return bytes(data)
