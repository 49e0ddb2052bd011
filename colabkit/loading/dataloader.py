"""A torch `DataLoader` over a `Loader`, for frameworks that accept or rebuild only a `DataLoader`.

Frameworks rebuild a `DataLoader` from its dataset, its sampler and its `collate_fn`, for example to skip the first
batches. These parts therefore contain everything needed: the sampler plans batches, and the dataset returns a planned
batch from a running iteration of the `Loader`, which builds the following batches in the background.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

from colabkit.foundation import InvalidOption, cannot
from colabkit.loading.engine.columns import DatasetColumns, as_samples
from colabkit.loading.engine.position import LoaderPosition
from colabkit.loading.keras_batches import keras_batches
from colabkit.packs import LABELS

# Attributes that frameworks read to rebuild a `DataLoader`.
_REBUILT_FROM = ("batch_sampler", "collate_fn", "generator", "num_workers", "sampler", "worker_init_fn")
_NEXT_STEPS = {
    **dict.fromkeys(_REBUILT_FROM, "Pass loader.as_dataloader() to the framework"),
    "new": "Pass the Loader to the call, as in learn.get_preds(dl=loader)",
}
_PLANNED_TOGETHER = 32


class DataLoaderSource:
    """Base class of `Loader` that adds conversions for other frameworks."""

    batch_size: int
    drop_last: bool
    _columns: DatasetColumns | None
    _position: LoaderPosition

    def as_dataloader(self) -> DataLoader[Any]:
        """Return a `torch.utils.data.DataLoader` that yields the same batches, for frameworks that require that class.

        Pass it to `accelerate.skip_first_batches`, to `Accelerator.prepare` in a single process, or to
        `Fabric.setup_dataloaders`, or return it from a Hugging Face `Trainer.get_train_dataloader`. Skipped batches are
        not loaded. The result shares the loader's position, and has `set_epoch`, `state_dict` and `load_state_dict`:
        resume either with `load_state_dict`, or with `set_epoch` and skipping. After `Accelerator.prepare`, only
        skipping resumes inside an epoch: Accelerate requests each batch before it yields the previous one, so the
        position is one batch too far. Pass the loader itself to `prepare` to resume from its position.

        Under `torch.distributed`, the result yields only the batches of this process, as the loader does, and Lightning
        and Fabric do not change this. Accelerate would distribute the batches again, so do not pass the result to
        `Accelerator.prepare` in several processes.

        Example:
            >>> import colabkit
            >>> data = colabkit.prepare("samples:digits", to=None)["train"]
            >>> batches = colabkit.Loader(data, batch_size=64, shuffle=True).as_dataloader()
            >>> len(batches), next(iter(batches))[0].shape
            (29, torch.Size([64, 3, 8, 8]))
        """
        batches = _PlannedDataset(self, self._planner)
        # Without a separate generator, each iteration would draw from the global one.
        generator = torch.Generator()
        sampler = _PlanSampler(_ProcessSampler(batches), self.batch_size, self.drop_last)
        return _LoaderView(batches, batch_sampler=sampler, collate_fn=_unchanged, generator=generator)

    def as_keras(
        self,
        *,
        data_format: Literal["channels_last", "channels_first"] = "channels_last",
        label_mode: Literal["int", "categorical"] = "int",
    ) -> Any:
        """Return a `keras.utils.PyDataset` for `fit`, `evaluate` and `predict` of Keras 3, with any backend.

        Batches are tensors if Keras runs on torch, otherwise NumPy arrays. The loader determines the order;
        `fit(shuffle=...)` has no effect. Each pass of Keras is one epoch. Keras may first take one
        batch to build the model; this counts as a pass only if an epoch has no other batch.

        Args:
            data_format: layout of images: `"channels_last"` is `[B, H, W, C]`, which needs no copy if the loader has
                `channels_last=True` too. The rows of arrays that you passed to the loader keep their layout.
            label_mode: `"int"` for labels as stored, for `sparse_categorical_crossentropy`; `"categorical"` for one-hot
                labels, `float32 [B, classes]`, for `categorical_crossentropy`.

        Raises:
            InvalidOption: if an option is invalid, or the dataset has no classes for one-hot labels; when Keras
                requests a batch, if its labels cannot become one-hot.
            MissingPackage: if Keras is not installed.

        Example:
            >>> import colabkit
            >>> data = colabkit.prepare("samples:digits", to=None)["train"]
            >>> loader = colabkit.Loader(data, batch_size=64, shuffle=True)
            >>> model.fit(loader.as_keras(), epochs=3)
        """
        image_place: int | None = 0
        label_place: int | None = 1
        if (columns := self._columns) is not None:
            names = [*(columns.order or columns.by_name)]
            are_images = columns.stored is None or columns.stored.are_images
            image_place = names.index(next(iter(columns.by_name))) if are_images else None
            label_place = names.index(LABELS) if LABELS in names else None
        return keras_batches(self, self._batches_left, data_format, label_mode, image_place, label_place)

    def _planner(self) -> Any:
        raise NotImplementedError

    def _batches_left(self) -> int:
        return int(self._planner().batches(self._position.next[1]))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name not in _NEXT_STEPS:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            message = cannot(
                "use a Loader as a DataLoader", f"a Loader has no attribute {name!r}", "", _NEXT_STEPS[name]
            )
            raise AttributeError(str(message), name=name, obj=self)


class _LoaderView(DataLoader[Any]):
    """The `DataLoader` that `DataLoaderSource.as_dataloader` returns."""

    dataset: _PlannedDataset

    def __init__(self, dataset: _PlannedDataset, *, batch_sampler: _PlanSampler, **options: Any) -> None:
        super().__init__(dataset, batch_sampler=batch_sampler, **options)
        # Frameworks replace any sampler that is not a `DistributedSampler`; torch forbids plain assignment.
        object.__setattr__(self, "sampler", batch_sampler.order)

    def set_epoch(self, epoch: int) -> None:
        self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.dataset.loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dataset.loader.load_state_dict(state)


class _PlannedBatch(list[int]):
    def __init__(self, indices: list[int], iteration: _LoaderIteration | None, number: int, start: int) -> None:
        super().__init__(indices)
        self.iteration = iteration
        self.number = number
        self.start = start

    def __reduce__(self) -> tuple[object, ...]:
        # Leave out the iteration, which exists only in this process. If pickling failed instead, torch would wait
        # forever for the batch.
        return type(self), (list(self), None, self.number, self.start)


class _PlannedDataset(Dataset[Any]):
    """The loader's dataset, which returns a complete batch for a `_PlannedBatch`.

    Other attributes, such as `classes`, are those of the loader's dataset.
    """

    def __init__(self, loader: Any, planner: Callable[[], Any]) -> None:
        self.loader = loader
        self.planner = planner
        self._samples = as_samples("return a DataLoader", loader.dataset)
        self._coming_epoch = 0
        self._offset = 0

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: Any) -> Any:
        return self._samples[index]

    def __getitems__(self, indices: list[int]) -> Any:
        if isinstance(indices, _PlannedBatch):
            if indices.iteration is not None:
                return indices.iteration.load(indices)
            found = "the framework started worker processes for as_dataloader()"
            next_step = "Set num_workers=0 in the framework, and use num_workers= of the Loader instead"
            raise InvalidOption(cannot("load a batch", found, "", next_step))
        found = "the sampler of as_dataloader() was replaced"
        next_step = "Pass the sampler to the Loader, with sampler="
        raise InvalidOption(cannot("load a batch", found, "batches that the Loader planned", next_step))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name == "_samples":
                # Avoid endless recursion: unpickling looks up attributes before it sets `_samples`.
                raise AttributeError(name)
            return getattr(self._samples, name)

    @property
    def position(self) -> tuple[int, int]:
        """The epoch, and the number of samples in the epoch, at which the next iteration starts."""
        epoch, (received_epoch, samples) = self.loader.next_epoch, self.loader.received
        return epoch, samples if received_epoch == epoch else 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, unless the loader was moved to another position.

        Accelerate calls this before each iteration and counts from 0 in each process, which would undo
        `load_state_dict`. After a move, `epoch` is therefore counted from the loader's epoch.
        """
        if self.loader.next_epoch != self._coming_epoch:
            self._offset = self.loader.next_epoch - epoch
        self._coming_epoch = epoch + self._offset
        self.loader.set_epoch(self._coming_epoch)

    def begin(self, epoch: int) -> None:
        self._coming_epoch = epoch + 1


