"""`train()`: the loop around a loader that survives a disconnect; the usual step, its ceiling, folds and processes."""

from __future__ import annotations

from colabkit.training.ceiling import HeadspaceReport, headspace
from colabkit.training.folds import KFoldReport, k_fold
from colabkit.training.launch import notebook_launch
from colabkit.training.loop import train
from colabkit.training.networks import small_network
from colabkit.training.report import EpochRecord, TrainingInterrupted, TrainReport, Validation
from colabkit.training.steps import SupervisedStep, supervised_step

__all__ = [
    "EpochRecord",
    "HeadspaceReport",
    "KFoldReport",
    "SupervisedStep",
    "TrainReport",
    "TrainingInterrupted",
    "Validation",
    "headspace",
    "k_fold",
    "notebook_launch",
    "small_network",
    "supervised_step",
    "train",
]
