"""`tests/benchmarks/`: one script runs all benchmarks, one makes their tables, and the guard finds slowdowns."""

from __future__ import annotations

import importlib
import json
import re
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import colabkit

BENCHMARKS = Path(__file__).parent / "benchmarks"
SUCCEEDING = """
import json, sys
found = {"machine": "a machine", "needed": [["speed", "2", "at least 1", "holds"]], "failed": [], "comparisons": []}
open(sys.argv[sys.argv.index("--json") + 1], "w").write(json.dumps(found | {"arguments": sys.argv[1:]}))
"""
FAILING = "raise ValueError('planned')"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    threads = torch.get_num_threads()
    yield importlib.import_module
    torch.set_num_threads(threads)


def comparison(**more: Any) -> dict[str, Any]:
    values = {"colabkit": [4.0, 4.4, 4.2, 4.1, 4.3], "plain": [2.0, 2.2, 2.1, 2.05, 2.15], "peer": []}
    found = {"part": "rows", "title": "Rows", "unit": "images/s", "values": values, "base": ["plain"]}
    return found | {"missing": {"peer": "not installed"}, "conditions": "a machine"} | more


def test_the_script_runs_every_benchmark(load: Callable[[str], ModuleType]) -> None:
    names = {path.stem.removeprefix("bench_") for path in BENCHMARKS.glob("bench_*.py")}
    assert set(load("run").BENCHMARKS) == names


