"""`Loader.as_dataloader()` inside Accelerate, Hugging Face's `Trainer`, Fabric and Lightning."""

from __future__ import annotations

import gc
import importlib.util
import threading
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from trees import needs

from colabkit.errors import InvalidOption
from colabkit.loading import Loader

COUNT = 22
STEPS = 6
ROWS = np.arange(COUNT * 3, dtype=np.float32).reshape(COUNT, 3)


def make_loader(**options: Any) -> Loader:
    return Loader((ROWS, np.arange(COUNT)), 4, shuffle=True, seed=3, **options)


def make_view() -> Any:
    return make_loader().as_dataloader()


def numbers(batches: Any) -> list[list[int]]:
    return [labels.tolist() for _, labels in batches]


@pytest.fixture
def epochs() -> list[list[list[int]]]:
    loader = make_loader()
    return [numbers(loader) for _ in range(3)]


@pytest.fixture
def accelerate() -> Iterator[Any]:
    needs("accelerate", importlib.util.find_spec("accelerate") is not None)
    import accelerate
    from accelerate.state import AcceleratorState

    yield accelerate
    AcceleratorState._reset_state(reset_partial_state=True)


def test_a_dataloader_view_has_the_batches_and_position_of_its_loader(epochs):
    loader = make_loader(transform=lambda rows: rows + 1)
    view = loader.as_dataloader()
    assert isinstance(view, DataLoader)
    assert len(view) == STEPS
    assert len(view.dataset) == COUNT
    batches = list(view)
    assert numbers(batches) == epochs[0]
    assert torch.equal(torch.cat([rows for rows, _ in batches])[:, 0], torch.tensor([*chain(*epochs[0])]) * 3.0 + 1)
    first = next(iter(view))
    assert numbers([first]) == epochs[1][:1]
    assert loader.state_dict()["samples"] == 4

    resumed = make_view()
    resumed.load_state_dict(view.state_dict())
    assert numbers(resumed) == epochs[1][1:]
    assert numbers(resumed) == epochs[2]


def test_an_abandoned_iteration_leaves_no_threads():
    before = threading.active_count()
    batches = iter(make_loader(num_workers=2).as_dataloader())
    next(batches)
    del batches
    gc.collect()
    assert threading.active_count() == before


def test_each_process_gets_its_share_and_frameworks_see_a_distributed_sampler():
    views = [make_loader(rank=rank, world_size=2).as_dataloader() for rank in range(2)]
    assert all(isinstance(view.sampler, torch.utils.data.DistributedSampler) for view in views)
    assert sorted(number for view in views for number in [*view.sampler]) == [*range(COUNT)]
    assert sorted(number for view in views for batch in numbers(view) for number in batch) == [*range(COUNT)]


def test_a_sampler_of_batches_is_followed():
    order = [[5, 1], [2], [0, 3, 4]]
    assert numbers(Loader((ROWS, np.arange(COUNT)), 4, sampler=order).as_dataloader()) == order


def test_a_replaced_sampler_is_an_error():
    with pytest.raises(InvalidOption, match="Pass the sampler to the Loader"):
        next(iter(DataLoader(make_view().dataset, 4)))


