"""A Keras `PyDataset` over a `Loader`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn.functional import one_hot

from colabkit.foundation import InvalidOption, cannot, check_one_of, import_optional, kind_of, option
from colabkit.loading.engine.batches import map_tensors
from colabkit.loading.engine.columns import is_channels_last

_ACT = "return batches for Keras"


def keras_batches(
    loader: Any,
    left: Callable[[], int],
    data_format: str,
    label_mode: str,
    image_place: int | None,
    label_place: int | None,
) -> Any:
    """Return the `PyDataset` of `Loader.as_keras()`.

    Args:
        left: function that returns the number of batches in the loader's next iteration.
        image_place: index in a batch of the field with images, `[B, C, H, W]`; None if there are none.
        label_place: index in a batch of the field with labels; None if there is none.

    Raises:
        InvalidOption: if an option is invalid, or there are no class labels for one-hot labels.
        MissingPackage: if Keras is not installed.
    """
    check_one_of(_ACT, "data_format", data_format, ("channels_last", "channels_first"))
    check_one_of(_ACT, "label_mode", label_mode, ("int", "categorical"))
    classes = len(getattr(loader.dataset, "classes", None) or ())
    if label_mode == "categorical" and not classes:
        found = "the dataset has no class names"
        next_step = (
            "Use ",
            option("label_mode", "int"),
            ", or make the labels one-hot with keras.utils.to_categorical",
        )
        raise InvalidOption(cannot(_ACT, found, "classes for one-hot labels", next_step))
    keras = import_optional("keras", _ACT, "for as_keras()")
    is_on_torch = keras.backend.backend() == "torch"
    is_moved = data_format == "channels_last"

    def converted(batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return dict(zip(batch, convert_fields([*batch.values()]), strict=True))
        return tuple(convert_fields([*batch] if isinstance(batch, tuple | list) else [batch]))

    def convert_fields(values: list[Any]) -> list[Any]:
        if is_moved and image_place is not None:
            images = values[image_place]
            if isinstance(images, Tensor) and images.ndim == 4 and not is_channels_last(images.shape[1:]):
                values[image_place] = images.permute(0, 2, 3, 1)
        if label_mode == "categorical" and label_place is not None and label_place < len(values):
            values[label_place] = _one_hot(values[label_place], classes)
        return values if is_on_torch else [map_tensors(value, _to_numpy) for value in values]

    return _dataset(keras.utils.PyDataset, loader, left, converted)


def _one_hot(labels: Any, classes: int) -> Any:
    is_tensor = isinstance(labels, Tensor)
    # MixUp and CutMix return class probabilities.
    if is_tensor and labels.is_floating_point() and labels.ndim == 2:
        return labels
    if not is_tensor or labels.is_floating_point() or labels.ndim != 1:
        found = (
            f"the labels have dtype {labels.dtype} and shape {[*labels.shape]}"
            if is_tensor
            else f"the labels are {kind_of(labels)}"
        )
        expected = "one class number per sample for one-hot labels"
        raise InvalidOption(cannot(_ACT, found, expected, ("Use ", option("label_mode", "int"))))
    return one_hot(labels.long(), classes).float()


def _to_numpy(tensor: Tensor) -> Any:
    return tensor.cpu().numpy()


def _dataset(base: Any, loader: Any, left: Callable[[], int], converted: Callable[[Any], Any]) -> Any:
    """Return an instance of a subclass of `PyDataset`, which can be defined only if Keras is installed."""

    class LoaderPyDataset(base):  # type: ignore[misc]
        """The batches in the loader's order; Keras's shuffling of batch numbers has no effect."""

        def __init__(self) -> None:
            super().__init__()
            self._coming: Any = None
            self._epoch = 0
            self._start: dict[str, Any] = {}
            self._is_beginning = False

        def __len__(self) -> int:
            return len(loader)

        @property
        def num_batches(self) -> int:
            # Keras reads this before each pass, never during one. A pass that takes only some batches, for example to
            # build the model, must not consume them, so the loader returns to the start of that pass. Only
            # `on_epoch_end` shows that the rest of a resumed epoch was trained on; without it, even a complete pass is
            # undone.
            if self._coming is not None:
                self._end()
            elif not self._start.get("samples"):
                self._start = {}
            if self._start:
                loader.load_state_dict(self._start)
                self._start = {}
            # Keras applies the number that it reads before `on_epoch_begin` to all passes, and the number that it reads
            # afterwards only to this pass. A resumed epoch therefore ends at its last batch, not in the next epoch.
            return left() if self._is_beginning else len(loader)

        def on_epoch_begin(self) -> None:
            self._is_beginning = True

        def on_epoch_end(self) -> None:
            self._is_beginning = False
            if self._coming is None:
                self._start = {}

        def __getitem__(self, index: int) -> Any:
            self._is_beginning = False
            if self._coming is None:
                self._begin()
            batch = next(self._coming, None)
            if batch is None:
                # The epoch had fewer batches, because bad samples were skipped. Keras needs the announced number of
                # batches, so begin the next epoch.
                self._start = {}
                self._begin()
                batch = next(self._coming)
            if loader.received[0] != self._epoch:
                self._end()
            return converted(batch)

        def _begin(self) -> None:
            self._epoch = loader.next_epoch
            loader.set_epoch(self._epoch)
            self._start = self._start or loader.state_dict()
            self._coming = iter(loader)

        def _end(self) -> None:
            self._coming.close()
            self._coming = None

    return LoaderPyDataset()