class _ProcessSampler(DistributedSampler[Any]):
    """The sample indices of this process; the loader has already distributed the samples."""

    def __init__(self, batches: _PlannedDataset) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return int(self.batches.planner().samples(self.batches.position[1]))

    def __iter__(self) -> Iterator[Any]:
        epoch, start = self.batches.position
        for plan in self.batches.planner().plans(epoch, start, _PLANNED_TOGETHER):
            yield from plan.indices.tolist()

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the loader counts epochs itself, and a framework that counts from 0 would undo a resume."""


class _PlanSampler(BatchSampler):
    def __init__(self, order: _ProcessSampler, batch_size: int, drop_last: bool) -> None:
        self.order = order
        self.batch_size = batch_size
        self.drop_last = drop_last

    def __len__(self) -> int:
        return len(self.order.batches.loader)

    def __iter__(self) -> Iterator[list[int]]:
        batches, number = self.order.batches, 0
        epoch, start = batches.position
        with closing(_LoaderIteration(batches, epoch)) as iteration:
            for plan in batches.planner().plans(epoch, start, _PLANNED_TOGETHER):
                for (begin, stop), end in zip(plan.spans, plan.ends, strict=True):
                    yield _PlannedBatch(plan.indices[begin:stop].tolist(), iteration, number, start)
                    number, start = number + 1, end

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; Hugging Face's `Trainer` calls this."""
        self.order.batches.set_epoch(epoch)


class _LoaderIteration:
    def __init__(self, batches: _PlannedDataset, epoch: int) -> None:
        self._batches = batches
        self._epoch = epoch
        self._coming: Any = None
        self._number = 0

    def load(self, batch: _PlannedBatch) -> Any:
        """Return the batch from the loader.

        Raises:
            InvalidOption: if `batch` does not directly follow the previous batch.
        """
        if self._coming is None:
            loader = self._batches.loader
            loader.load_state_dict({**loader.state_dict(), "epoch": self._epoch, "samples": batch.start})
            self._coming, self._number = iter(loader), batch.number
            self._batches.begin(self._epoch)
        if batch.number != self._number:
            found = f"batch {batch.number} was requested after batch {self._number - 1}"
            next_step = "Do not prepare the DataLoader in several processes: the Loader distributes the batches itself"
            raise InvalidOption(cannot("load a batch of as_dataloader()", found, "the batches in order", next_step))
        self._number += 1
        return next(self._coming)

    def close(self) -> None:
        if self._coming is not None:
            self._coming.close()


def _unchanged(batch: Any) -> Any:
    return batch
