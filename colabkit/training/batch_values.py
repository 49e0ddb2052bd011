"""The images and labels of a batch, and its loss and accuracy."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from colabkit.foundation import Code, InvalidOption, Text, cannot, format_count, format_things, kind_of, option

USE_BATCH = "use a batch"
# Maximum number of batches whose accuracies are computed together, and maximum number of scores in such a batch.
_GROUPED, _SMALL = 32, 1 << 14
_OF_DISTANCES = (
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss),
    *(nn.functional.mse_loss, nn.functional.l1_loss, nn.functional.smooth_l1_loss, nn.functional.huber_loss),
)
_ELEMENTWISE = (
    *_OF_DISTANCES,
    *(nn.BCELoss, nn.BCEWithLogitsLoss),
    *(nn.functional.binary_cross_entropy, nn.functional.binary_cross_entropy_with_logits),
)
# Names of images and labels in a batch that is a dict, in lower case.
_INPUTS = ("x", "images", "image", "img", "pixel_values", "inputs", "input", "data", "features")
_LABELS = ("y", "labels", "label", "targets", "target", "classes", "class")
_SMALL_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32)


def named_pair(batch: Mapping[Any, Any]) -> tuple[Any, Any]:
    """Return the images and labels in a batch that is a dict, by their names; None for those that are not found.

    If only one of two tensors has a known name, the other tensor is the rest of the pair.
    """
    names = {str(name).lower(): name for name in batch}
    found = [next((names[known] for known in words if known in names), None) for words in (_INPUTS, _LABELS)]
    if len(batch) == 2 and found.count(None) == 1:
        found[found.index(None)] = next(name for name in batch if name not in found)
    return tuple(None if name is None else batch[name] for name in found)  # type: ignore[return-value]


def pair_of(batch: Any) -> tuple[Tensor, Tensor]:
    """Return the images and labels of a batch.

    Raises:
        InvalidOption: if the batch is neither a pair of tensors nor a dict with two tensors whose names are known.
    """
    images = labels = None
    if isinstance(batch, (tuple, list)):
        if len(batch) == 2:
            images, labels = batch
    elif isinstance(batch, Mapping):
        images, labels = named_pair(batch)
    if isinstance(images, Tensor) and isinstance(labels, Tensor):
        return images, labels
    found = f"the batch is {kind_of(batch)}"
    if isinstance(batch, tuple | list):
        found += f" of {', '.join(type(one).__name__ for one in batch)}" if batch else " without elements"
    elif isinstance(batch, Mapping):
        found += f" of {', '.join(map(repr, batch))}" if batch else " without elements"
    state = option("state", {"model": Code("model"), "optimizer": Code("optimizer"), "step": Code("step")})
    next_step: Text = ("Train with a custom step that passes (images, labels) to the supervised step, and use ", state)
    if not isinstance(images, Tensor | None):
        next_step = "If the model has several inputs, write a custom step"
    if isinstance(batch, Tensor):
        more = (
            ". If the data has labels, load them too: pass (images, labels) to the Loader, or name the datasets of an "
            "HDF5 file with open_pack(path, x=..., y=...)"
        )
        next_step = (next_step, more)
    elif isinstance(batch, Mapping) and len(batch) > 1:
        next_step = "Name its tensors 'X' and 'Y', or 'image' and 'label'"
    elif isinstance(batch, tuple | list) and len(batch) > 2:
        fields = option("fields", ["X", "Y"])
        next_step = ("Load only these fields of a pack with ", fields, " of the Loader, or write a custom step")
    raise InvalidOption(cannot(USE_BATCH, found, "two tensors, images and labels", next_step))


def is_of_bytes(error: BaseException) -> bool:
    """Return whether an error of torch reports that a layer got a `uint8` tensor."""
    # torch's error for labels or embedding indices of the wrong dtype contains "Long".
    return any(name in str(error) for name in ("unsigned char", "Byte")) and "Long" not in str(error)


def unscaled_images(error: RuntimeError, batch: Any) -> InvalidOption | None:
    """Return a clear error if a custom step failed because its model got `uint8` images; None for other errors."""
    images = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if isinstance(batch, Mapping):
        images, _ = named_pair(batch)
    if not is_of_bytes(error) or not isinstance(images, Tensor) or images.dtype is not torch.uint8:
        return None
    found = f"the images are uint8 ({str(error).partition(chr(10))[0].rstrip('.')})"
    next_step = "Pass transform=colabkit.augment.Normalize() to the Loader, or use supervised_step()"
    return InvalidOption(cannot(USE_BATCH, found, "floating-point images", next_step))


def unclear_bytes(samples: Tensor) -> InvalidOption:
    """Return the error for `uint8` samples that are no images, since scaling would change codes and numbers."""
    found = f"the samples are {_described(samples)}, which may be pixels or other numbers"
    next_step = "Convert pixels with array.astype('float32') / 255, and other numbers with array.astype('int64')"
    return InvalidOption(cannot(USE_BATCH, found, "uint8 only for images, [B, C, H, W]", next_step))


def misfit_images(images: Tensor, channels: int | None) -> InvalidOption | None:
    """Return a clear error if images do not fit a model whose first convolution takes `channels`; None if they fit."""
    shape = list(images.shape)
    if channels is None or (images.dim() == 4 and shape[1] == channels) or images.dim() not in (3, 4):
        return None
    found = f"the images have the shape {shape}"
    received = shape[1]
    next_step = f"Use a model whose first layer takes {format_things(received, 'channel')}, or images with {channels}"
    if images.dim() == 3:
        next_step = "Pass numpy.expand_dims(images, 1) to the Loader, or pack uint8 arrays with colabkit.pack()"
    elif shape[3] == channels:
        next_step = "Pass numpy.moveaxis(images, 3, 1) to the Loader, or pack uint8 arrays with colabkit.pack()"
    needed = format_things(channels, "channel")
    expected = f"[B, {channels}, H, W], because the model's first convolution takes {needed}"
    return InvalidOption(cannot(USE_BATCH, found, expected, next_step))


def loss_example(loss: object) -> Text:
    """Return advice to pass a loss function; it names the one that a text such as `"mse"` stands for."""
    word = re.sub(r"[^a-z0-9]|loss$", "", loss.lower()) if isinstance(loss, str) else ""
    named = (name for name in dir(nn) if name.endswith("Loss") and name.removesuffix("Loss").lower() == word)
    return ("For example, use ", option("loss", Code(f"nn.{next(named, 'CrossEntropyLoss')}()")))


def misfit_numbers(images: Tensor, weights: torch.dtype) -> InvalidOption | None:
    """Return a clear error if samples are integers, which layers with floating-point weights do not accept."""
    if images.is_floating_point() or images.is_complex():
        return None
    found = f"the samples are {_described(images)}, and the model's weights are {str(weights).removeprefix('torch.')}"
    next_step = "Convert the array, for example with array.astype('float32')"
    return InvalidOption(cannot(USE_BATCH, found, "floating-point samples", next_step))


def misfit_features(error: RuntimeError, images: Tensor, model: nn.Module) -> InvalidOption | None:
    """Return a clear error if a linear layer got another number of features than it takes; None for other errors."""
    sizes = re.search(r"mat1 and mat2 shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)", str(error))
    if sizes is None:
        return None
    received, taken = int(sizes[1]), int(sizes[2])
    layers = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and layer.in_features == taken and name
    ]
    layer = f"the model's layer {layers[0]!r}" if len(layers) == 1 else "a layer of the model"
    shape = list(images.shape)
    found = f"{layer} got {format_count(received)} features from inputs of the shape {shape}"
    # Images are flattened before the first layer, for which a model may leave the last step to its user.
    flat = taken == prod(shape[1:]) != received
    next_step = "Flatten the images first, with nn.Flatten()" if flat else f"Use a layer for {received} features"
    if images.dim() == 4 and not flat:
        next_step += ", or load images of the size that the model takes"
    return InvalidOption(cannot(USE_BATCH, found, format_count(taken), next_step))


def is_cross_entropy(loss: Any) -> bool:
    """Return whether a loss function is cross entropy, possibly with bound arguments."""
    loss = _without_arguments(loss)
    return loss is nn.functional.cross_entropy or isinstance(loss, nn.CrossEntropyLoss)


def checked_loss(loss: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Tensor]:
    """Return a loss function that raises clear errors and, if elementwise, takes outputs `[B, 1]` with labels `[B]`.

    For these shapes, an elementwise loss of torch alone would compare each output with all labels.
    """
    if _is_among(_ELEMENTWISE, loss):
        return partial(_elementwise, loss)
    return partial(_cross_entropy if is_cross_entropy(loss) else _custom, loss)


def _is_among(losses: tuple[Any, ...], loss: Any) -> bool:
    """Return whether a loss function is one of some functions and classes, possibly with bound arguments."""
    inner = _without_arguments(loss)
    return inner in losses or type(inner) in losses


def _without_arguments(loss: Any) -> Any:
    """Return a loss function without arguments that `functools.partial` has bound."""
    while isinstance(loss, partial):
        loss = loss.func
    return loss


def _custom(loss: Callable[[Any, Tensor], Any], outputs: Any, labels: Tensor) -> Tensor:
    if labels.is_floating_point() and labels.dim() == 1 and getattr(outputs, "shape", ()) == (*labels.shape, 1):
        # The loss may handle this, so it is no error. Python shows the warning once.
        shapes = f"The model's output has the shape {list(outputs.shape)}, and the labels have {list(labels.shape)}"
        advice = "If the loss subtracts them, it compares each output with all labels. Use nn.Flatten(0) as last layer"
        warnings.warn(f"{shapes}. {advice}.", stacklevel=2)
    return single_number(loss(outputs, labels))


def _elementwise(loss: Callable[[Any, Tensor], Any], outputs: Any, labels: Tensor) -> Tensor:
    if isinstance(outputs, Tensor) and outputs.shape != labels.shape:
        if outputs.shape != (*labels.shape, 1):
            # torch would compare each output with the labels of other samples, or name only sizes.
            found = f"the labels are {_described(labels)}, and the model's output has the shape {list(outputs.shape)}"
            expected = f"one shape for both, for {getattr(loss, '__name__', type(loss).__name__)}"
            next_step = "Use a model whose output has the shape of the labels"
            if labels.dim() < 3 and outputs.dim() == 2:
                outs = labels.shape[1] if labels.dim() == 2 else 1
                next_step = f"Use a model with {format_things(outs, 'output')}; for classes, use cross entropy"
            raise InvalidOption(cannot(USE_BATCH, found, expected, next_step))
        labels = labels.unsqueeze(-1)
    if labels.dtype is torch.uint8 and labels.dim() > 2 and _is_among(_OF_DISTANCES, loss):
        found = f"the labels are {_described(labels)}, while images are scaled to [0, 1]"
        next_step = "For an autoencoder, train with a custom step that passes (images / 255, images / 255)"
        raise InvalidOption(cannot(USE_BATCH, found, "floating-point labels", next_step))
    if isinstance(outputs, Tensor) and not labels.is_floating_point():
        # Several labels per sample are stored as bytes, which binary cross entropy does not take.
        labels = labels.to(outputs.dtype)
    return single_number(loss(outputs, labels))


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _cross_entropy(loss: Callable[[Any, Tensor], Any], scores: Any, labels: Tensor) -> Tensor:
    # Labels and masks are often stored as small integers, but torch takes class indices as int64.
    indices = labels.long() if labels.dtype in _SMALL_INTEGERS else labels
    try:
        return single_number(loss(scores, indices))
    except (RuntimeError, IndexError, ValueError) as error:
        if not isinstance(scores, Tensor) or scores.dim() != 2:
            raise
        outputs = f"the model's output has the shape {list(scores.shape)}"
        if labels.is_floating_point() and labels.shape != scores.shape:
            found = f"the labels are {_described(labels)}, and {outputs}"
            expected = "class indices, or a probability for each class, for cross entropy"
            next_step = "For regression, pass loss=nn.MSELoss() to supervised_step() or evaluate()"
            raise InvalidOption(cannot(USE_BATCH, found, expected, next_step)) from None
        if isinstance(error, IndexError) and labels.numel():
            least, most = int(labels.min()), int(labels.max())
            found = f"the label {most if most >= scores.shape[1] else least} is in the batch, but {outputs}"
            expected = f"labels from 0 to {scores.shape[1] - 1}"
            next_step = "Number the classes from 0, and use a model with one output for each, len(dataset.classes)"
            raise InvalidOption(cannot(USE_BATCH, found, expected, next_step)) from None
        if labels.shape == (len(scores), 1):
            found = f"the labels are {_described(labels)}, and {outputs}"
            expected = f"class indices of the shape [{len(labels)}] for cross entropy"
            next_step = "Remove the last dimension of the labels, for example with labels.squeeze(1)"
            raise InvalidOption(cannot(USE_BATCH, found, expected, next_step)) from None
        if labels.dim() == 2 and not labels.is_floating_point():
            found = f"the labels are {_described(labels)}, and {outputs}"
            expected = f"class indices of the shape [{len(labels)}] for cross entropy"
            loss_of_several = "pass loss=nn.BCEWithLogitsLoss() to supervised_step() or evaluate()"
            next_step = f"For several labels per sample, {loss_of_several}"
            raise InvalidOption(cannot(USE_BATCH, found, expected, next_step)) from None
        raise


def single_number(value: Any) -> Tensor:
    """Return the loss; raise `InvalidOption` unless it is a tensor with one element."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value
    is_tensor = isinstance(value, Tensor)
    found = f"the loss is {f'a tensor of shape {list(value.shape)}' if is_tensor else kind_of(value)}"
    next_step = "Return the mean of the losses" if is_tensor else "Return the tensor that torch computes"
    raise InvalidOption(cannot(USE_BATCH, found, "a tensor with a single number", next_step))