@pytest.mark.full
def test_worker_processes_of_a_rebuilt_loader_are_an_error_not_a_hang():
    view = make_view()
    rebuilt = DataLoader(view.dataset, batch_sampler=view.batch_sampler, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(InvalidOption, match="Set num_workers=0 in the framework"):
        next(iter(rebuilt))


def test_the_missing_attributes_of_a_loader_name_the_fix():
    with pytest.raises(AttributeError, match=r"a Loader has no attribute 'sampler'\. Pass loader.as_dataloader\(\)"):
        make_loader().sampler  # noqa: B018
    with pytest.raises(AttributeError, match=r"learn.get_preds\(dl=loader\)"):
        make_loader().new  # noqa: B018
    assert not hasattr(make_loader(), "no_such_name")


@pytest.mark.full
def test_accelerate_skips_batches_of_any_epoch_without_loading_them(accelerate, epochs):
    asked = []

    class RecordedDataset:
        def __len__(self) -> int:
            return COUNT

        def __getitem__(self, index: int) -> tuple[Any, int]:
            asked.append(index)
            return ROWS[index], index

    view = Loader(RecordedDataset(), 4, shuffle=True, seed=3, num_workers=0).as_dataloader()
    view.set_epoch(1)
    assert numbers(accelerate.skip_first_batches(view, 4)) == epochs[1][4:]
    assert asked == [*chain(*epochs[1][4:])]
    assert numbers(view) == epochs[2]


@pytest.mark.full
def test_accelerate_prepares_and_resumes_it(accelerate, epochs):
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(make_view())
    assert [numbers(prepared) for _ in range(3)] == epochs
    prepared = accelerator.prepare(make_view())
    prepared.set_epoch(1)
    assert numbers(accelerate.skip_first_batches(prepared, 2)) == epochs[1][2:]
    prepared.set_epoch(2)
    assert numbers(prepared) == epochs[2]


@pytest.mark.full
def test_a_loaded_position_wins_over_the_epochs_that_accelerate_counts(accelerate, epochs):
    before = make_loader()
    list(before)
    next(iter(before))
    view = make_view()
    view.load_state_dict(before.state_dict())
    prepared = accelerate.Accelerator(cpu=True).prepare(view)
    assert [numbers(prepared) for _ in range(2)] == [epochs[1][1:], epochs[2]]


@pytest.mark.full
def test_batches_that_accelerate_would_distribute_again_are_an_error(accelerate):
    accelerate.PartialState(cpu=True)
    prepared = accelerate.data_loader.prepare_data_loader(make_view(), num_processes=2, process_index=1)
    with pytest.raises(InvalidOption, match="the Loader distributes the batches itself"):
        list(prepared)


@pytest.mark.full
@pytest.mark.parametrize("is_prepared", [False, True])
def test_the_trainer_of_hugging_face_resumes_inside_an_epoch(tmp_path, accelerate, epochs, is_prepared):
    needs("transformers", importlib.util.find_spec("transformers") is not None)
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, COUNT)
            self.seen: list[list[int]] = []

        def forward(self, rows: Any, labels: Any) -> dict[str, Any]:
            self.seen.append(labels.tolist())
            return {"loss": nn.functional.cross_entropy(self.layer(rows / 100), labels)}

    class LoaderTrainer(Trainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(make_view()) if is_prepared else make_view()

        def _prepare_inputs(self, inputs: Any) -> dict[str, Any]:
            return {"rows": inputs[0], "labels": inputs[1]}

    def train(checkpoint: Any) -> list[list[int]]:
        quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True}
        arguments = TrainingArguments(str(tmp_path), max_steps=16, save_strategy="steps", save_steps=8, **quiet)
        trainer = LoaderTrainer(model=Model(), args=arguments, train_dataset=[0] * COUNT)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer.model.seen

    whole = [*chain(*epochs)][:16]
    assert train(None) == whole
    assert train(str(tmp_path / "checkpoint-8")) == whole[8:]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:::lightning")
def test_fabric_sets_it_up_and_keeps_a_loaded_position(epochs):
    needs("lightning", importlib.util.find_spec("lightning") is not None)
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    ready = fabric.setup_dataloaders(make_view())
    assert [numbers(ready) for _ in range(2)] == epochs[:2]
    before = make_loader()
    list(before)
    next(iter(before))
    view = make_view()
    view.load_state_dict(before.state_dict())
    ready = fabric.setup_dataloaders(view)
    assert [numbers(ready) for _ in range(2)] == [epochs[1][1:], epochs[2]]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:::lightning")
def test_lightning_trains_and_predicts_with_it(tmp_path, epochs):
    needs("lightning", importlib.util.find_spec("lightning") is not None)
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, COUNT)
            self.seen: list[list[int]] = []

        def training_step(self, batch: Any, number: int) -> Any:
            self.seen.append(batch[1].tolist())
            return nn.functional.cross_entropy(self.layer(batch[0] / 100), batch[1])

        def predict_step(self, batch: Any, number: int) -> list[int]:
            return batch[1].tolist()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(default_root_dir=tmp_path, max_epochs=2, enable_checkpointing=False, **quiet)
    module = Module()
    trainer.fit(module, make_view())
    assert module.seen == [*chain(*epochs[:2])]
    assert trainer.predict(module, make_view()) == epochs[0]
