"""The doctor explains a finished run of Lightning, of Hugging Face's Trainer and of Keras whose loader was watched."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_python
from torch.utils.data import DataLoader, Dataset
from trees import needs

import colabkit
from colabkit.monitoring.diagnosing.diagnosis import Diagnosis

SAMPLES, BATCH, EPOCHS = 60, 2, 3
DEADLINE_S = 280


class SlowSamples(Dataset[Any]):
    """A dataset whose samples take 3 ms each, as dicts, which Trainer requires, or as tuples."""

    def __init__(self, as_dict: bool = False) -> None:
        self.as_dict = as_dict

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        threading.Event().wait(0.003)
        values, label = torch.full((4,), float(index)), index % 3
        return {"values": values, "labels": label} if self.as_dict else (values, label)


def check(found: Diagnosis, steps: int = EPOCHS * SAMPLES // BATCH) -> None:
    """Check that a diagnosis of a run of `steps` steps reports the time in the dataset."""
    # The steps of the first epoch, and the first step of each epoch, may be excluded.
    assert steps // 2 < found.steps <= steps
    assert found.shares.wait > 0.3
    assert found.verdict == "data"
    assert {"more_workers", "slow_foreign"} & {advice.rule for advice in found.advice}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_the_doctor_explains_a_finished_run_of_lightning(tmp_path: Path) -> None:
    needs("lightning", importlib.util.find_spec("lightning") is not None)
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 3)

        def training_step(self, batch: Any, number: int) -> Any:
            return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(default_root_dir=tmp_path, max_epochs=EPOCHS, enable_checkpointing=False, **quiet)
    loader = colabkit.watch(DataLoader(SlowSamples(), BATCH))
    trainer.fit(Module(), loader)
    check(colabkit.doctor(loader))
    assert colabkit.doctor().steps == colabkit.doctor(loader).steps


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_the_doctor_explains_a_finished_run_of_hugging_face_trainer(tmp_path: Path) -> None:
    needs("transformers", importlib.util.find_spec("transformers") is not None)
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 3)

        def forward(self, values: Any, labels: Any) -> Any:
            scores = self.layer(values)
            return {"loss": torch.nn.functional.cross_entropy(scores, labels), "logits": scores}

    class WatchedTrainer(Trainer):
        def get_train_dataloader(self) -> Any:
            return watched

    watched = colabkit.watch(DataLoader(SlowSamples(as_dict=True), BATCH))
    options = TrainingArguments(
        str(tmp_path), num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH, report_to=[], disable_tqdm=True,
        save_strategy="no", use_cpu=True, remove_unused_columns=False,
    )  # fmt: skip
    WatchedTrainer(Model(), options, train_dataset=SlowSamples(as_dict=True)).train()
    check(colabkit.doctor(watched))


KERAS = """
import sys
sys.path.insert(0, {tests!r})
import keras
import colabkit
from torch.utils.data import DataLoader
from test_diagnosing_frameworks import BATCH, EPOCHS, SAMPLES, SlowSamples, check

loader = colabkit.watch(DataLoader(SlowSamples(), BATCH))

def batches():
    while True:
        for values, labels in loader:
            yield values.numpy(), labels.numpy()

model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(batches(), epochs=EPOCHS, steps_per_epoch=SAMPLES // BATCH, verbose=0)
check(colabkit.doctor(loader))
"""


@pytest.mark.full
def test_the_doctor_explains_a_finished_run_of_keras() -> None:
    needs("keras", importlib.util.find_spec("keras") is not None)
    root = Path(__file__).parents[1]
    paths = [str(Path(colabkit.__file__).parents[1]), str(root / "doubles")]
    run = warm_python.run(
        [sys.executable, "-c", KERAS.format(tests=str(Path(__file__).parent))],
        env={**os.environ, "KERAS_BACKEND": "torch", "PYTHONPATH": os.pathsep.join(paths)},
        timeout=DEADLINE_S,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
