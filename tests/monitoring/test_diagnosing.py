"""The doctor: the parts of a typical step, a verdict that does not flicker, and the most useful advice."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from doctor_cases import (
    DECODED,
    DRIVE,
    FOREIGN,
    FULL,
    GATHERED,
    GIB,
    ON_GPU,
    PROCESSES,
    QUIET,
    check_call,
    epochs_of,
    made,
    part,
    spent_of,
    steps_of,
    with_gpu,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import make_tree

import colabkit
from colabkit.foundation import StepTimes
from colabkit.monitoring.diagnosing import verdict as verdict_module
from colabkit.monitoring.diagnosing.diagnosis import Advice, Diagnosis
from colabkit.monitoring.diagnosing.forecast import forecast_run
from colabkit.monitoring.diagnosing.rules import RULES, Rule
from colabkit.monitoring.diagnosing.run_profile import (
    RunProfile,
    has_enough_steps,
    late_share,
    profile_run,
    settled_steps,
    typical_step,
)
from colabkit.monitoring.diagnosing.verdict import Doctor, judge
from colabkit.notebook.options import LineWords
from colabkit.notebook.verbs import VERBS

UNHURRIED = settings(max_examples=200, deadline=None)
SECONDS = st.one_of(st.just(0.0), st.floats(1e-6, 1e3))
STEPS = st.lists(st.builds(StepTimes, SECONDS, SECONDS, SECONDS, SECONDS, st.integers(0, 300)), max_size=120)


def shared(wait: float, count: int = 100) -> list[StepTimes]:
    """Return steps that take 0.1 s each and wait for data for the share `wait` of that time."""
    return steps_of(wait=0.1 * wait, compute=0.1 * (1 - wait), count=count)


@UNHURRIED
@given(STEPS)
def test_the_four_shares_add_up_to_one_or_are_all_zero(steps: Sequence[StepTimes]) -> None:
    shares = made(steps=steps).shares
    total = shares.wait + shares.copy + shares.compute + shares.other
    assert total == pytest.approx(1) or (total == 0 and not made(steps=steps).step.seconds)


@UNHURRIED
@given(st.integers(50, 512), st.lists(st.tuples(st.integers(0, 511), st.floats(0.2, 1e3)), max_size=2))
def test_a_few_long_steps_do_not_change_the_typical_step(count: int, late: list[tuple[int, float]]) -> None:
    steps = steps_of(wait=0.01, copy=0.002, other=0.003, count=count)
    usual = typical_step(steps)
    for place, seconds in late:
        steps[place % count] = steps[place % count]._replace(wait_s=seconds, other_s=seconds)
    assert typical_step(steps) == pytest.approx(usual)


def test_the_wait_for_a_loader_that_yields_several_batches_at_once_is_measured() -> None:
    for together, count in itertools.product((1, 2, 4, 8, 16), (192, 300, 512)):
        waits = [0.1 * together if number % together == 0 else 0.0 for number in range(count)]
        steps = [StepTimes(wait_s, 0.0, 0.1, 0.0, 64) for wait_s in waits]
        assert made(steps=steps).shares.wait == pytest.approx(0.5, abs=0.1)


def test_the_typical_batch_is_the_mean_of_batches_of_any_size() -> None:
    steps = [StepTimes(0.0, 0.0, 0.1, 0.0, 64 - 32 * (number % 2)) for number in range(96)]
    assert typical_step(steps).samples == 48
    assert made(steps=steps).samples_per_s == pytest.approx(480)


def test_without_steps_all_times_are_zero_and_late_waits_exceed_three_typical_steps() -> None:
    assert typical_step([]).seconds == 0
    assert late_share([]) == 0
    assert made(steps=[]).samples_per_s == 0
    steps = steps_of(count=200)
    for wait_s, late in ((0.0, 0), (0.29, 0), (20.0, 0.5)):
        steps[100] = steps[100]._replace(wait_s=wait_s)
        assert late_share(steps) == pytest.approx(late)


def test_fifty_steps_or_a_few_steps_of_seconds_are_enough() -> None:
    for count, seconds, expected in ((49, 0.1, False), (50, 0.1, True), (7, 10.0, False), (8, 10.0, True)):
        assert has_enough_steps(steps_of(compute=seconds, count=count)) is expected


def test_the_first_steps_of_a_run_and_of_each_pass_are_not_counted() -> None:
    steps = [StepTimes(float(number), 0.0, 0.1, 0.0, 1, number % 50 == 0) for number in range(200)]
    kept = [step.wait_s for step in settled_steps(steps)]
    assert kept == [number for number in range(20, 200) if number % 50]
    # At most a fifth of the steps count as warm-up.
    assert len(settled_steps(steps[1:11])) == 8
    assert len(settled_steps(steps[1:11], warm=0)) == 10


def test_the_first_steps_count_if_each_pass_has_one_step() -> None:
    steps = [StepTimes(0.05, 0.0, 0.1, 0.0, 64, is_first=True) for _ in range(100)]
    assert made(steps=steps).shares.wait == pytest.approx(1 / 3)
    assert judge(made(steps=steps)).verdict == "data"


def test_all_steps_count_if_the_start_of_the_run_is_not_recorded() -> None:
    steps = shared(0.5, 512)
    assert made(steps=steps).steps == 492
    assert profile_run(replace(spent_of(steps), steps=5000), GATHERED, []).steps == 511


VERDICTS: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"wait": 0.3}, "data", "Training waits for data 75% of the time"),
    ({"copy": 0.03}, "copy", "Training waits for copies to the GPU 23% of the time"),
    ({"other": 0.1}, "other", "Other work between steps takes 50% of the time"),
    ({"wait": 0.01}, "compute", "Training waits for data only 9.1% of the time"),
    ({"wait": 0.001}, "compute", "Data keeps up: the step itself takes 99% of the time"),
    ({"wait": 0.1, "other": 0.2}, "other", "Other work between steps takes 50% of the time"),
)


def test_the_verdict_is_the_largest_avoidable_share() -> None:
    for times, verdict, sentence in VERDICTS:
        found = judge(made(**times))
        assert (found.verdict, found.sentence) == (verdict, sentence)
        assert found.is_good is (verdict == "compute")


def test_the_verdict_names_the_slowest_part_if_data_is_late() -> None:
    parts = (part("read", 0.0001), part("decode", 0.009, 0.009))
    found = judge(made(wait=0.2, facts=DECODED, parts=parts))
    assert found.bottleneck == "decode"
    assert found.sentence.endswith(": decoding is the slowest part")
    assert judge(made(wait=0.001, facts=DECODED, parts=parts)).bottleneck is None


@pytest.mark.parametrize(("augment_s", "slowest"), [(0.005, "samples"), (0.007, "augment")])
def test_a_transform_after_worker_processes_is_compared_with_the_work_of_each_worker(
    augment_s: float, slowest: str
) -> None:
    facts = replace(PROCESSES, workers=2)
    parts = (part("samples", 0.012, 0.012), part("augment", augment_s))
    assert judge(made(wait=0.2, facts=facts, parts=parts)).bottleneck == slowest


def test_transforms_on_the_gpu_are_not_advised_if_they_already_run_there() -> None:
    parts = (part("gather", 1e-5), part("augment", 0.003))
    for facts, calls in ((GATHERED, ["device='cuda'"]), (ON_GPU, [""])):
        diagnosis = judge(made(wait=0.2, facts=facts, parts=parts, host=with_gpu()))
        assert [advice.call for advice in diagnosis.advice if advice.rule == "slow_transform"] == calls


def test_the_first_pass_does_not_count_if_later_passes_have_enough_steps() -> None:
    decoded = shared(0.5)
    first = replace(spent_of(decoded, parts=(part("decode", 1e-3),)), recent=())

    def later(count: int) -> RunProfile:
        steps = [*decoded, *shared(0.0, count)]
        spent = spent_of(steps, parts=first.parts, passes=2, first_pass=first)
        return profile_run(spent, DECODED, [FULL])

    assert judge(later(49)).bottleneck == "decode"
    found = judge(later(51))
    assert found.verdict == "compute"
    assert found.bottleneck is None
    assert not found.advice
    assert later(51).passes == 2


def test_snapshots_of_the_machine_in_an_ignored_first_pass_do_not_count() -> None:
    decoded = shared(0.5)
    first = replace(spent_of(decoded), recent=())
    spent = spent_of([*decoded, *shared(0.0)], passes=2, first_pass=first)
    hosts = [replace(FULL, at_s=float(second)) for second in range(10)]
    # Each pass takes ten seconds.
    hosts += [replace(QUIET, at_s=10.0 + second) for second in range(11)]
    assert profile_run(spent, DECODED, hosts).machine.cpu_rate == pytest.approx(QUIET.cpu_rate, abs=0.1)
    assert profile_run(spent_of(decoded), DECODED, hosts).machine.cpu_rate == pytest.approx(0.65, abs=0.05)


def test_transforms_of_finished_batches_are_not_counted_as_work_of_processes() -> None:
    parts = (part("samples", 0.012, 0.012), part("augment", 0.004))
    case = made(facts=PROCESSES, parts=parts, wait=0.5)
    assert case.worker_s == pytest.approx(0.012)
    assert case.at_last_s == pytest.approx(0.004)
    assert forecast_run(case).without_loader() <= 1 / 0.004
    assert made(facts=DECODED, parts=parts).at_last_s == 0


def test_too_few_steps_give_no_verdict_and_no_advice() -> None:
    found = Doctor().look(spent_of(shared(0.9, 15)), DRIVE, [FULL], 0.5)
    assert (found.verdict, found.sentence) == ("unknown", "Measuring the first steps: 12 of 50")
    assert (found.advice, found.ceiling_samples_per_s, found.bottleneck) == ((), None, None)
    assert repr(found) == found.sentence


def looks(doctor: Doctor, *shares: float) -> list[str]:
    return [doctor.look(spent_of(shared(share)), GATHERED, [QUIET]).verdict for share in shares]


@pytest.mark.parametrize(
    ("shares", "verdicts"),
    [
        # The verdict changes once two consecutive diagnoses find the new one.
        ((0.5, 0.01, 0.01, 0.5, 0.5), ["data", "data", "compute", "compute", "data"]),
        # Shares close to the threshold do not change the verdict.
        ((0.21, *[0.19, 0.21, 0.175, 0.175] * 5), ["data"] * 21),
        ((0.01, *[0.21, 0.19] * 5), ["compute"] * 11),
        # A share more than three percentage points below the threshold changes the verdict.
        ((0.21, 0.16, 0.16), ["data", "data", "compute"]),
    ],
)
def test_the_first_verdict_appears_immediately_and_does_not_flicker(
    shares: tuple[float, ...], verdicts: list[str]
) -> None:
    assert looks(Doctor(), *shares) == verdicts


def test_the_last_look_reports_the_verdict_of_the_whole_run_immediately() -> None:
    doctor, calm = Doctor(), spent_of(shared(0.01))
    assert looks(doctor, 0.5) == ["data"]
    last = doctor.look(calm, GATHERED, [QUIET], is_over=True)
    assert last == judge(profile_run(calm, GATHERED, [QUIET]))
    assert last.verdict == "compute"


def test_three_alternating_verdicts_do_not_change_the_verdict() -> None:
    doctor = Doctor()
    looks(doctor, 0.01)
    runs = [steps_of(wait=0.1), steps_of(other=0.1)] * 3
    assert {doctor.look(spent_of(run), GATHERED).verdict for run in runs} == {"compute"}


def test_the_verdict_stays_while_there_are_too_few_steps() -> None:
    doctor = Doctor()
    assert looks(doctor, 0.5) == ["data"]
    few = doctor.look(spent_of(shared(0.01, 10)), GATHERED)
    assert few.verdict == "data"
    assert not few.advice


def rules_that_give(monkeypatch: pytest.MonkeyPatch, *advice: Advice) -> None:
    """Replace the rules with stubs that always give `advice`. A stub of an existing rule keeps its other attributes."""
    known = {rule.name: rule for rule in RULES}

    def rule(given: Advice) -> Rule:
        def look(case: RunProfile) -> Advice:
            return given

        look.__name__ = given.rule
        return replace(known.get(given.rule, Rule(look)), look=look)

    monkeypatch.setattr(verdict_module, "RULES", tuple(map(rule, advice)))


def advised(name: str, samples_per_s: float | None = None) -> Advice:
    return Advice(f"{name} was found", f"Do {name}", samples_per_s=samples_per_s, rule=name)


def named(found: Diagnosis) -> list[str]:
    return [advice.rule for advice in found.advice]


def test_the_best_three_pieces_of_advice_that_gain_three_percent_are_given_best_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gains = [advised(f"rule {gain}", 640.0 * gain) for gain in (2, 5, 3, 4)]
    rules_that_give(monkeypatch, advised("about nothing"), *gains)
    assert named(judge(made())) == ["rule 5", "rule 4", "rule 3"]
    rules_that_give(monkeypatch, advised("little", 640 * 1.02), advised("more", 640 * 1.04))
    assert named(judge(made())) == ["more"]
    rules_that_give(monkeypatch, advised("a", 9e9), advised("slowed_gpu"), advised("full_ram"), advised("lost_gpu"))
    assert named(judge(made())) == ["full_ram", "lost_gpu", "a"], "first what may end the run"


def test_contradicting_advice_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {name for rule in RULES for name in rule.silences} <= {rule.name for rule in RULES}
    for rule in RULES:
        for other in rule.silences:
            rules_that_give(monkeypatch, advised(other, 9e9), advised(rule.name))
            assert named(judge(made())) == [rule.name]
            rules_that_give(monkeypatch, advised(other, 9e9))
            assert named(judge(made())) == [other]


def test_two_rules_with_the_same_call_give_only_the_better_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (replace(advised(name, speed), call="colabkit.stage('x')") for name, speed in (("a", 1e3), ("b", 2e3)))
    rules_that_give(monkeypatch, one, other, advised("c"), advised("d"))
    assert named(judge(made())) == ["b", "c", "d"]


def test_more_workers_are_not_advised_if_memory_is_short() -> None:
    given = {"wait": 0.2, "facts": replace(FOREIGN, workers=1)}
    assert "more_workers" in named(judge(made(**given)))
    full = judge(made(**given, host=replace(QUIET, ram_used_bytes=11 * GIB)))
    assert named(full)[0] == "full_ram"
    assert "more_workers" not in named(full)


def test_larger_batches_are_advised_once_and_not_on_a_full_gpu() -> None:
    idle = {"facts": ON_GPU, "samples": 4, "compute": 0.002}
    assert named(judge(made(**idle, host=with_gpu(utilization_rate=0.3, used_bytes=GIB)))) == ["tiny_batches"]
    full = with_gpu(utilization_rate=0.3, used_bytes=15 * GIB, torch_reserved_bytes=14 * GIB)
    assert named(judge(made(**idle, host=full))) == ["full_gpu"]


def call_of(rule: str, **given: Any) -> str:
    (advice,) = [advice for advice in judge(made(wait=0.2, **given)).advice if advice.rule == rule]
    check_call(advice.call)
    return advice.call


def test_decoded_samples_are_packed_from_the_dataset_and_loaded_at_the_size_of_the_batches() -> None:
    parts = (part("read", 0.0001), part("decode", 0.009, 0.009))
    packed = replace(DECODED, path="/data/birds.h5", files=None, image_height=64, image_width=48, split="val")
    again = "colabkit.pack(loader.dataset, 'birds-64x48.h5', size=(64, 48))"
    assert call_of("slow_decoding", facts=packed, parts=parts).splitlines() == [
        again,
        "loader = colabkit.Loader(colabkit.open_pack('birds-64x48.h5')['train'], 64, shuffle=True)",
    ]
    cropped = replace(
        packed,
        source="/data/it's",
        image_width=64,
        transform="RandomResizedCrop(64)",
        device="cuda:0",
        shuffle="block",
    )
    # Random crops need larger images than the batches.
    assert call_of("slow_decoding", facts=cropped, parts=parts).splitlines() == [
        "colabkit.pack(loader.dataset, 'it-s-73.h5', size=73)",
        "loader = colabkit.Loader(colabkit.open_pack('it-s-73.h5')['train'], 64, shuffle='block', device='cuda',"
        " transform=loader.transform)",
    ]
    folder = replace(DECODED, image_height=64, image_width=64, shuffle=False)
    assert call_of("slow_decoding", facts=folder, parts=parts).splitlines() == [
        "colabkit.pack(loader.dataset, 'birds-64.h5', size=64, encoding='raw')",
        "loader = colabkit.Loader(colabkit.open_pack('birds-64.h5')['train'], 64)",
    ]


def test_only_the_samples_of_a_loader_are_packed_with_their_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tree = make_tree(tmp_path / "tree", 20)
    options: dict[str, Any] = {"splits": "train=0.8,val=0.2", "encoding": "source", "labels": None, "progress": False}
    pack = colabkit.open_pack(colabkit.pack(tree, "whole.h5", **options).path)
    shards = colabkit.open_pack(colabkit.pack(tree, "shards", shard_bytes="1KiB", **options).path)
    files = colabkit.FileDataset(tree, labels=None)
    for data in (pack["val"], pack["train"].subset(range(5)), shards["train"].subset(range(3)), files.subset(range(4))):
        loader = colabkit.Loader(data, 2)
        assert loader.meters.facts is not None
        facts = replace(loader.meters.facts, kind="decoded", encoding="encoded", image_height=4, image_width=4)
        names = {"colabkit": colabkit, "loader": loader}
        exec(call_of("slow_decoding", facts=facts, parts=(part("decode", 0.009, 0.009),)), names)
        for file in tmp_path.glob("*-4.h5"):
            file.unlink()
        packed = names["loader"]
        assert isinstance(packed, colabkit.Loader)
        assert len(packed.dataset) == len(data)
        assert packed.dataset.labels is None


def test_a_pack_is_not_packed_onto_itself() -> None:
    parts = (part("read", 0.0001), part("decode", 0.009, 0.009))
    facts = replace(
        DECODED, path="/data/birds-64.h5", source="/data/birds", files=None, image_height=64, image_width=64
    )
    first = call_of("slow_decoding", facts=facts, parts=parts).splitlines()[0]
    assert first == "colabkit.pack(loader.dataset, 'birds-64-packed.h5', size=64)"


def test_a_dataset_is_packed_by_one_thread_and_files_by_all_cpus() -> None:
    # Two workers load 10 samples per second each.
    costs = []
    for source in (None, "/data/birds"):
        found = judge(made(wait=3.2, compute=0.001, facts=replace(FOREIGN, source=source, is_remote=False)))
        costs += [advice.cost_s for advice in found.advice if advice.rule == "slow_foreign"]
    assert costs == [pytest.approx(5000, rel=0.01), pytest.approx(2500, rel=0.01)]


@pytest.mark.parametrize(("shuffle", "is_named"), [(None, True), (True, False)])
def test_advice_to_replace_a_loader_of_unknown_order_names_the_sampler(shuffle: bool | None, is_named: bool) -> None:
    found = judge(made(wait=0.2, facts=replace(FOREIGN, shuffle=shuffle, is_remote=False)))
    (advice,) = [advice for advice in found.advice if advice.rule == "slow_foreign"]
    assert ("your sampler=" in advice.action) == is_named


@pytest.mark.parametrize(("sample_bytes", "is_float"), [(3 * 64 * 64 + 8.0, False), (12 * 64 * 64 + 8.0, True)])
def test_packed_files_of_a_dataset_of_floats_are_loaded_as_floats(sample_bytes: float, is_float: bool) -> None:
    size = {"image_height": 64, "image_width": 64, "sample_bytes": sample_bytes}
    facts = replace(FOREIGN, path="/data/birds", source="/data/birds", is_remote=False, **size)
    assert call_of("slow_foreign", facts=facts).endswith("transform=colabkit.augment.Normalize())") == is_float


def test_workers_that_wait_are_multiplied_at_once_and_packing_comes_second() -> None:
    waits = {"facts": PROCESSES, "parts": (part("samples", 0.012, 0.0002),), "host": replace(QUIET, cpus=2.0)}
    first, second = judge(made(wait=0.33, compute=0.05, **waits)).advice[:2]
    assert (first.rule, first.call, first.cost_s) == ("more_workers", "num_workers=16", None)
    assert second.rule == "slow_transform"
    # To pack the dataset, a single thread loads 50,000 samples in 12 ms each.
    assert second.cost_s == pytest.approx(600)
    assert "takes 10 min 00 s once" in repr(judge(made(wait=0.33, compute=0.05, **waits)))


def test_nothing_that_is_already_so_is_advised() -> None:
    disk = replace(QUIET, storage_read_bytes_per_s=32e6, io_stall_rate=0.6)
    raw = replace(GATHERED, path="/data/pack.h5", is_remote=False, tier="disk", sample_bytes=150_000.0, shuffle="block")
    rows = {"facts": raw, "parts": (part("gather", 0.004, size=150_000),), "host": disk, "passes": 2}
    assert not judge(made(wait=0.2, **rows)).advice
    (advice,) = judge(made(wait=0.2, **{**rows, "facts": replace(raw, shuffle=True)})).advice
    assert advice.call == "shuffle='block'"
    late = steps_of(count=400)
    late[50] = late[250] = late[50]._replace(wait_s=4.0)
    assert "bursts" in named(judge(made(steps=late, facts=replace(DECODED, prefetch=32))))
    assert "bursts" not in named(judge(made(steps=late, facts=replace(DECODED, prefetch=64))))


def test_a_slow_transform_in_python_is_answered_with_batches_of_tensors() -> None:
    per_sample = replace(PROCESSES, transform="PerSample(blur)")
    found = judge(made(wait=0.2, facts=per_sample, parts=(part("samples", 0.012, 0.011),), host=FULL))
    assert any("colabkit.augment.PerBatch" in advice.action for advice in found.advice)
    own = {"facts": replace(GATHERED, transform="blur"), "parts": (part("gather", 1e-5), part("augment", 0.003))}
    assert "whole batch of tensors" in judge(made(wait=0.2, **own)).advice[0].action


def test_work_in_on_step_is_not_answered_with_options_of_checkpoints() -> None:
    (advice,) = judge(made(other=0.1)).advice
    assert "save" not in advice.action + advice.call
    assert "on_step" in advice.action


def test_advice_uses_the_words_of_a_line() -> None:
    parts = (part("read", 0.05, size=20_000), part("decode", 0.001, 0.001, 0.02))
    found = judge(made(wait=0.3, facts=replace(DRIVE, image_height=64, image_width=64), parts=parts))
    doctor_verb = next(verb for verb in VERBS if verb.name == "doctor")
    found.speak(LineWords(doctor_verb, "%"))
    shown = repr(found)
    assert "%stage /content/drive/MyDrive/birds --to local/birds" in shown
    assert "data = %prepare /content/drive/MyDrive/birds --size 64 --encoding raw" in shown
    assert "loader = colabkit.Loader(data['train'], 64, shuffle=True)" in shown
    assert "colabkit.stage(" in found.to_dict()["advice"][-1]["call"] + found.to_dict()["advice"][0]["call"]


def test_saved_seconds_are_per_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    rules_that_give(monkeypatch, advised("twice", 1280.0))
    (advice,) = judge(made(facts=replace(GATHERED, samples=6400))).advice
    assert advice.saved_s == pytest.approx(5.0)
    (advice,) = judge(made(facts=replace(GATHERED, samples=None))).advice
    assert advice.saved_s is None


def test_only_a_run_limited_by_compute_needs_no_fix() -> None:
    assert repr(judge(made(wait=0.001))).splitlines() == [
        "Data keeps up: the step itself takes 99% of the time; 634 images/s in a typical step",
        "Data loading needs no fix",
    ]
    assert judge(made(wait=0.001)).needs_nothing
    assert not judge(made(other=0.1)).needs_nothing
    for wait in (0.1, 0.01):
        found = replace(judge(made(wait=wait)), advice=())
        assert repr(found).splitlines()[1:] == ["No advice"]
        assert not found.needs_nothing


def test_the_text_contains_verdict_speed_ceiling_and_numbered_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    rules_that_give(
        monkeypatch, replace(advised("one", 640.0), call="colabkit.stage('x')", check="look"), advised("two")
    )
    found = judge(made(wait=0.1, facts=replace(GATHERED, samples=6400)))
    assert repr(found).splitlines() == [
        "Training waits for data 50% of the time; 320 images/s in a typical step, "
        "640 images/s if data were always ready",
        "1. Do one (2.0 times as fast, saving 10.0 s per epoch): one was found",
        "   colabkit.stage('x')",
        "2. Do two: two was found",
    ]
    table = found.text_table()
    assert "waiting for data  50%  100 ms" in table
    assert "to check: look" in table


def test_huge_predicted_speedups_are_capped() -> None:
    found = judge(made(wait=0.1, compute=1e-7, facts=FOREIGN))
    assert "640 images/s in a typical step, over 64,000 images/s if data were always ready" in repr(found)
    assert "(over 100 times as fast" in repr(found)
    (more,) = [advice for advice in found.advice if advice.rule == "more_workers"]
    # The advised four workers, instead of two, would double the 640 images/s.
    assert more.samples_per_s == pytest.approx(1280, rel=0.01)


def test_more_workers_are_predicted_to_divide_the_wait() -> None:
    alone = made(wait=0.4, compute=0.1, facts=replace(FOREIGN, workers=0))
    (more,) = [advice for advice in judge(alone).advice if advice.rule == "more_workers"]
    assert more.samples_per_s == pytest.approx(640)
    slower = made(wait=1.2, compute=0.1, facts=replace(FOREIGN, workers=0))
    (more,) = [advice for advice in judge(slower).advice if advice.rule == "more_workers"]
    assert more.samples_per_s == pytest.approx(64 / 0.3)


def test_hostile_paths_are_only_text_in_html_json_and_terminal() -> None:
    path = "/content/drive/<script>alert(1)</script>\x1b[31m\n'\"&\udcff"
    parts = (part("read", 0.05, size=20_000), part("decode", 0.001, 0.001, 0.02))
    found = judge(made(wait=0.3, facts=replace(DRIVE, path=path), parts=parts))
    assert len(found.advice) >= 2
    html = found._repr_html_()
    assert "<script" not in html
    ET.fromstring(f"<div>{html}</div>")
    assert "\x1b" not in found.text_table()
    assert "\x1b" not in repr(found)
    assert json.loads(json.dumps(found.to_dict()))["advice"][0]["rule"] == found.advice[0].rule
    for advice in found.advice:
        check_call(advice.call)


def test_a_look_is_cheap_enough_for_two_per_second() -> None:
    noise = random.Random(7)
    steps = [StepTimes(noise.random(), 0.0, noise.random(), 0.0, 64) for _ in range(512)]
    spent, doctor = spent_of(steps, parts=(part("read", 0.05), part("decode", 0.01, 0.01))), Doctor()
    took = []
    for _ in range(5):
        began = time.process_time()
        doctor.look(spent, DRIVE, [with_gpu()] * 60)
        took.append(time.process_time() - began)
    assert min(took) < 0.02


def test_what_the_model_learns_comes_before_the_verdict_about_speed() -> None:
    falling, rising = [1.0, 0.6, 0.4, 0.2, 0.1], [1.0, 0.8, 1.1, 1.3, 1.7]
    overfits = made(wait=0.001, epochs=epochs_of(loss=falling, val_loss=rising))
    found = judge(overfits)
    assert found.sentence.startswith("The model overfits. Data keeps up: the step itself takes 99% of the time")
    assert found.advice[0].rule == "overfitting"
    rise = "the validation loss has risen from 0.8 after epoch 2 to 1.7, while the training loss falls"
    assert found.advice[0].found == rise
    early = judge(replace(overfits, is_enough=False), is_over=False)
    assert early.sentence.startswith("The model overfits. Measuring the first steps: ")
