"""`tests/benchmarks/bench_gpu.py` runs to its end on the CPU, and reports a missing GPU."""

from __future__ import annotations

import importlib
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    threads = torch.get_num_threads()
    yield importlib.import_module("bench_gpu")
    torch.set_num_threads(threads)


@pytest.mark.full
def test_a_quick_run_measures_every_part_and_writes_json(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Start no processes, each of which takes seconds; another test covers one process.
    monkeypatch.setattr(script, "rate_of_processes", lambda _, count: 100.0 * count)
    path = tmp_path / "gpu.json"
    words = ["bench_gpu.py", "--device", "cpu", "--quick", "--rounds", "1", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", words)
    script.main()
    shown, written = capsys.readouterr().out, json.loads(path.read_text())
    assert all(f"({part}: " in shown for part in script.PARTS)
    for name in (
        "keep='ram'",
        "keep='gpu'",
        "RandomResizedCrop, MixUp",
        "decode='gpu'",
        "not fused",
        "one GPU per GPU",
        "growth of",
    ):
        assert any(name in what for what, *_ in written["needed"])
    assert all(len(row) == 4 for row in written["needed"])


@pytest.mark.full
def test_a_process_of_the_benchmark_trains_on_its_share(script: ModuleType, tmp_path: Path) -> None:
    bench = script.GpuBench(tmp_path, Namespace(device="cpu", quick=True, rounds=1))
    assert bench.photos
    assert script.rate_of_processes(bench, 1) > 0


def test_a_part_that_fails_does_not_stop_the_others(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(bench: object) -> None:
        raise ValueError("planned")

    monkeypatch.setattr(script, "PARTS", {"one": fail, "two": lambda bench: bench.need("two", 1.0, 1.0, "{:.0f}")})
    path = tmp_path / "gpu.json"
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py", "--device", "cpu", "--quick", "--json", str(path)])
    with pytest.raises(SystemExit, match="one: ValueError: planned"):
        script.main()
    written = json.loads(path.read_text())
    assert written["needed"] == [["two", "1", "at least 1", "holds"]]
    assert written["failed"] == ["one: ValueError: planned"]


def test_without_a_gpu_the_benchmark_ends_with_one_sentence(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="PyTorch finds no usable GPU, so there is nothing to measure"):
        script.main()
