"""For any known and unknown values: no rule fails, all advice is well-formed and consistent, and the verdict fits."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree as ET

from doctor_cases import FOREIGN, check_advice, made, spent_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colabkit.foundation import (
    BusyProcess,
    GpuSnapshot,
    HostSnapshot,
    LoaderFacts,
    LoopSpot,
    PartSnapshot,
    StepTimes,
    Stretch,
    ThreadsSnapshot,
)
from colabkit.monitoring.diagnosing import data_rules, host_rules, learning_rules, machine_rules, worker_rules
from colabkit.monitoring.diagnosing.diagnosis import Advice, Diagnosis
from colabkit.monitoring.diagnosing.machine_profile import GpuProfile, MachineProfile
from colabkit.monitoring.diagnosing.machine_rules import pageable_copies
from colabkit.monitoring.diagnosing.rules import RULES
from colabkit.monitoring.diagnosing.run_profile import RunProfile, profile_run
from colabkit.monitoring.diagnosing.verdict import judge

EXAMPLES = settings(suppress_health_check=list(HealthCheck))
# Advice of the first set contradicts advice of the second.
AGAINST = (
    ({"Use fewer workers or smaller batches, or remove data that is staged there"}, {"num_workers="}),
    ({"more workers will not help"}, {"Use 2 workers", "Use 4 workers", "Use 8 workers"}),
    ({"Use smaller batches"}, {"Use larger batches"}),
    ({"Remove staged data, since"}, {"to='tmpfs'"}),
)

share = st.one_of(st.none(), st.sampled_from([0.0, 0.3, 0.65, 0.9, 0.99, 1.0]), st.floats(0, 1))
seconds = st.one_of(st.just(0.0), st.floats(1e-6, 1e3))
size = st.one_of(st.none(), st.integers(0, 1 << 45))
rate = st.one_of(st.none(), st.just(0.0), st.floats(0, 1e12))
count = st.one_of(st.none(), st.integers(0, 3), st.integers(0, 10**7))
path = st.sampled_from([None, "/data/x.h5", "a table of paths", "/content/drive/a", "gs://a/b", "/it's <b>&'\n\ud800"])

facts_of = st.builds(
    LoaderFacts,
    kind=st.sampled_from(["gathered", "decoded", "processes", "device", "foreign"]),
    samples=count,
    batch_size=count,
    device=st.sampled_from(["cpu", "cuda:0"]),
    workers=count,
    sample_bytes=rate,
    path=path,
    source=path,
    is_remote=st.sampled_from([None, True, False]),
    files=count,
    encoding=st.sampled_from([None, "raw", "encoded", "python"]),
    tier=st.sampled_from([None, "gpu", "ram", "disk", "source"]),
    is_pinned=st.sampled_from([None, True, False]),
    keeps_workers=st.sampled_from([None, True, False]),
)
parts_of = st.lists(
    st.builds(
        PartSnapshot,
        name=st.sampled_from(["read", "decode", "augment", "gather", "samples", "transfer"]),
        samples=st.integers(0, 10**6),
        handled_bytes=st.integers(0, 1 << 40),
        busy_s=seconds,
        wait_s=seconds,
        calls=st.integers(0, 1000),
        cpu_s=seconds,
    ),
    max_size=4,
    unique_by=lambda part: part.name,
)
cpu_seconds = st.one_of(st.none(), seconds)
steps_of = st.lists(
    st.builds(StepTimes, seconds, seconds, seconds, seconds, st.integers(0, 300), st.booleans(), cpu_seconds),
    max_size=70,
)
stretches_of = st.lists(
    st.builds(Stretch, st.integers(1, 1000), st.integers(0, 10**6), st.floats(0.1, 1e4), seconds), max_size=5
).map(tuple)
spots_of = st.builds(
    LoopSpot,
    place=st.sampled_from(["train.py:42 in log_images", "line 3 of a cell", "it's <b>&'\n\ud800.py:1"]),
    text=st.sampled_from(["", "time.sleep(1)"]),
    kind=st.sampled_from(["data", "compute", "aside", "python", "call"]),
    samples=st.integers(1, 50),
    asleep=st.integers(0, 50),
)
threads_of = st.one_of(
    st.none(),
    st.builds(
        ThreadsSnapshot,
        training_cpu_rate=share,
        training_held_rate=share,
        held_rate=share,
        compute_cpus=share,
        busiest_thread=st.sampled_from([None, "refresher", "colabkit-loader-0", "it's <b>&'\n\ud800"]),
        busiest_thread_rate=share,
        gil_wait_s=st.one_of(st.none(), seconds),
        spots=st.lists(spots_of, max_size=3).map(tuple),
    ),
)
gpus_of = st.builds(
    GpuSnapshot,
    name=st.sampled_from([None, "Tesla T4", "NVIDIA A100-SXM4-40GB", "Tesla P100-PCIE-16GB"]),
    utilization_rate=share,
    used_bytes=size,
    total_bytes=size,
    torch_bytes=size,
    torch_reserved_bytes=size,
    slowed_by=st.sampled_from([(), ("power",), ("power", "heat"), ("something",)]),
    is_lost=st.booleans(),
)
hosts_of = st.builds(
    HostSnapshot,
    cpus=st.sampled_from([0.5, 1.0, 2.0, 8.0]),
    cpu_rate=share,
    own_cpu_rate=share,
    busiest_core_rate=share,
    ram_used_bytes=st.integers(0, 1 << 40),
    ram_total_bytes=st.integers(0, 1 << 40),
    tmpfs_bytes=size,
    storage_read_bytes_per_s=rate,
    disk_free_bytes=size,
    shm_free_bytes=size,
    shm_total_bytes=size,
    io_stall_rate=share,
    steal_rate=share,
    throttled_rate=share,
    other_process=st.sampled_from([None, BusyProcess("it's <b>&'\n\ud800, PID 3", 1.0)]),
    threads=threads_of,
    gpus=st.lists(gpus_of, max_size=2).map(tuple),
)
values_of = st.dictionaries(st.sampled_from(["loss", "val_loss", "accuracy"]), st.floats())
machines = st.builds(
    MachineProfile,
    cpus=st.sampled_from([0.4, 1.0, 2.0, 96.0]),
    cpu_rate=share,
    own_cpu_rate=share,
    children_cpu_rate=share,
    busiest_core_rate=share,
    ram_used=share,
    ram_total_bytes=size,
    ram_free_bytes=size,
    tmpfs_bytes=size,
    read_bytes_per_s=rate,
    disk_free_bytes=size,
    shm_free=share,
    io_stall_rate=share,
    gpu=st.one_of(
        st.none(),
        st.builds(
            GpuProfile,
            name=st.sampled_from([None, "Tesla T4"]),
            utilization_rate=share,
            used=share,
            torch_bytes=size,
            other_bytes=size,
            slowed=st.floats(0, 1),
            slowed_by=st.sampled_from([(), ("power",)]),
            is_lost=st.booleans(),
        ),
    ),
)


@st.composite
def cases(draw: st.DrawFn) -> RunProfile:
    """Draw a case: consistent values of meters and telemetry, or random inconsistent ones."""
    steps = draw(steps_of)
    spent = spent_of(
        steps,
        parts=tuple(draw(parts_of)),
        passes=draw(st.integers(0, 5)),
        retries=draw(st.integers(0, 3)),
        validate_s=draw(seconds),
        save_s=draw(seconds),
        stretches=draw(stretches_of),
        rank_waits=tuple(draw(st.lists(st.floats(0, 1), max_size=4))),
    )
    case = profile_run(
        spent,
        draw(st.one_of(st.none(), facts_of)),
        draw(st.lists(hosts_of, max_size=3)),
        cost_share=draw(share),
        precision=draw(st.sampled_from([None, "fp32", "bf16", "fp16"])),
    )
    case = replace(case, epochs=[*enumerate(draw(st.lists(values_of, max_size=14)), 1)], values=draw(values_of))
    if draw(st.booleans()):
        late, slowdown = draw(st.floats(0, 1)), draw(st.floats(0, 100))
        case = replace(case, machine=draw(machines), late=late, slowdown=slowdown, is_enough=True)
    return case


@EXAMPLES
@given(cases())
def test_no_rule_fails_and_all_advice_is_well_formed(case: RunProfile) -> None:
    for rule in RULES:
        advice = rule(case)
        assert advice is None or isinstance(advice, Advice)
        if advice is not None:
            assert advice.rule == rule.name
            check_advice(advice)


@EXAMPLES
@given(cases())
def test_the_verdict_is_not_data_if_data_costs_less_than_a_sixth(case: RunProfile) -> None:
    found = judge(case)
    if case.input_share < 0.17:
        assert found.verdict != "data"
        assert "Training waits for data only " in found.sentence or "Training waits for data" not in found.sentence


@EXAMPLES
@given(cases())
def test_a_diagnosis_is_short_ordered_and_consistent(case: RunProfile) -> None:
    found = judge(case)
    assert len(found.advice) <= 3
    assert len({advice.rule for advice in found.advice}) == len(found.advice)
    if not case.is_enough:
        assert found.verdict == "unknown"
        assert {advice.rule for advice in found.advice} <= {"not_finite", "divergence", "overfitting", "plateau"}
    for advice in found.advice:
        assert advice.samples_per_s is None or advice.samples_per_s >= 1.03 * found.samples_per_s
        assert advice.saved_s is None or advice.saved_s >= 0
    check_agreement(found)


@EXAMPLES
@given(cases())
def test_every_diagnosis_can_be_displayed_and_serialized(case: RunProfile) -> None:
    found = judge(case)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["verdict"] == found.verdict
    assert repr(found)
    assert found.text_table()
    ET.fromstring(f"<div>{markup(found)}</div>")


def markup(found: Diagnosis) -> str:
    """Return the HTML of a diagnosis without unprintable characters, some of which are invalid in XML."""
    return "".join(char for char in found._repr_html_() if char.isprintable())


def test_the_contradictions_use_the_words_of_the_rules() -> None:
    source = "".join(map(inspect.getsource, (data_rules, worker_rules, host_rules, machine_rules, learning_rules)))
    for ones, _ in AGAINST:
        for one in ones:
            assert one.removesuffix(", since") in source, one


def check_agreement(found: Diagnosis) -> None:
    texts: list[Any] = [f"{advice.found} {advice.action} {advice.call}" for advice in found.advice]
    for ones, others in AGAINST:
        for place, text in enumerate(texts):
            if any(one in text for one in ones):
                rest = " ".join(texts[:place] + texts[place + 1 :])
                assert not any(other in rest for other in others), texts


def test_pin_memory_is_advised_to_a_third_party_loader_with_pageable_memory() -> None:
    foreign = replace(FOREIGN, device="cuda:0", is_pinned=False)
    advice = pageable_copies(made(facts=foreign))
    assert advice is not None
    assert advice.samples_per_s is None
    check_advice(advice)
    assert pageable_copies(made(facts=replace(foreign, is_pinned=None))) is None
    assert pageable_copies(made(facts=replace(foreign, device="cpu"))) is None