def is_right(scores: Tensor, labels: Tensor) -> Tensor:
    """Return whether each sample's highest score is that of its label, `bool [B]`.

    If labels are class probabilities, the label is the most probable class.
    """
    return scores.detach().argmax(1) == (labels.argmax(1) if labels.is_floating_point() else labels)


def has_accuracy(scores: Any, labels: Tensor, takes_shares: bool) -> bool:
    """Return whether accuracy is defined, from shapes and dtypes only: reading values would wait for the GPU.

    Args:
        scores: output of the model.
        labels: labels of the batch.
        takes_shares: whether the loss takes class probabilities as labels.
    """
    if not isinstance(scores, Tensor) or scores.dim() != 2 or scores.shape[1] < 2:
        return False
    if labels.is_floating_point():
        return takes_shares and labels.shape == scores.shape
    return labels.shape == scores.shape[:1]


def step_values(scores: Any, labels: Tensor, loss: Tensor, takes_shares: bool) -> dict[str, Tensor]:
    """Return the loss of a batch, and its accuracy if `has_accuracy` returns True."""
    values = {"loss": loss.detach()}
    if has_accuracy(scores, labels, takes_shares):
        values["accuracy"] = is_right(scores, labels).mean(dtype=torch.float32)
    return values


def evaluation_sums(loss: Any, scores: Any, labels: Tensor, value: Tensor) -> Tensor:
    """Return five sums over a batch for the means over several batches, on the device.

    These are the loss times its weight, the weight, the correct predictions, the samples that have an accuracy, and the
    samples. A mean cross entropy is a mean over the labels that are not `ignore_index`, weighted with their class
    weights; other losses are means over the samples.
    """
    count = value.new_full((), len(labels))
    weight, counted = count, torch.ones_like(labels, dtype=torch.bool)
    if (takes_shares := is_cross_entropy(loss)) and not labels.is_floating_point():
        inner, options = _without_arguments(loss), loss.keywords if isinstance(loss, partial) else {}
        counted = labels != options.get("ignore_index", getattr(inner, "ignore_index", -100))
        weights = options.get("weight", getattr(inner, "weight", None))
        each = counted.to(value) if weights is None else weights[labels.long().where(counted, 0)] * counted
        weight = each.sum()
    # The loss of a batch without labels that count is NaN.
    total = torch.where(weight > 0, value.detach().reshape(()) * weight, 0)
    right = judged = torch.zeros_like(count)
    if has_accuracy(scores, labels, takes_shares):
        is_judged = counted if labels.dim() == 1 else counted.all(1)
        right, judged = (is_right(scores, labels) & is_judged).sum(), is_judged.sum()
    return torch.stack([one.to(value) for one in (total, weight, right, judged, count)])


