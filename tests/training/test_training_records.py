"""The values that steps return are averaged over samples, and become a curve of at most 1,000 points."""

from __future__ import annotations

import json
import math

import pytest
import torch

from colabkit.training.records import SampleMeans, ValueCurve, ValueRecorder


@pytest.mark.parametrize("parts", [[3_000], [1, 2_999], [999, 1, 1_000, 1_000], [1_500, 1_500]])
def test_reading_at_any_steps_gives_bit_identical_means(parts):
    draws = torch.rand(3_000, generator=torch.Generator().manual_seed(1))
    curve, means = ValueCurve(), SampleMeans()
    recorder = ValueRecorder(curve, means)
    step = 0
    for part in parts:
        for _ in range(part):
            step += 1
            recorder.add(step, step % 7 + 1, {"loss": draws[step - 1], "rate": 0.1 * step})
        recorder.read()
        curve = ValueCurve.of(json.loads(json.dumps(curve.state_dict())))
        means = SampleMeans(json.loads(json.dumps(means.sums)))
        recorder = ValueRecorder(curve, means)
    weights = [number % 7 + 1 for number in range(1, 3_001)]
    total = 0.0
    for value, weight in zip(draws.double().tolist(), weights, strict=True):
        total += value * weight
    assert means.sums["loss"] == (total, sum(weights))
    assert curve.width == 4
    assert len(curve.points(3_000)["loss"]) == 750


@pytest.mark.parametrize("steps", [1, 10, 999, 1_000, 1_001, 12_345])
def test_a_curve_has_at_most_1000_points_which_are_means(steps):
    curve = ValueCurve()
    for step in range(1, steps + 1):
        curve.add("step", step, float(step))
    points = curve.points(steps)["step"]
    assert min(steps, 500) <= len(points) <= 1_000
    last = 0
    for step, value in points[:-1]:
        assert value == (last + 1 + step) / 2
        last = step
    assert points[-1] == (steps, (last + 1 + steps) / 2)


def test_values_may_have_any_numeric_type_and_be_missing_in_some_steps():
    curve, means = ValueCurve(), SampleMeans()
    recorder = ValueRecorder(curve, means)
    recorder.add(1, 2, {"loss": torch.tensor(1.0)})
    recorder.add(2, 2, {"loss": torch.tensor([2.0], dtype=torch.float64), "odd": 4})
    recorder.add(3, 4, {"loss": 3.0})
    recorder.add(4, 4, {})
    recorder.read()
    assert means.read() == {"loss": (2 + 4 + 12) / 8, "odd": 4.0}
    assert curve.points(4)["odd"] == [(2, 4.0)]


def test_nan_values_give_a_nan_mean():
    curve, means = ValueCurve(), SampleMeans()
    recorder = ValueRecorder(curve, means)
    recorder.add(1, 1, {"loss": float("nan")})
    recorder.read()
    assert math.isnan(means.read()["loss"])


@pytest.mark.parametrize(
    ("count", "sums"), [(2, [{"a": (6.0, 2)}, {"a": (3.0, 1)}]), (3, [{"a": (9.0, 3)}, {}, {}]), (1, [{"a": (9.0, 3)}])]
)
def test_each_rank_resumes_with_its_own_sums_unless_their_number_has_changed(count, sums):
    saved = [{"a": (6.0, 2)}, {"a": (3.0, 1)}]
    assert [SampleMeans.of_rank(saved, rank, count).sums for rank in range(count)] == sums


def test_means_of_several_processes_are_weighted_by_samples():
    assert SampleMeans.of_all([{"a": (6.0, 2)}, {"a": (3.0, 1), "b": (1.0, 1)}, {}]).read() == {"a": 3.0, "b": 1.0}
