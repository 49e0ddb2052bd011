"""`doctor(...).apply()` measures the gain of advice, and leaves the user's loader, model and files unchanged."""

from __future__ import annotations

import multiprocessing
import pickle
import random
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doctor_cases import made
from torch.utils.data import DataLoader, Dataset, IterableDataset
from trees import make_tree

import colabkit
from colabkit.errors import InvalidOption
from colabkit.foundation import LoaderFacts, Phrase, call
from colabkit.loading import Loader
from colabkit.monitoring.diagnosing.api import doctor, watch
from colabkit.monitoring.diagnosing.diagnosis import Advice, Diagnosis, set_subject
from colabkit.monitoring.diagnosing.remedies import options, packing
from colabkit.monitoring.diagnosing.trial import LoaderOnTrial
from colabkit.monitoring.diagnosing.verdict import judge

BRIEF = 0.12
FACTS = LoaderFacts("foreign", samples=64, batch_size=4, encoding="python", sample_bytes=192.0)


class DelayedDataset(Dataset[Any]):
    """A dataset that waits for each sample, as for a slow drive."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        threading.Event().wait(0.003)
        return torch.rand(3, 4, 4), index % 2


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.zeros(64, 3))


def tensor_of(image: Any) -> torch.Tensor:
    """Convert an image as torchvision's `ToTensor` does, to 8 x 8 pixels."""
    return torch.from_numpy(np.asarray(image.resize((8, 8)), np.float32) / 255).permute(2, 0, 1)


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def diagnosis_of(loader: Any, *advice: Advice, is_alone: bool = False, compute: float = 0.001) -> Diagnosis:
    """Return a diagnosis with this advice."""
    run = made(facts=FACTS, wait=0.004, compute=compute, samples=4)
    return set_subject(replace(judge(run), advice=advice), LoaderOnTrial(loader, run, is_alone))


def advice_of(text: str = "", **known: Any) -> Advice:
    return Advice("slow", "Do it", text, rule="test", **known)


PACK = advice_of(
    packing(made(facts=FACTS, samples=4)), samples_per_s=8000.0, low_samples_per_s=900.0, high_samples_per_s=1e5
)


def test_packing_some_samples_measures_the_gain_beside_the_prediction(temporary_folder: Path) -> None:
    loader = Loader(DelayedDataset(), 4, num_workers=0)
    before = loader.state_dict(), loader.meters.snapshot()
    found = diagnosis_of(loader, PACK)
    trial = found.apply(seconds=BRIEF)
    assert trial.gain > 1
    assert trial.is_good == (trial.low_gain > 1)
    assert (trial.step, trial.rounds) == ("imitated", 5)
    assert 16 <= (trial.packed_samples or 0) <= 64
    assert trial.predicted_gain == pytest.approx(8000.0 / found.samples_per_s)
    assert trial.is_as_predicted == (900.0 <= trial.gain * found.samples_per_s <= 1e5)
    assert "times as fast in 5 rounds, predicted" in repr(trial)
    assert f"{trial.packed_samples} packed samples" in trial.text_table()
    assert (loader.state_dict(), loader.meters.snapshot()) == before
    assert [*temporary_folder.iterdir()] == []


def test_other_options_are_tried_on_a_copy_that_leaves_the_generators_unchanged() -> None:
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(DelayedDataset(), 4, shuffle=True, generator=generator)
    states = [generator.get_state(), torch.get_rng_state()]
    python, numpy = random.getstate(), np.random.get_state()[1]
    trial = diagnosis_of(loader, advice_of(options(num_workers=2))).apply(seconds=BRIEF)
    assert trial.new_samples_per_s > 0
    assert (trial.predicted_gain, trial.is_as_predicted, trial.packed_samples) == (None, None, None)
    assert all(map(torch.equal, states, [generator.get_state(), torch.get_rng_state()]))
    assert random.getstate() == python
    assert np.array_equal(np.random.get_state()[1], numpy)  # type: ignore[arg-type]
    assert loader.num_workers == 0


def test_the_given_step_is_used_and_its_model_restored() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2))
    step = colabkit.supervised_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = model[1].weight.detach().clone()
    trial = diagnosis_of(DataLoader(DelayedDataset(), 4), PACK).apply(step=step, seconds=BRIEF)
    assert trial.step == "given"
    assert torch.equal(model[1].weight, before)