class AccuracyGroup:
    """A group of small batches on the CPU whose accuracies are computed together to save time per step.

    Args:
        takes_shares: whether the loss takes class probabilities as labels.
    """

    def __init__(self, takes_shares: bool) -> None:
        self.takes_shares = takes_shares
        self._pending: list[tuple[dict[str, object], Tensor, Tensor]] = []

    def add(self, scores: Any, labels: Tensor, loss: Tensor) -> Mapping[str, object]:
        """Return the values of a batch as `step_values` does, with numbers on the CPU as floats.

        The accuracy of a small batch on the CPU may be added to the returned mapping only by `compute()`.
        """
        # A leaf or a view may share the memory of a tensor that the next step modifies.
        is_own = type(scores) is Tensor and not scores.is_leaf and not scores._is_view()  # noqa: SLF001 - no public API
        is_small = is_own and loss.is_cpu and 0 < scores.numel() <= _SMALL
        if is_small and has_accuracy(scores, labels, self.takes_shares):
            values: dict[str, object] = {"loss": loss.item()}
            # Class probabilities may share a buffer of the Loader, which is reused only after they are released.
            numbers = labels.argmax(1) if labels.is_floating_point() else labels
            self._pending.append((values, scores.detach(), numbers))
            if len(self._pending) == _GROUPED:
                self.compute()
            return values
        now = step_values(scores, labels, loss, self.takes_shares)
        return {name: value.item() if value.is_cpu else value for name, value in now.items()}

    def compute(self) -> None:
        """Compute the accuracies of the pending batches."""
        pending, self._pending = self._pending, []
        for _, alike in itertools.groupby(pending, lambda one: (one[1].shape, one[2].shape, one[2].dtype)):
            values, scores, labels = zip(*alike, strict=True)
            right = is_right(torch.cat(scores), torch.cat(labels)).view(len(scores), -1)
            for named, accuracy in zip(values, right.mean(1, dtype=torch.float32).tolist(), strict=True):
                named["accuracy"] = accuracy


def inputs_of(batch: Any) -> Tensor:
    """Return the inputs of a batch: the batch itself, its first field, or the field of a dict with a known name.

    Raises:
        InvalidOption: if the inputs are not a tensor.
    """
    inputs = batch
    if isinstance(batch, tuple | list) and batch:
        inputs = batch[0]
    elif isinstance(batch, Mapping) and batch:
        inputs = next(iter(batch.values())) if len(batch) == 1 else named_pair(batch)[0]
    if isinstance(inputs, Tensor):
        return inputs
    found = f"the inputs of a batch are {kind_of(inputs)}"
    next_step = "Put the tensor of inputs first in each batch, or call the model in a loop over the Loader"
    if isinstance(batch, Mapping) and batch:
        found = f"the batch is {kind_of(batch)} of {', '.join(map(repr, batch))}"
        next_step = "Name the tensor of inputs 'X' or 'image'"
    raise InvalidOption(cannot("predict", found, "a tensor of inputs", next_step))
