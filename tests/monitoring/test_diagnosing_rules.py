"""The rules of the doctor: each gives advice in its own case, but not in similar cases or without data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from doctor_cases import (
    ASLEEP,
    COMPUTES,
    DECODED,
    DRIVE,
    FOREIGN,
    FULL,
    GATHERED,
    GIB,
    HELD_BY_THREAD,
    LOGS,
    ON_GPU,
    PROCESSES,
    QUIET,
    SLEEPS,
    check_advice,
    epochs_of,
    made,
    part,
    steps_of,
    stretches_of,
    with_gpu,
    with_threads,
)

from colabkit.foundation import BusyProcess, LoaderFacts, LoopSpot, MetersSnapshot, Place, StepTimes
from colabkit.monitoring.diagnosing import machine_rules
from colabkit.monitoring.diagnosing.rules import RULES
from colabkit.monitoring.diagnosing.verdict import judge
from colabkit.notebook.options import LineWords
from colabkit.notebook.verbs import VERBS

Given = dict[str, Any]
Rows = tuple[Callable[..., Any], Given, dict[str, Given]]

READS = (part("read", 0.05, size=20_000), part("decode", 0.001, 0.001, 0.02, 150_000))
DECODES = (part("read", 0.0001, size=20_000), part("decode", 0.009, 0.005, 0, 150_000))
SMALL = (part("read", 0.004, size=20_000), part("decode", 0.004, 0.004, 0, 150_000))
SAMPLES = (part("samples", 0.012, 0.011),)
AUGMENTS = (part("gather", 0.0001, size=3000), part("augment", 0.2, 0.2, 0, 12_000))
SENT = (part("gather", 0.0001, size=3000), part("transfer", 1e-5, size=3000))
ROWS = (part("gather", 0.004, size=150_000),)
HDF5 = (part("read", 0.004), part("gather", 0.001, size=8))
STARVED = {"wait": 0.2, "compute": 0.1}
FOREIGN_HDF5 = replace(GATHERED, path="/data/x.h5", is_remote=False, tier="source")
ON_DISK = replace(GATHERED, path="/data/pack.h5", is_remote=False, tier="disk", sample_bytes=150_000.0)
# As many bytes are read from disk as the samples contain.
READING = replace(QUIET, storage_read_bytes_per_s=32e6, io_stall_rate=0.6)
EPOCHS = {"passes": 4, "first_s": 12.0, "wait_s": 12.0}
LATE = [step._replace(wait_s=4.0) if number % 200 == 50 else step for number, step in enumerate(steps_of(count=400))]
SLOWER = [step._replace(wait_s=0.01 + 0.02 * number) for number, step in enumerate(steps_of())]
# All starts of `EPOCHS` belong to this pass.
FIRST_PASS = MetersSnapshot(compute_s=5.0, wait_s=12.0, first_s=12.0, passes=1, steps=50)
UNKNOWN_HOST = replace(QUIET, storage_read_bytes_per_s=None, cpu_rate=None, own_cpu_rate=None, busiest_core_rate=None)


def shortened(step: StepTimes, times: int) -> StepTimes:
    return step._replace(**{name: getattr(step, name) / times for name in ("wait_s", "copy_s", "compute_s", "other_s")})


PAUSED = [step._replace(other_s=2.0) if number % 20 == 10 else step for number, step in enumerate(steps_of(count=400))]
RARELY_PAUSED = [
    step._replace(compute_s=5.0) if number % 100 == 50 else step for number, step in enumerate(steps_of(count=400))
]
SLEEPING = {"cpu": 0.02, "host": with_threads(ASLEEP)}
LOGGING = {"cpu": 0.1, "host": with_threads(spots=(LOGS, COMPUTES))}

WAITS_FOR_DATA = LoopSpot("train.py:10", "for images, labels in loader:", "data", 1000, 900)
READS_VALUES = LoopSpot("train.py:40", "correct += output.argmax().item() == target", "compute", 30, 0)

FALLING, RISING = [1.0, 0.6, 0.4, 0.2, 0.1, 0.05], [1.0, 0.8, 0.9, 1.1, 1.3, 1.7]
HALVED = [0.5**epoch for epoch in range(12)]

TABLE: dict[str, tuple[Given, dict[str, Given]]] = {
    "remote_files": (
        {**STARVED, "facts": DRIVE, "parts": READS},
        {
            "near": {"facts": replace(DRIVE, is_remote=False)},
            "far or near is not known": {"facts": replace(DRIVE, is_remote=None)},
            "not waited for": {"wait": 0.001},
            "decoding takes longer": {"parts": DECODES},
            "nothing was timed": {"parts": ()},
        },
    ),
    "remote_files_to_pack": (
        {**STARVED, "facts": DRIVE, "parts": READS},
        {
            "near": {"facts": replace(DRIVE, is_remote=False)},
            "far or near is not known": {"facts": replace(DRIVE, is_remote=None)},
            "packed": {"facts": replace(DRIVE, encoding="raw")},
            "a pack of files": {"facts": replace(DRIVE, path="/content/drive/MyDrive/birds.h5", files=None)},
            "a pack of any name": {"facts": replace(DRIVE, files=None, split="train")},
            "one file": {"facts": replace(DRIVE, files=1)},
            "what it holds is not known": {"facts": replace(DRIVE, encoding=None)},
            "not waited for": {"wait": 0.001},
        },
    ),
    "small_files": (
        {**STARVED, "facts": DECODED, "parts": SMALL},
        {
            "far": {"facts": DRIVE},
            "large": {"parts": (part("read", 0.004, size=1 << 20), SMALL[1])},
            "read quickly": {"parts": DECODES},
            "no files": {"facts": replace(DECODED, files=None)},
            "nothing was timed": {"parts": ()},
            "not waited for": {"wait": 0.001},
        },
    ),
    "slow_disk": (
        {**STARVED, "facts": ON_DISK, "parts": ROWS, "host": READING},
        {
            "far": {"facts": replace(ON_DISK, is_remote=True)},
            "the CPU is full": {"host": replace(FULL, storage_read_bytes_per_s=32e6, io_stall_rate=0.6)},
            "read from RAM": {"host": replace(READING, storage_read_bytes_per_s=0.0)},
            "reads are not counted": {"host": replace(READING, storage_read_bytes_per_s=None)},
            "nobody waits for storage": {"host": replace(READING, io_stall_rate=0.0)},
            "sizes are not known": {"facts": replace(ON_DISK, sample_bytes=None)},
            "nothing is seen of the machine": {"host": None},
            "not waited for": {"wait": 0.001},
        },
    ),
    "slow_decoding": (
        {**STARVED, "facts": DECODED, "parts": DECODES, "host": FULL},
        {
            "reading takes longer": {"facts": DRIVE, "parts": READS},
            "rows": {"facts": GATHERED, "parts": ROWS},
            "nothing was timed": {"parts": ()},
            "not waited for": {"wait": 0.001, "host": QUIET},
        },
    ),
    "slow_transform": (
        {**STARVED, "facts": PROCESSES, "parts": SAMPLES},
        {
            "decoding takes longer": {"facts": DECODED, "parts": DECODES},
            "its workers wait for a far disk": {
                "facts": replace(PROCESSES, path="/content/drive/x", is_remote=True),
                "parts": (part("samples", 0.012, 0.001),),
            },
            "another loader": {"facts": FOREIGN, "parts": ()},
            "not waited for": {"wait": 0.001},
        },
    ),
    "slow_foreign": (
        {**STARVED, "facts": FOREIGN},
        {
            "ours": {"facts": DECODED},
            "far": {"facts": replace(FOREIGN, path="/content/drive/x", is_remote=True)},
            "not waited for": {"wait": 0.001},
        },
    ),
    "more_workers": (
        {**STARVED, "facts": replace(DECODED, workers=1), "parts": DECODES},
        {
            "as many as CPUs": {"facts": replace(DECODED, workers=4)},
            "as many processes as CPUs that compute": {
                "facts": replace(PROCESSES, workers=4),
                "parts": (part("samples", 0.012, 0.011),),
            },
            "how many is not known": {"facts": replace(DECODED, workers=None)},
            "the CPU is full": {"host": FULL},
            "the CPU is not known": {"host": UNKNOWN_HOST},
            "far": {"facts": replace(DRIVE, workers=1)},
            "a stream, of which each worker yields all samples": {"facts": replace(FOREIGN, is_stream=True)},
            "rows": {"facts": GATHERED, "parts": ROWS},
            "one thread transforms what they make": {
                "facts": replace(PROCESSES, workers=1),
                "parts": (part("samples", 0.001, 0.001), part("augment", 0.002)),
            },
            "not waited for": {"wait": 0.001},
        },
    ),
    "held_by_python": (
        {**STARVED, "facts": DECODED, "parts": DECODES, "host": replace(QUIET, busiest_core_rate=0.99)},
        {
            "several cores work": {"host": replace(FULL, cpu_rate=0.8)},
            "two of many cores work": {"host": replace(QUIET, cpus=16.0, cpu_rate=0.13, busiest_core_rate=0.99)},
            "no core is busy": {"host": QUIET},
            "cores are not known": {"host": UNKNOWN_HOST},
            "one core": {"host": replace(QUIET, cpus=1.0, busiest_core_rate=0.99)},
            "one worker": {"facts": replace(DECODED, workers=1)},
            "processes": {"facts": PROCESSES, "parts": SAMPLES},
            "torch's processes": {"facts": FOREIGN, "parts": ()},
            "not waited for": {"wait": 0.001},
        },
    ),
    "too_many_workers": (
        {**STARVED, "facts": replace(FOREIGN, workers=16), "host": FULL},
        {
            "twice as many as CPUs": {"facts": replace(FOREIGN, workers=8)},
            "how many is not known": {"facts": replace(FOREIGN, workers=None)},
            "CPUs are idle": {"host": QUIET},
            "the CPU is not known": {"host": UNKNOWN_HOST},
            "far": {"facts": replace(FOREIGN, workers=16, path="/content/drive/x", is_remote=True)},
        },
    ),
    "slow_start": (
        {"facts": replace(FOREIGN, keeps_workers=False), **EPOCHS},
        {
            "workers are kept": {"facts": FOREIGN},
            "whether they are kept is not known": {"facts": replace(FOREIGN, keeps_workers=None)},
            "threads": {"facts": DECODED},
            "one epoch": {"passes": 1},
            "quick": {"first_s": 0.2},
            "a few steps long": {"passes": 40},
            "only in the first epoch": {"first_pass": FIRST_PASS, "passes": 2},
            "the second epoch has just begun": {
                "first_pass": replace(FIRST_PASS, compute_s=400.0, first_s=0.0),
                "passes": 2,
                "compute_s": 400.1,
            },
            "after a look at one batch": {"first_pass": replace(FIRST_PASS, steps=0, first_s=0.0), "passes": 2},
        },
    ),
    "bursts": (
        {"steps": LATE},
        {
            "all alike": {"steps": steps_of()},
            "always late": {"steps": steps_of(wait=0.2)},
            "far": {"facts": DRIVE},
            "on the GPU": {"facts": replace(ON_GPU, kind="device")},
            "a stream without workers": {"facts": replace(FOREIGN, workers=0, is_stream=True)},
        },
    ),
    "chunks_do_not_fit": (
        {**STARVED, "facts": FOREIGN_HDF5, "parts": HDF5},
        {
            "in RAM": {"facts": replace(FOREIGN_HDF5, tier="ram")},
            "files": {"facts": DECODED},
            "where it lives is not known": {"facts": replace(FOREIGN_HDF5, tier=None)},
            "read quickly": {"parts": (part("read", 0.0001), part("gather", 0.004, size=8))},
            "a pack of which no more is read than used": {"facts": ON_DISK, "parts": ROWS, "host": READING},
            "a pack, and reads are not counted": {"facts": ON_DISK, "parts": ROWS, "host": UNKNOWN_HOST},
            "not waited for": {"wait": 0.001},
        },
    ),
    "cache_too_small": (
        {**STARVED, "facts": ON_DISK, "parts": ROWS, "host": READING, "passes": 2},
        {
            "the first epoch": {"passes": 1},
            "read from RAM": {"host": QUIET},
            "reads are not counted": {"host": UNKNOWN_HOST},
            "RAM is not known": {"host": replace(READING, ram_total_bytes=0)},
            "sizes are not known": {"facts": replace(ON_DISK, sample_bytes=None)},
            "samples are not counted": {"facts": replace(ON_DISK, samples=None)},
            "far": {"facts": replace(ON_DISK, is_remote=True)},
            "made or in memory": {"facts": replace(ON_DISK, path=None)},
            "not waited for": {"wait": 0.001},
        },
    ),
    "still_packing": (
        {**STARVED, "facts": replace(GATHERED, is_arriving=True), "parts": (part("read", 0.05),)},
        {
            "a complete pack": {"facts": GATHERED},
            "not waited for": {"parts": ROWS},
        },
    ),
    "throttled": (
        {"steps": SLOWER, "facts": DRIVE, "parts": READS},
        {
            "as fast as at first": {"steps": steps_of(wait=0.2)},
            "near": {"facts": DECODED},
            "far or near is not known": {"facts": replace(DRIVE, is_remote=None)},
        },
    ),
    "pageable_copies": (
        {"facts": replace(FOREIGN, device="cuda:0", is_pinned=False)},
        {
            "pinned": {"facts": replace(FOREIGN, device="cuda:0", is_pinned=True)},
            "pinned or not is not known": {"facts": replace(FOREIGN, device="cuda:0", is_pinned=None)},
            "on the CPU": {"facts": replace(FOREIGN, is_pinned=False)},
            "a Loader": {"facts": replace(ON_GPU, is_pinned=False)},
        },
    ),
    "slow_copies": (
        {"copy": 0.03, "facts": ON_GPU, "parts": SENT},
        {
            "hidden": {"copy": 0.001},
            "not timed": {"parts": ()},
            "fast but not pinned": {
                "facts": replace(ON_GPU, is_pinned=False),
                "parts": (part("transfer", 1e-7, size=3000),),
            },
        },
    ),
    "host_work": ({"other": 0.05}, {"a little": {"other": 0.005}}),
    "busy_thread": (
        {"cpu": 0.02, "host": with_threads(HELD_BY_THREAD)},
        {
            "the step computes": {"cpu": 0.1},
            "the GIL is free": {"host": with_threads(HELD_BY_THREAD, gil_wait_s=1e-5)},
            "how long the GIL takes is not known": {"host": with_threads(HELD_BY_THREAD, gil_wait_s=None)},
            "the thread is idle": {"host": with_threads(HELD_BY_THREAD, busiest_thread_rate=0.1)},
            "a thread of the loader": {"host": with_threads(HELD_BY_THREAD, busiest_thread="colabkit-loader-0")},
            "threads are not known": {"host": QUIET},
        },
    ),
    "blocked_step": (
        SLEEPING,
        {
            "it computes": {"cpu": 0.1},
            "its CPU time is not known": {"cpu": None},
            "threads of another library compute meanwhile": {
                "host": with_threads(ASLEEP, compute_cpus=0.9, spots=(SLEEPS,))
            },
            "it waits within torch": {
                "host": with_threads(ASLEEP, compute_cpus=0.9, spots=(COMPUTES._replace(samples=50, asleep=30),))
            },
            "it has no CPU": {"host": with_threads(ASLEEP, training_held_rate=0.8)},
            "another thread holds the GIL": {"host": with_threads(HELD_BY_THREAD)},
            "a thread of the loader holds the GIL": {
                "host": with_threads(HELD_BY_THREAD, busiest_thread="colabkit-loader-0")
            },
            "it waits for the GPU": {"facts": ON_GPU, "host": with_gpu(with_threads(ASLEEP))},
            "it waits for data": {"wait": 0.2, "compute": 0.02},
        },
    ),
    "code_beside_torch": (
        LOGGING,
        {
            "it uses torch": {"host": with_threads(spots=(COMPUTES,))},
            "a little": {"host": with_threads(spots=(LOGS._replace(samples=2), COMPUTES))},
            "too few samples": {"host": with_threads(spots=(LOGS._replace(samples=1),))},
            "no samples": {"host": with_threads()},
            "threads are not known": {"host": QUIET},
        },
    ),
    "reading_values": (
        {"host": with_threads(spots=(READS_VALUES, COMPUTES))},
        {
            "it computes": {"host": with_threads(spots=(COMPUTES,))},
            "a little": {"host": with_threads(spots=(READS_VALUES._replace(samples=2), COMPUTES))},
            "too few samples": {"host": with_threads(spots=(READS_VALUES._replace(samples=3),))},
            "mostly waiting for data": {"host": with_threads(spots=(READS_VALUES, COMPUTES, WAITS_FOR_DATA))},
            "it waits for the GPU": {"facts": ON_GPU},
            "threads are not known": {"host": QUIET},
        },
    ),
    "too_many_threads": (
        {"host": with_threads(torch_threads=32, held_rate=0.8)},
        {
            "as many as CPUs": {"host": with_threads(torch_threads=2, held_rate=0.8)},
            "they have a CPU": {"host": with_threads(torch_threads=32, held_rate=0.1)},
            "how many is not known": {"host": with_threads(held_rate=0.8)},
            "the step is on a GPU": {"facts": ON_GPU},
            "threads are not known": {"host": QUIET},
        },
    ),
    "lost_cpu": (
        {"host": replace(QUIET, throttled_rate=0.4, steal_rate=0.0)},
        {
            "a little": {"host": replace(QUIET, throttled_rate=0.05, steal_rate=0.05)},
            "not known": {"host": QUIET},
            "the step is on a GPU": {"facts": ON_GPU},
        },
    ),
    "long_pauses": (
        {"steps": PAUSED},
        {
            "all alike": {"steps": steps_of()},
            "one long step": {"steps": PAUSED[:20] + steps_of(count=300)},
            "short pauses": {"steps": [step._replace(other_s=step.other_s / 20) for step in PAUSED]},
            "pauses of the scheduler": {"steps": [shortened(step, 200) for step in PAUSED]},
            "pauses of 150 ms in total": {"steps": [shortened(step, 40) for step in PAUSED[:70]]},
            "checkpoints of train()": {"save_s": 40.0},
            "other programs on the CPUs": {"host": replace(QUIET, cpu_rate=1.0, own_cpu_rate=0.5)},
            "late data": {"steps": LATE},
        },
    ),
    "straggler": (
        {"rank_waits": (0.01, 0.4, 0.02)},
        {
            "a single rank": {"rank_waits": ()},
            "all ranks wait": {"rank_waits": (0.4, 0.4, 0.4)},
            "a little more": {"rank_waits": (0.01, 0.1)},
            "this rank waits, too": {"rank_waits": (0.5, 0.5, 0.02), "wait": 0.1},
        },
    ),
    "slow_checkpoints": (
        {"save_s": 4.0, "other": 0.05},
        {
            "quick": {"save_s": 0.1},
            "none": {"save_s": 0.0},
            "between epochs": {"save_s": 1.1, "save_apart_s": 1.1},
        },
    ),
    "slow_validation": (
        {"validate_s": 20.0},
        {"shorter than training": {"validate_s": 9.0}, "none": {"validate_s": 0.0}},
    ),
    "slower_than_before": (
        {"stretches": stretches_of(0.03, 0.03, 0.05, 0.1)},
        {
            "as fast as ever": {"stretches": stretches_of(0.1, 0.1, 0.1)},
            "a slow start": {"stretches": stretches_of(0.5, 0.1, 0.1)},
            "a little slower": {"stretches": stretches_of(0.07, 0.1)},
            "a fast moment": {"stretches": stretches_of(0.03, seconds=0.1) + stretches_of(0.1, 0.1)},
            "larger batches": {"stretches": stretches_of(0.03, 0.1, samples=16), "samples": 64},
            "a run of seconds": {"stretches": ()},
        },
    ),
    "wrong_device": (
        {"host": with_gpu(utilization_rate=0.0, torch_bytes=None, torch_reserved_bytes=None)},
        {
            "no GPU": {"host": QUIET},
            "batches go there": {"facts": ON_GPU},
            "the model is there": {"host": with_gpu(utilization_rate=0.0)},
            "it works": {"host": with_gpu(torch_bytes=None)},
            "lost": {"host": with_gpu(utilization_rate=0.0, torch_bytes=None, is_lost=True)},
        },
    ),
    "lost_gpu": ({"host": with_gpu(is_lost=True)}, {"no GPU": {"host": QUIET}, "it is there": {"host": with_gpu()}}),
    "others_on_the_cpu": (
        {"host": replace(FULL, own_cpu_rate=0.4)},
        {
            "our own work": {"host": FULL},
            "room for all": {"host": replace(QUIET, cpu_rate=0.7, own_cpu_rate=0.2)},
            "whose work is not known": {"host": replace(FULL, own_cpu_rate=None)},
            "the step is on a GPU": {"facts": ON_GPU},
        },
    ),
    "tiny_batches": (
        {"samples": 4, "compute": 0.002},
        {
            "large": {"samples": 64},
            "slow": {"compute": 0.1},
            "waiting": {"wait": 0.002},
            "samples are not known": {"samples": 0},
            "all samples": {"facts": replace(GATHERED, samples=4)},
            "no time": {"compute": 0.0},
        },
    ),
    "launches": (
        {"facts": ON_GPU, "host": with_gpu(utilization_rate=0.3)},
        {
            "the GPU is busy": {"host": with_gpu()},
            "a run of a moment": {"steps": steps_of(compute=0.01)},
            "how much is not known": {"host": with_gpu(utilization_rate=None)},
            "no GPU is seen": {"host": QUIET},
            "on the CPU": {"facts": GATHERED},
            "waiting": {"wait": 0.1},
            "other work": {"compute": 0.01, "other": 0.1},
        },
    ),
    "no_mixed_precision": (
        {"facts": ON_GPU, "host": with_gpu(), "precision": "fp32"},
        {
            "mixed": {"precision": "fp16"},
            "not known": {"precision": None},
            "no tensor cores": {"host": with_gpu(name="Tesla P100-PCIE-16GB")},
            "a card of a similar name": {"host": with_gpu(name="NVIDIA T400 4GB")},
            "a card without a name": {"host": with_gpu(name=None)},
            "no GPU is seen": {"host": QUIET},
            "on the CPU": {"facts": GATHERED},
        },
    ),
    "room_on_the_gpu": (
        {"facts": ON_GPU, "host": with_gpu(used_bytes=4 * GIB, utilization_rate=0.7)},
        {
            "used": {"host": with_gpu(utilization_rate=0.7)},
            "how much is not known": {"host": with_gpu(used_bytes=None, utilization_rate=0.7)},
            "always busy": {"host": with_gpu(used_bytes=4 * GIB, utilization_rate=0.97)},
            "how busy is not known": {"host": with_gpu(used_bytes=4 * GIB, utilization_rate=None)},
            "starved": {"wait": 0.1},
            "all samples": {"facts": replace(ON_GPU, samples=64)},
            "on the CPU": {"facts": GATHERED},
        },
    ),
    "full_gpu": (
        {"facts": ON_GPU, "host": with_gpu(used_bytes=15 * GIB)},
        {
            "room": {"host": with_gpu()},
            "not known": {"host": with_gpu(used_bytes=None)},
            "on the CPU": {"facts": GATHERED},
        },
    ),
    "slowed_gpu": (
        {"facts": ON_GPU, "host": with_gpu(slowed_by=("power", "heat"))},
        {"at its full speed": {"host": with_gpu()}, "no GPU": {"host": QUIET}},
    ),
    "others_on_the_gpu": (
        {"facts": ON_GPU, "host": with_gpu(torch_bytes=GIB, torch_reserved_bytes=2 * GIB)},
        {
            "our own": {"host": with_gpu()},
            "what torch holds is not known": {"host": with_gpu(torch_bytes=None)},
            "what is used is not known": {"host": with_gpu(torch_bytes=GIB, used_bytes=None)},
            "on the CPU": {"facts": GATHERED},
        },
    ),
    "full_ram": (
        {"host": replace(QUIET, ram_used_bytes=11 * GIB)},
        {"room": {"host": QUIET}, "not known": {"host": replace(QUIET, ram_total_bytes=0)}, "not seen": {"host": None}},
    ),
    "full_shm": (
        {"facts": FOREIGN, "host": replace(QUIET, shm_free_bytes=GIB // 10)},
        {
            "room": {"host": QUIET},
            "not known": {"host": replace(QUIET, shm_free_bytes=None)},
            "no workers": {"facts": replace(FOREIGN, workers=0)},
            "how many is not known": {"facts": replace(FOREIGN, workers=None)},
            "threads": {"facts": DECODED},
        },
    ),
    "full_disk": (
        {"host": replace(QUIET, disk_free_bytes=GIB)},
        {"room": {"host": QUIET}, "not known": {"host": replace(QUIET, disk_free_bytes=None)}},
    ),
    "costly_panel": (
        {"cost_share": 0.02, "compute_s": 60.0},
        {"cheap": {"cost_share": 0.005}, "none": {"cost_share": None}, "a run of seconds": {"compute_s": 5.0}},
    ),
    "not_finite": (
        {"values": {"loss": math.nan, "lr": 0.1}},
        {
            "finite": {"values": {"loss": 1.0, "lr": 0.1}},
            "another value": {"values": {"loss": 1.0, "perplexity": math.inf}},
            "no loss": {"values": {}},
        },
    ),
    "divergence": (
        {"epochs": epochs_of(loss=[1.0, 0.5, 0.2, 0.4, 0.9, 1.6])},
        {
            "it falls": {"epochs": epochs_of(loss=FALLING)},
            "it rose little": {"epochs": epochs_of(loss=[1.0, 0.5, 0.4, 0.45, 0.5, 0.55])},
            "a peak": {"epochs": epochs_of(loss=[1.0, 0.2, 0.5, 1.6, 0.9])},
            "two epochs only": {"epochs": epochs_of(loss=[0.2, 0.6, 1.2])},
            "only the validation loss rises": {"epochs": epochs_of(loss=FALLING, val_loss=RISING)},
            "a negative loss": {"epochs": epochs_of(loss=[-1.0, -0.8, -0.5, -0.2])},
        },
    ),
    "overfitting": (
        {"epochs": epochs_of(loss=FALLING, val_loss=RISING)},
        {
            "it falls": {"epochs": epochs_of(loss=FALLING, val_loss=FALLING)},
            "it rose little": {"epochs": epochs_of(loss=FALLING, val_loss=[1.0, 0.8, 0.81, 0.82, 0.84, 0.9])},
            "two epochs only": {"epochs": epochs_of(loss=FALLING[:4], val_loss=RISING[:4])},
            "a peak": {"epochs": epochs_of(loss=FALLING, val_loss=[*RISING[:-1], 0.82])},
            "training fails too": {"epochs": epochs_of(loss=RISING, val_loss=RISING)},
            "training starts badly": {
                "epochs": epochs_of(loss=[1e17, 7.9, 9.0, 8.4, 7.7], val_loss=[2.3, 7.0, 8.0, 8.5, 9.0])
            },
            "no validation": {"epochs": epochs_of(loss=RISING)},
        },
    ),
    "plateau": (
        {"epochs": epochs_of(loss=[1.0, 0.5] + [0.499] * 10)},
        {
            "fewer epochs": {"epochs": epochs_of(loss=[1.0, 0.5] + [0.499] * 9)},
            "it falls slowly": {"epochs": epochs_of(loss=[0.5 - 0.01 * epoch for epoch in range(14)])},
            "validation falls": {"epochs": epochs_of(loss=[0.5] * 12, val_loss=HALVED)},
            "training falls": {"epochs": epochs_of(val_loss=[0.5] * 12, loss=HALVED)},
        },
    ),
}
ALL = {rule.name: rule for rule in RULES}


def given(name: str, changes: Given | None = None) -> Any:
    return ALL[name](made(**{**TABLE[name][0], **(changes or {})}))


def test_every_rule_gives_well_formed_advice_and_a_valid_call_in_its_own_case() -> None:
    assert set(TABLE) == set(ALL)
    assert len(ALL) == len(RULES)
    for name in TABLE:
        advice = given(name)
        assert advice is not None, name
        assert advice.rule == name
        check_advice(advice)


@pytest.mark.parametrize("name", TABLE)
def test_for_a_call_that_made_the_loader_only_options_of_that_call_are_advised(name: str) -> None:
    case = TABLE[name][0]
    run = made(**{**case, "facts": replace(case.get("facts", GATHERED), settable=("batch_size",))})
    for advice in judge(run).advice:
        assert not advice.call or advice.call.startswith("batch_size="), advice


def test_a_pack_that_was_staged_is_loaded_from_the_folder_of_its_copy() -> None:
    pack = replace(GATHERED, path="/content/drive/MyDrive/birds.h5", is_remote=True)
    advice = given("remote_files", {"facts": pack, "parts": (part("gather", 0.01, size=3000),)})
    assert advice.call == "colabkit.stage('/content/drive/MyDrive/birds.h5', to='local/birds')"
    assert advice.action.endswith("load 'local/birds/birds.h5'")


@pytest.mark.parametrize("name", ["slow_disk", "chunks_do_not_fit", "cache_too_small"])
@pytest.mark.parametrize("shuffle", [False, "block"])
def test_an_order_of_the_users_own_is_not_answered_with_blocks(name: str, shuffle: bool | str) -> None:
    case = TABLE[name][0]
    advice = given(name, {"facts": replace(case["facts"], shuffle=shuffle)})
    assert advice is None or not advice.call.startswith("shuffle=")


@pytest.mark.parametrize("name", ["Colab", "Kaggle"])
def test_on_a_hosted_machine_nobody_is_asked_to_shut_down_other_notebooks(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(machine_rules, "current_place", lambda: Place(name, "kernel"))
    for rule in ("others_on_the_cpu", "others_on_the_gpu"):
        advice = given(rule)
        check_advice(advice)
        assert advice.action.startswith("Stop programs that this notebook started")


def test_a_rule_gives_no_advice_in_similar_cases_or_without_data() -> None:
    for name, (_, neighbours) in TABLE.items():
        for why, changes in neighbours.items():
            assert given(name, changes) is None, f"{name}: {why}"
    for rule in RULES:
        assert rule(made(facts=None, host=None)) is None
        assert rule(made(facts=LoaderFacts("gathered"), host=None)) is None


def test_the_busiest_other_process_is_named() -> None:
    host = replace(FULL, own_cpu_rate=0.4, other_process=BusyProcess("python other.py, PID 4711", 1.9))
    assert "python other.py, PID 4711" in given("others_on_the_cpu", {"host": host}).found


def test_the_line_of_code_that_holds_the_loop_up_is_named() -> None:
    assert "train.py:20 in step" in given("blocked_step").found
    assert "time.sleep(0.02)" in given("blocked_step").check
    assert "train.py:30 in log_images" in given("code_beside_torch").found


def test_without_samples_of_the_stack_a_way_to_get_them_is_given() -> None:
    advice = given("blocked_step", {"host": with_threads(ASLEEP, spots=())})
    check_advice(advice)
    assert advice.action.startswith("Remove the wait from the step")
    assert "with the panel" in advice.action


def test_the_panel_shows_advice_uncut() -> None:
    floats = {"facts": replace(FOREIGN, source="birds", image_height=8, image_width=8, sample_bytes=4 * 192)}
    others = [
        given("slow_foreign", {"facts": replace(FOREIGN, **{name: True})}) for name in ("is_stream", "has_mappings")
    ]
    for advice in (*map(given, TABLE), given("slow_foreign", floats), *others):
        assert len(advice.found) <= 130, advice.found
        assert len(advice.action) <= 130, advice.action


def test_the_speed_of_samples_and_the_fall_of_a_loss_are_stated_exactly() -> None:
    assert given("still_packing", {"parts": (part("read", 5.0),)}).found.endswith("arrived at less than 1 sample/s")
    # The loss of this case falls from 0.5 to 0.499.
    assert given("plateau").found == "the loss has fallen by less than 1% in the last 10 epochs"
    slowed = judge(made(steps=steps_of(compute=0.1), stretches=stretches_of(0.02, 0.1)))
    assert slowed.sentence == "Training is 5.0 times as slow as in its fastest stretch"


def test_a_thread_that_takes_the_only_cpu_is_not_blamed_on_the_gil() -> None:
    """Otherwise, the advice would be to move its work to another process, which needs the same CPU."""
    host = with_threads(HELD_BY_THREAD, gil_wait_s=1e-5, training_held_rate=0.6, held_rate=0.6)
    advice = given("busy_thread", {"host": replace(host, cpus=1.0)})
    check_advice(advice)
    assert "too few CPUs" in advice.found
    assert "process" not in advice.action


def test_without_counters_of_waits_for_a_cpu_a_step_may_also_lack_one() -> None:
    known = given("blocked_step")
    unknown = given("blocked_step", {"host": with_threads(ASLEEP, training_held_rate=None)})
    assert "sleeps or has no CPU" not in known.found
    assert "sleeps or has no CPU" in unknown.found


def test_a_busy_gpu_of_others_does_not_hide_that_the_step_sleeps() -> None:
    host = with_gpu(with_threads(ASLEEP), utilization_rate=0.05, torch_bytes=4_000_000_000)
    other = replace(host.gpus[0], utilization_rate=1.0, torch_bytes=0)
    assert given("blocked_step", {"facts": ON_GPU, "host": replace(host, gpus=(*host.gpus, other))}) is not None
    assert given("blocked_step", {"facts": ON_GPU, "host": with_gpu(host, utilization_rate=None)}) is None


def test_fewer_threads_are_advised_only_if_there_are_more_than_the_quota_allows() -> None:
    throttled = replace(QUIET, throttled_rate=0.4, cpus=2.0)
    for threads, workers, action in ((8, 2, "set_num_threads(2)"), (2, 2, "worker"), (2, 0, "other programs")):
        facts = replace(GATHERED, workers=workers)
        host = with_threads(host=throttled, torch_threads=threads)
        assert action in given("lost_cpu", {"host": host, "facts": facts}).action


def test_on_a_gpu_nobody_is_advised_to_use_a_gpu() -> None:
    for facts, other in ((GATHERED, "a machine with a GPU"), (ON_GPU, "or larger batches")):
        assert (
            other in given("slow_transform", {"facts": replace(facts, transform="Shift()"), "parts": AUGMENTS}).action
        )


def test_no_more_workers_are_advised_than_the_step_needs() -> None:
    """The step takes 0.1 s, and 2 workers take 0.3 s for a batch."""
    host = replace(QUIET, cpus=96.0, cpu_rate=0.03)
    assert (
        given("more_workers", {"facts": replace(FOREIGN, workers=2), "parts": (), "host": host}).call == "num_workers=8"
    )


def test_checkpoints_between_epochs_take_a_share_of_the_steps_and_of_their_own_time() -> None:
    run = made(save_s=10.0, save_apart_s=10.0)
    assert run.save_share == pytest.approx(0.5)
    assert made(save_s=5.0, other=0.05).save_share == pytest.approx(1 / 3)


def test_a_build_of_torch_without_cuda_is_named_instead_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    assert "model.to('cuda')" in given("wrong_device").call
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    advice = given("wrong_device")
    check_advice(advice)
    assert "this build of torch cannot use it" in advice.found
    assert advice.call == ""


def test_a_run_that_has_become_slow_is_judged_by_its_present_steps() -> None:
    steps = steps_of(compute=0.005, count=450) + steps_of(compute=0.1, count=62)[1:]
    found = judge(made(steps=steps, stretches=stretches_of(0.005, 0.1)))
    assert found.step_s == pytest.approx(0.1)
    assert [advice.rule for advice in found.advice] == ["slower_than_before"]


def test_a_run_of_slow_and_fast_phases_is_judged_by_both() -> None:
    steps = steps_of(compute=0.01, count=400) + steps_of(compute=0.05, count=112)[1:]
    phases = stretches_of(0.01, 0.05, 0.01, 0.05)
    assert judge(made(steps=steps, stretches=phases)).step_s == pytest.approx(0.01, rel=0.1)
    assert judge(made(steps=steps, stretches=phases[2:])).step_s == pytest.approx(0.05)
    slow_start = stretches_of(0.05, 0.01, 0.05)
    assert judge(made(steps=steps, stretches=slow_start)).step_s == pytest.approx(0.05)


def test_a_run_that_varies_and_becomes_about_twice_as_slow_is_judged_by_its_present_steps() -> None:
    steps = steps_of(compute=0.1, count=480) + steps_of(compute=0.21, count=30)[1:]
    varying = stretches_of(0.108, 0.098, 0.108, 0.101, 0.108, 0.21)
    assert judge(made(steps=steps, stretches=varying)).step_s == pytest.approx(0.21)


def test_a_run_whose_steps_now_take_a_second_is_judged_by_these() -> None:
    steps = steps_of(compute=0.2, count=500) + steps_of(compute=1.0, count=12)[1:]
    assert judge(made(steps=steps, stretches=stretches_of(0.2, 1.0))).step_s == pytest.approx(1.0)


def test_a_run_with_pauses_is_judged_by_all_its_steps() -> None:
    found = judge(made(steps=RARELY_PAUSED))
    assert (found.verdict, [advice.rule for advice in found.advice]) == ("host", ["long_pauses"])
    assert found.step_s < 0.15


def test_code_that_causes_pauses_is_reported_once() -> None:
    # The pauses take a third of the time.
    logging = with_threads(spots=(LOGS._replace(samples=17), COMPUTES._replace(samples=33)))
    assert [one.rule for one in judge(made(host=logging, cpu=0.1)).advice] == ["code_beside_torch"]
    paused = judge(made(steps=RARELY_PAUSED, host=logging))
    assert (paused.verdict, [one.rule for one in paused.advice]) == ("host", ["long_pauses"])


def test_pauses_of_other_code_do_not_hide_logging() -> None:
    step = StepTimes(0.0, 0.0, 0.1, 0.0, 64, cpu_s=0.1)
    steps = [step._replace(compute_s=2.0) if number % 100 == 50 else step for number in range(400)]
    logging = with_threads(spots=(LOGS._replace(samples=80), COMPUTES._replace(samples=20)))
    assert "code_beside_torch" in [one.rule for one in judge(made(steps=steps, host=logging)).advice]


def test_only_what_a_thread_that_holds_the_gil_can_cause_is_left_out() -> None:
    held = {"cpu": 0.02, "host": with_threads(HELD_BY_THREAD)}
    assert [one.rule for one in judge(made(**held, other=0.02)).advice] == ["busy_thread"]
    rules = [one.rule for one in judge(made(**held, wait=0.3, facts=FOREIGN)).advice]
    assert "slow_foreign" in rules


@pytest.mark.parametrize(("kind", "workers"), [("foreign", 0), ("foreign", None), ("processes", 0)])
def test_without_workers_a_slow_start_of_each_epoch_is_work_of_the_dataset(kind: Any, workers: int | None) -> None:
    facts = replace(FOREIGN, kind=kind, workers=workers, keeps_workers=True, samples=640)
    advice = given("slow_start", {"facts": facts})
    check_advice(advice)
    assert "dataset or sampler" in advice.action
    assert advice.call == ""
    assert advice.found == "the first batch of each epoch takes 3.0 s"


def test_a_slow_start_of_each_epoch_is_a_data_bottleneck_and_costs_its_duration() -> None:
    """Ten seconds of steps and twelve seconds of starts in four epochs."""
    found = judge(made(facts=replace(FOREIGN, keeps_workers=False), **EPOCHS))
    assert (found.verdict, found.sentence) == ("data", "The start of each epoch takes 55% of the time")
    assert [(one.rule, one.saved_s) for one in found.advice] == [("slow_start", pytest.approx(3.0))]
    assert judge(made(facts=replace(FOREIGN, keeps_workers=False), **{**EPOCHS, "first_s": 0.2})).is_good


def test_for_a_stream_no_advice_multiplies_or_packs_its_samples() -> None:
    for workers in (0, 2):
        stream = replace(FOREIGN, workers=workers, is_stream=True)
        (advice,) = judge(made(**STARVED, facts=stream)).advice
        check_advice(advice)
        assert (advice.rule, advice.call) == ("slow_foreign", "")
        assert "get_worker_info" in advice.action


def test_larger_batches_have_at_most_all_samples() -> None:
    assert given("tiny_batches").call == "batch_size=32"
    assert given("tiny_batches", {"facts": replace(GATHERED, samples=20)}).call == "batch_size=20"
    assert given("room_on_the_gpu", {"facts": replace(ON_GPU, samples=100)}).call == "batch_size=100"


def test_the_duration_of_a_validation_is_given_per_epoch() -> None:
    advice = given("slow_validation", {"passes": 4})
    assert advice.found == "validations take 5.0 s per epoch, and the training between them 2.5 s"


def test_packing_samples_that_are_dicts_announces_tuples() -> None:
    assert "tuples" not in given("slow_foreign").action
    assert "yields tuples" in given("slow_foreign", {"facts": replace(FOREIGN, has_mappings=True)}).action


def test_each_dataset_without_a_name_is_packed_to_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("dataset-packed.h5", "dataset-packed-2.h5", "dataset-packed-3.h5"):
        assert f"colabkit.pack(dataset, '{name}')" in given("slow_foreign").call
        Path(name).touch()
    named = given("slow_foreign", {"facts": replace(FOREIGN, source="birds")})
    Path("birds-packed.h5").touch()
    assert "'birds-packed.h5'" in named.call
    assert given("slow_foreign", {"facts": replace(FOREIGN, source="birds")}).call == named.call


@pytest.mark.parametrize(
    ("rule", "verb", "line"),
    [
        ("slow_checkpoints", "train", "with --save-every 10min"),
        ("slow_validation", "train", "less often with --validate-every"),
        ("overfitting", "train", "with --patience, or"),
        ("plateau", "train", "with --patience, or"),
        ("costly_panel", "dashboard", "with --refresh-s"),
    ],
)
def test_advice_names_options_of_the_line(rule: str, verb: str, line: str) -> None:
    words = LineWords(next(one for one in VERBS if one.name == verb), "%")
    action = words.render(given(rule).action)
    assert line in action
    assert "()" not in action
