"""`TrainReport` converts to plain values and to a file, is small even for long runs, and is read back unchanged."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from sampling import sampled

from colabkit.errors import FileFailed, NotMounted
from colabkit.foundation import (
    BusyProcess,
    GpuSnapshot,
    HostSnapshot,
    LoaderFacts,
    LoopSpot,
    MetersSnapshot,
    PartSnapshot,
    StepTimes,
    Stretch,
    ThreadsSnapshot,
)
from colabkit.loading import Loader
from colabkit.training.report import EpochRecord, TrainReport, Validation
from colabkit.training.trainer import train

BUDGET_BYTES = 200_000


def long_run(epochs: int, gpus: int) -> TrainReport:
    """Return the report of a run with long numbers in every field and lists of maximum length."""
    values = {"loss": 1 / 3, "accuracy": 2 / 3, "rate": 1e-3 / 7}
    part = PartSnapshot("gather", 10, 100, 1 / 3)
    steps = tuple(StepTimes(1 / 3, 1 / 7, 1 / 9, 1 / 11, 4) for _ in range(512))
    card = GpuSnapshot("GPU-6b2c8a4e-0000-0000-0000-000000000000", "NVIDIA A100-SXM4-40GB", *(1 / 3, 1 << 35, 1 << 36))
    card = replace(
        card, torch_bytes=12345678901, torch_reserved_bytes=12345678901, power_w=123.456, slowed_by=("heat",)
    )
    spots = [LoopSpot(f"train.py:{line} in log_images", "x" * 50, "aside", 1, 1) for line in range(101, 104)]
    threads = ThreadsSnapshot(1 / 3, 1 / 3, 1 / 3, 1 / 3, "a thread with a name", 1 / 3, 1 / 3, tuple(spots))
    others = {"threads": threads, "other_process": BusyProcess("python train.py, PID 4711", 1 / 3)}
    rates = {field.name: 1e9 / 3 for field in fields(HostSnapshot) if field.name not in ("at_s", "gpus", *others)}
    stretches = tuple(Stretch(1000, 128_000, 1e5 / 3, 1 / 3) for _ in range(119))
    return TrainReport(
        epochs=tuple(
            EpochRecord(number, 391, 50_000, 100 / 3, 1 / 3, values, values, 1 / 7, 1 / 9, 1 / 11)
            for number in range(epochs)
        ),
        trained=epochs,
        steps=391 * epochs,
        seconds=1e5 / 3,
        samples_per_s=1e5 / 3,
        wait_share=1 / 3,
        parts={"gather": 1 / 3},
        curve={name: [(391 * (at + 1), value) for at in range(1000)] for name, value in values.items()},
        validations=tuple(Validation(391 * (number + 1), values) for number in range(epochs)),
        stopped=None,
        checkpoint=None,
        best=None,
        best_value=1 / 3,
        resumed_from=None,
        skipped_checkpoints=(),
        changed_settings=(),
        failed_saves=(),
        spent=MetersSnapshot(wait_s=1 / 3, parts=(part,), recent=steps, stretches=stretches),
        facts=LoaderFacts("gathered", 50_000, 128, path="/content/colabkit/data.h5"),
        hosts=tuple(HostSnapshot(at_s=1e6 / 3 + at, **rates, **others, gpus=(card,) * gpus) for at in range(600)),
    )


def test_the_time_of_validations_and_checkpoints_is_counted(tmp_path):
    data = list(range(8))
    saved = train(lambda batch: 0.0, Loader(data, 4), epochs=2, state={}, to=tmp_path, validate=lambda: {"loss": 1.0})
    assert 0 < saved.spent.validate_s < saved.seconds
    assert 0 < saved.spent.save_s < saved.seconds
    # Only checkpoints at the end of an epoch were written.
    assert saved.spent.save_apart_s == saved.spent.save_s
    plain = train(lambda batch: 0.0, Loader(data, 4), epochs=2)
    assert (plain.spent.validate_s, plain.spent.save_s) == (0, 0)
    often = train(lambda batch: 0.0, Loader(data, 1), epochs=1, state={}, to=tmp_path / "often", save_every=2)
    assert 0 <= often.spent.save_apart_s < often.spent.save_s


def test_a_table_has_headers_and_folds_the_middle_of_a_long_run() -> None:
    report = long_run(300, 0)
    names = [row[0] for row in report._rows() if row[0].startswith(("epoch", "…"))]
    assert names == [f"epoch {number}" for number in (1, 2, 3, 4, 5)] + ["…"] + [f"epoch {n}" for n in range(291, 301)]
    assert "285 more epochs, which to_pandas() lists" in report._repr_html_()
    assert len(report._repr_html_().encode()) < 20_000
    assert "…" not in [row[0] for row in long_run(16, 0)._rows()]
    for shown in (report._repr_html_(), report.text_table()):
        assert re.search("time.*speed.*waiting.*loss.*val_accuracy.*epoch 1", shown, re.DOTALL)
    assert "speed" not in long_run(0, 0).text_table().partition("\n")[2]


def test_a_table_has_one_column_for_each_value_in_text_and_html(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    report = long_run(2, 0)
    short = replace(report, epochs=(report.epochs[0], replace(report.epochs[1], validation={})), best=Path("b.pt"))
    header, first, second, best = short.text_table().splitlines()[1:]
    assert len(header) == len(first)
    assert header.index("rate") + len("rate") == first.index("0.0001429") + len("0.0001429")
    assert second.rstrip().endswith("0.0001429")
    assert best.split() == ["best", "0.3333", "in", "b.pt"]
    unsaved = replace(short, failed_saves=((12, "the disk is full"),)).text_table()
    assert "0.3333; the best saved checkpoint is b.pt" in unsaved
    assert re.search("<td colspan=9 [^>]*>0.3333 in b.pt</td></tr></table>$", short._repr_html_())


def test_columns_that_a_terminal_has_no_room_for_follow_in_another_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    report = long_run(2, 0)
    table = report.text_table().splitlines()[1:]
    header, first, second = table[::3], table[1::3], table[2::3]
    assert max(map(len, table)) < 60
    assert " ".join(header).split() == [*report._header()[1:]]
    for number, lines in enumerate((first, second), 1):
        assert len(lines) == 3
        assert all(line.startswith(f"  epoch {number}  ") for line in lines)


@pytest.mark.parametrize("epochs", sampled([1, 200, 5000], 2))
@pytest.mark.parametrize("gpus", sampled([0, 1, 8], 2))
def test_the_longest_run_is_json_within_the_size_limit(epochs, gpus):
    values = long_run(epochs, gpus).to_dict()
    text = json.dumps(values)
    assert len(text) < BUDGET_BYTES
    assert json.loads(text) == values


def test_long_lists_are_thinned_and_keep_the_first_and_last_entry():
    report = long_run(5000, 1)
    values = report.to_dict()
    assert len(values["epochs"]) == len(values["validations"]) == 200
    assert [values["epochs"][place]["epoch"] for place in (0, -1)] == [0, 4999]
    assert [values["validations"][place]["step"] for place in (0, -1)] == [391, 391 * 5000]
    assert [values["curve"]["loss"][place][0] for place in (0, -1)] == [391, 391_000]
    assert values["hosts"][-1]["at_s"] == pytest.approx(report.hosts[-1].at_s, rel=1e-4)
    assert len(values["hosts"]) == 40
    assert len(report.epochs) == 5000


def test_a_short_run_is_not_thinned():
    report = replace(long_run(3, 1), hosts=())
    values = report.to_dict()
    assert values["epochs"] == [asdict(record) for record in report.epochs]
    assert values["facts"]["batch_size"] == 128
    assert values["spent"]["wait_s"] == report.spent.wait_s
    assert values["spent"]["parts"][0]["name"] == "gather"
    assert "recent" not in values["spent"]


def test_a_saved_report_is_read_back_unchanged(tmp_path):
    report = long_run(3, 1)
    path = report.save(tmp_path / "runs" / "first.json")
    assert path == tmp_path / "runs" / "first.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    steps = values["spent"].pop("recent")
    assert [step[:6] for step in steps] == [pytest.approx(list(step[:6]), rel=1e-4) for step in report.spent.recent]
    assert values == report.to_dict()
    replace(report, trained=7).save(str(path))
    assert json.loads(path.read_text(encoding="utf-8"))["trained"] == 7
    assert [file.name for file in path.parent.iterdir()] == ["first.json"]


def test_nan_and_infinity_are_null_in_the_file(tmp_path):
    report = replace(long_run(1, 0), best_value=math.inf, curve={"loss": [(1, math.nan), (2, 0.5)]})

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    values = json.loads(report.save(tmp_path / "report.json").read_text(), parse_constant=refuse)
    assert values["best_value"] is None
    assert values["curve"]["loss"] == [[1, None], [2, 0.5]]


def test_a_report_of_a_real_run_is_saved(tmp_path, data):
    report = train(lambda batch: 1.0, Loader(data, 4), epochs=2)
    values = json.loads(report.save(tmp_path / "report.json").read_text())
    assert [record["samples"] for record in values["epochs"]] == [22, 22]


def test_a_path_that_cannot_be_written_raises_file_failed(tmp_path):
    report = long_run(1, 0)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileFailed, match="Cannot save the report"):
        report.save(tmp_path / "file" / "report.json")
    with pytest.raises(FileFailed, match="Cannot save the report"):
        report.save(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_saving_to_drive_requires_a_mount(monkeypatch):
    monkeypatch.setattr("colabkit.foundation.mount_table.mounts", list)
    monkeypatch.delenv("COLABKIT_DRIVE", raising=False)
    with pytest.raises(NotMounted):
        long_run(1, 0).save("drive:report.json")


def test_records_of_earlier_versions_have_no_newer_times():
    record = EpochRecord(epoch=0, steps=1, samples=2, seconds=3.0, wait_s=1.0, values={}, validation={})
    assert (record.copy_s, record.compute_s, record.other_s) == (0, 0, 0)


def test_the_table_and_the_summary_have_all_incidents(tmp_path):
    report = replace(
        long_run(1, 0),
        stopped="SIGTERM",
        resumed_from=tmp_path / "checkpoint-00000007.pt",
        skipped_checkpoints=(("checkpoint-00000009.pt", "it ends early"),),
        changed_settings=("the scheduler",),
        failed_saves=((12, "the disk is full"),),
    )
    html = report._repr_html_()
    for text in ("by SIGTERM", "00000007", "it ends early", "the scheduler", "at step 12: the disk is full"):
        assert text in html
        assert text in repr(report)


def test_the_data_frame_has_one_row_per_epoch(data):
    pytest.importorskip("pandas")
    losses = iter([2.0, 1.0])
    report = train(lambda batch: 3.0, Loader(data, 4), epochs=2, validate=lambda: {"loss": next(losses)})
    frame = report.to_pandas()
    counts, seconds = ["epoch", "steps", "samples"], ["seconds", "wait_s", "copy_s", "compute_s", "other_s"]
    assert [*frame.columns] == [*counts, *seconds, "loss", "val_loss"]
    assert frame["epoch"].tolist() == [0, 1]
    assert frame["samples"].tolist() == [22, 22]
    assert frame["loss"].tolist() == [3.0, 3.0]
    assert frame["val_loss"].tolist() == [2.0, 1.0]
    assert frame["wait_s"].tolist() == [record.wait_s for record in report.epochs]
    assert train(lambda batch: 3.0, Loader(data, 4), epochs=0).to_pandas().empty