def test_packed_files_reach_a_step_that_computes_with_floats(tmp_path: Path) -> None:
    folder = pytest.importorskip("torchvision.datasets").ImageFolder(make_tree(tmp_path / "tree", 16), tensor_of)
    loader = DataLoader(folder, 4, shuffle=True)
    size = {"image_height": 8, "image_width": 8, "sample_bytes": 12 * 64 + 8.0}
    facts = replace(FACTS, source=str(tmp_path / "tree"), samples=len(folder), **size)
    seen: set[torch.dtype] = set()
    trial = diagnosis_of(loader, advice_of(packing(made(facts=facts, samples=4)))).apply(
        step=lambda batch: seen.add(batch[0].dtype), state={}, seconds=BRIEF
    )
    assert trial.packed_samples
    assert seen == {torch.float32}


def test_an_error_leaves_no_workers_even_if_its_traceback_is_kept() -> None:
    def step(_: Any) -> None:
        raise ValueError("the step fails")

    found = diagnosis_of(DataLoader(DelayedDataset(), 4), advice_of(options(num_workers=2)))
    with pytest.raises(ValueError, match="the step fails") as failure:
        found.apply(step=step, state={}, seconds=BRIEF)
    assert failure.traceback
    assert multiprocessing.active_children() == []


def test_a_loader_that_was_measured_alone_is_tried_alone() -> None:
    trial = diagnosis_of(Loader(DelayedDataset(), 4, num_workers=0), PACK, is_alone=True).apply(seconds=BRIEF)
    assert trial.step == "none"


def test_the_latest_loop_is_not_that_of_the_trial() -> None:
    loader = watch(DataLoader(DelayedDataset(), 4))
    for _ in loader:
        pass
    diagnosis_of(loader.watched, PACK).apply(seconds=BRIEF)
    assert doctor().steps == doctor(loader).steps


def test_advice_that_cannot_be_tried_is_listed_with_the_reason() -> None:
    trial = diagnosis_of(Loader(DelayedDataset(), 4, num_workers=0), advice_of(), PACK).apply(seconds=BRIEF)
    assert trial.advice == PACK
    assert repr(trial).endswith("Not tried: Do it, since it changes your code, or the machine")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", r"it changes your code, or the machine\. Follow it, train for some steps"),
        ("model = torch.compile(model)", "it changes your code"),
        (options(prefetch_factor=8), r"its effect shows only over whole epochs\. Use it, train for two epochs"),
        (options(batch_size=8), r"a different batch size also changes the results\. Compare colabkit\.headspace"),
        (options(amp="auto"), "it changes the step or the results"),
        (Phrase(call("stage", "/data", to="local")), r"it copies all your files\. Run it, make a loader"),
        (options(refresh_s=30), "it changes the step or the results"),
    ],
)
def test_other_advice_raises_an_error_that_says_how_to_try_it(text: str, reason: str) -> None:
    with pytest.raises(InvalidOption, match=rf"Cannot try the advice: 'Do it' cannot be tried .*, since {reason}"):
        diagnosis_of(DataLoader(DelayedDataset(), 4), advice_of(text)).apply(seconds=BRIEF)


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(Stream(), 4), "its dataset is a stream"),
        (DataLoader(DelayedDataset(), batch_sampler=[[0, 1], [2, 3]]), "its batches are chosen by your own code"),
        ([torch.zeros(4, 3)], "only a Loader or a DataLoader can be made again"),
    ],
)
def test_a_loader_that_cannot_be_made_again_is_an_error(loader: Any, reason: str) -> None:
    with pytest.raises(InvalidOption, match=reason):
        diagnosis_of(loader, advice_of(options(num_workers=2))).apply(seconds=BRIEF)


def test_a_diagnosis_without_loader_or_advice_is_an_error() -> None:
    with pytest.raises(InvalidOption, match=r"not of a loader\. Pass the loader .*: colabkit\.doctor\(loader\)"):
        judge(made(facts=FACTS)).apply()
    with pytest.raises(InvalidOption, match=r"the diagnosis contains none\. Diagnose again"):
        diagnosis_of(DataLoader(DelayedDataset(), 4)).apply()


def test_a_pickled_diagnosis_has_no_loader() -> None:
    found = diagnosis_of(DataLoader(DelayedDataset(), 4), PACK)
    copied = pickle.loads(pickle.dumps(found))
    assert copied == found
    with pytest.raises(InvalidOption, match="not of a loader"):
        copied.apply()