def test_a_benchmark_that_fails_is_reported_and_the_others_go_on(
    load: Callable[[str], ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = load("run")
    (tmp_path / "bench_broken.py").write_text(FAILING)
    (tmp_path / "bench_whole.py").write_text(SUCCEEDING)
    results = tmp_path / "results"
    results.mkdir()
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setattr(run, "BENCHMARKS", {"broken": (), "whole": ("data",)})
    words = ["run.py", "--quick", "--results", str(results), "--data", "images.zip", "--photos", "photos.zip"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="These benchmarks failed: broken"):
        run.main()
    shown = capsys.readouterr().out
    assert re.search(r"\| broken +\| \d+ +\| +\| failed: ValueError: planned", shown)
    assert re.search(r"\| whole +\| \d+ +\| 1 of 1 +\| done", shown)
    passed = json.loads((results / "whole.json").read_text())["arguments"]
    assert passed == ["--json", str(results / "whole.json"), "--quick", "--data", "images.zip"]


def test_a_page_gets_the_tables_that_have_results_and_keeps_the_others(load: Callable[[str], ModuleType]) -> None:
    page = "before\n<!-- table: a/rows -->\nold\n<!-- end -->\n<!-- table: b/rows -->\nkept\n<!-- end -->\nafter\n"
    found = load("tables").with_tables(page, {"a/rows": comparison()})
    assert "old" not in found
    assert found.endswith("<!-- table: b/rows -->\nkept\n<!-- end -->\nafter\n")
    assert re.search(r"\| colabkit +\| 4.2 +\| 4 +\| 4.4 +\| 2 \(", found)


def test_conditions_stand_below_the_first_of_several_tables_that_share_them(load: Callable[[str], ModuleType]) -> None:
    page = "".join(f"<!-- table: {key} -->\n<!-- end -->\n" for key in ("a/rows", "a/rows/2", "b/rows"))
    found = {"a/rows": comparison(), "a/rows/2": comparison(), "b/rows": {**comparison(), "conditions": "4 cores"}}
    shown = load("tables").with_tables(page, found)
    assert re.findall("Measured with (.*)\\.", shown) == [comparison()["conditions"], "4 cores"]


def test_systems_without_values_are_listed_with_the_reason(load: Callable[[str], ModuleType]) -> None:
    assert re.search(r"\| peer +\| not installed +\|", load("tables").markdown_of(comparison()))


def test_tables_in_the_documentation_are_those_of_the_results(load: Callable[[str], ModuleType]) -> None:
    tables = load("tables")
    found = tables.comparisons_in(tables.RESULTS)
    named = set()
    for page in tables.PAGES:
        text = page.read_text(encoding="utf-8")
        assert tables.with_tables(text, found) == text, f"{page.name}: run tests/benchmarks/tables.py --write"
        named |= {key.split("/")[0] for key, *_ in [*tables.PLOT.findall(text)]}
        named |= {match[1].split("/")[0] for match in tables.TABLE.findall(text)}
    assert named
    assert named <= set(load("run").BENCHMARKS)


def test_pictures_show_a_bar_for_each_system(load: Callable[[str], ModuleType], tmp_path: Path) -> None:
    load("tables").draw(comparison(), tmp_path / "rows")
    for theme in ("light", "dark"):
        drawn = (tmp_path / f"rows-{theme}.svg").read_text()
        assert ">colabkit<" in drawn
        assert ">plain<" in drawn
        assert ">peer<" not in drawn


def test_a_ratio_near_its_requirement_is_decided_by_its_interval(
    load: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    bench = load("rounds").Bench(tmp_path, Namespace(rounds=9))
    near, plain = [0.9, 0.92, 0.94, 0.96, 0.98, 1.0, 1.02, 1.04, 1.06], [1.0] * 9
    bench.need_paired("faster", [1.1] * 9, plain, 1)
    bench.need_paired("near", near, plain, 1)
    bench.need_paired("slower", [0.8] * 9, plain, 1)
    bench.need_paired("longer", near, plain, 0.5, at_most=True)
    bench.need_paired("few rounds", near[:4], plain[:4], 1)
    bench.need_paired("other rounds", near, plain[:3], 1)
    bench.need_paired("not run", [], plain, 1)
    found = {what: (shown, met) for what, shown, _, met in bench.verdicts}
    assert found["faster"] == ("1.10 (1.10 to 1.10)", "holds")
    assert found["near"][0].startswith("0.98 (0.9")
    assert found["near"][1] == "within the interval"
    assert found["slower"] == ("0.80 (0.80 to 0.80)", "FALLS SHORT")
    assert found["longer"][1] == "FALLS SHORT"
    assert found["few rounds"] == ("0.93", "FALLS SHORT")
    assert found["other rounds"] == ("0.98", "FALLS SHORT")
    assert found["not run"] == ("not measured", "")


def test_medians_of_a_table_are_compared_by_their_rounds(load: Callable[[str], ModuleType], tmp_path: Path) -> None:
    bench = load("rounds").Bench(tmp_path, Namespace(rounds=5))
    medians = bench.show("Rows", "images/s", {"colabkit": [2.0] * 5, "plain": [1.0] * 5, "peer": []})
    assert medians == {"colabkit": 2, "plain": 1}
    bench.need_ratio("rows", medians, "colabkit", "plain", 1)
    bench.need_ratio("rows", dict(medians), "colabkit", "plain", 1)
    bench.need_ratio("rows", medians, "colabkit", "peer", 1)
    assert [found for _, found, *_ in bench.verdicts] == ["2.00 (2.00 to 2.00)", "2.00", "not measured"]


def test_results_contain_names_of_files_but_no_folders(load: Callable[[str], ModuleType], tmp_path: Path) -> None:
    options = Namespace(
        rounds=1, only="a/8,b", data="/home/me/images.zip", folder=Path("../mine/photos"), json=tmp_path
    )
    failed = ["a: FileNotFoundError: No such file: '/home/me/photos/1.jpg', 5 images/s"]
    load("rounds").Bench(tmp_path, options, failed=failed).write(tmp_path / "results" / "a.json", 0.5)
    written = json.loads((tmp_path / "results" / "a.json").read_text())
    assert written["options"] == {"rounds": 1, "only": "a/8,b", "data": "images.zip", "folder": "photos"}
    assert written["failed"] == ["a: FileNotFoundError: No such file: '1.jpg', 5 images/s"]


def check(guard: ModuleType, monkeypatch: pytest.MonkeyPatch, *ratios: list[float]) -> None:
    """Run the guard with the given ratios in its first and second measurement; the floor is 0.5."""
    coming = iter(ratios)
    monkeypatch.setattr(guard, "measure", lambda name, rounds: (found := next(coming), [1.0] * len(found)))
    monkeypatch.setattr(guard, "WORKLOADS", {"loader": None})
    monkeypatch.setattr(sys, "argv", ["guard.py"])
    monkeypatch.setattr(guard.json, "loads", lambda text: {"loader": 0.5})
    guard.main()


def test_the_guard_fails_if_the_whole_interval_is_below_the_floor_twice(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = [0.3, 0.31, 0.32, 0.33, 0.34, 0.35, 0.36, 0.37, 0.38]
    with pytest.raises(SystemExit, match=r"Slower than the floors in floors.json: loader"):
        check(load("guard"), monkeypatch, slow, slow)


def test_the_guard_forgives_noise(load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    slow, noisy = [0.3] * 9, [0.2, 0.2, 0.3, 0.3, 0.4, 0.6, 0.7, 0.7, 0.8]
    check(load("guard"), monkeypatch, noisy)
    check(load("guard"), monkeypatch, slow, noisy)


@pytest.mark.full
def test_the_guard_finds_a_loader_that_has_become_slow(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    guard, batches_of = load("guard"), colabkit.Loader.__iter__

    def slowly(loader: Any) -> Iterator[Any]:
        for batch in batches_of(loader):
            time.sleep(0.005)
            yield batch

    for name, value in {"ROWS": 4096, "EPOCHS": 2}.items():
        monkeypatch.setattr(guard, name, value)
    monkeypatch.setattr(colabkit.Loader, "__iter__", slowly)
    monkeypatch.setattr(sys, "argv", ["guard.py", "--only", "loader", "--rounds", "5"])
    with pytest.raises(SystemExit, match=r"Slower than the floors in floors.json: loader"):
        guard.main()


def test_every_workload_of_the_guard_has_a_floor(load: Callable[[str], ModuleType]) -> None:
    guard = load("guard")
    assert set(json.loads(guard.FLOORS.read_text())) == set(guard.WORKLOADS)
