"""Measure how often the doctor is right: on traces with known answers, and on real runs with a planted bottleneck.

    python tests/benchmarks/bench_doctor.py [--only traces,runs,advice,scripts,cost] [--json out.json]

The verdict of a run must be the planted bottleneck. The predicted speed after the fix is compared with the measured
speed; each is the median of three to nine rounds in which the slow and the fixed run alternate. The requirements apply
to the prediction of `doctor(loader, headspace=headspace(step, loader))`. The benchmark also reports the prediction
without `headspace()`, and how well the fixed runs agree with each other. Each scenario runs in a new process and takes
one to three minutes; scenarios with a slow drive need FUSE.

The part `advice` follows each piece of advice: with `apply()`, by running the printed code, or, where only the user can
follow it, by the fixed run. It compares the measured gain with the printed limits. Advice to remove work that the run
does not do counts as outside its limits. The part `scripts` runs ten training scripts of the folder slow_scripts, each
with a known cause of its slowness, and the same scripts after following the doctor's advice. The part `cost` measures
the CPU time that watching adds to a step, separately in the loop, in the sampler's thread, and at the start of the
sampler. The sampler may use 0.04 CPU seconds once, before its share of a CPU is limited, so the benchmark lets it use
them before it measures.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from doctor_host_work import in_python
from doctor_runs import RUNS, results_of
from doctor_scripts import SCRIPTS, run_script
from doctor_scripts import is_right as is_diagnosed
from doctor_traces import TRACES
from rounds import Bench, child, table, timed, verdict

import colabkit
from colabkit.foundation import sampled

DEADLINE_S, JOIN_S = 300, 10
SCRIPT_ROUNDS = 2
# A snapshot of the machine is taken every 10 to 20 s, so the cost of watching is a mean over a minute.
COST_ROUNDS, SIDE, STEP_S = 16, 256, 0.01
# Prints the CPU seconds of a process from the start of the sampler to the first snapshot.
START = """
import json, time, torch, colabkit
from colabkit.foundation import sampled
before_s = time.process_time()
with sampled() as sampler:
    while sampler.latest is None:
        time.sleep(0.01)
print(json.dumps({"cpu_s": time.process_time() - before_s}))
"""
CLOSE = 0.15
# The CPU seconds that a sampler may use before its share of a CPU is limited, and the time within which it uses them.
FREE_S, ALLOWANCE_S = 0.04, 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", default="", help="only runs whose name contains this text")
    parser.add_argument("--script", default="", help="only slow scripts whose name contains this text")
    quick = {"run": "decoding, a light step", "script": "tiny_batches"}
    Bench.main(
        parser,
        {
            "traces": judge_traces,
            "runs": judge_runs,
            "advice": follow_advice,
            "scripts": judge_scripts,
            "cost": measure_cost,
        },
        rounds=1,
        quick=quick,
    )


def judge_traces(bench: Bench) -> None:
    traces = [trace_row(trace) for trace in TRACES]
    table("Traces", ("", "right", "found", "advice", ""), [row[:5] for row in traces])
    bench.figures["traces"] = traces


def judge_runs(bench: Bench) -> None:
    """Diagnose real runs; if traces were diagnosed before, check the requirements for both."""
    runs = [run_of(run.name, bench.folder / "data") for run in RUNS if bench.options.run in run.name]
    bench.figures["runs"] = runs
    shown = [found for found in runs if "missing" not in found]
    if shown:
        headings = (
            "",
            "right",
            "found",
            "wait, copy, step, other",
            "advice",
            "images/s",
            "predicted",
            "with headspace",
            "after",
            "off by",
            "with headspace",
        )
        table("Real runs", headings, [run_row(found) for found in shown])
    bench.failed += [f"{found['name']}: {found['missing']}" for found in runs if "missing" in found]
    measured = [found["rounds"]["mended"] for found in shown if off_by(found) is not None]
    if bench.figures.get("traces") and measured:
        bench.verdicts += needed(bench.figures["traces"], shown)
    if measured:
        share = statistics.mean(map(agreement, measured))
        plain = [abs(off) for found in shown if off_by(found) and (off := off_by(found, "predicted"))]
        print(
            f"\n(Of predictions without headspace(), {sum(o <= CLOSE for o in plain)} of {len(plain)} are within 15%.)"
        )
        print(
            f"\n(Medians of two rounds of a fixed run agree with its other rounds within 15% in {share:.0%} of cases.)"
        )


def follow_advice(bench: Bench) -> None:
    """Follow the advice about real runs, and compare the gains with the printed limits."""
    rows = []
    for run in RUNS:
        if run.rules and bench.options.run in run.name:
            found = in_process(results_of, run.name, bench.folder / "data", True)
            rows += [{"name": run.name, **row} for row in found.get("advice", [])]
            bench.failed += [f"{run.name}: {found['missing']}"] if "missing" in found else []
            print(f"  {run.name}: {found.get('missing', '')}", file=sys.stderr, flush=True)
            for row in found.get("advice", []):
                print("   ", *gain_row({"name": "", **row}), file=sys.stderr, flush=True)
    bench.figures["advice"] = rows
    headings = ("", "advice", "predicted gain", "measured", "by", "")
    table("Advice", headings, [gain_row(row) for row in rows])
    judged = [row for row in rows if row["limits"]]
    others = [f"{row['name']}: {row['gain']:.2f}" for row in rows if not row["limits"]]
    print(f"\n({len(rows)} pieces of advice, all followed. Gains of those without limits: {'; '.join(others)}.)")
    if judged:
        share = statistics.mean(map(is_within, judged))
        bench.need(f"share of {len(judged)} gains within the printed limits", share, 0.85, "{:.2f}")


def gain_row(row: dict[str, Any]) -> tuple[str, ...]:
    limits = "{:.2f}-{:.2f}".format(*row["limits"]) if row["limits"] else ""
    note = "OUTSIDE" if limits and not is_within(row) else ""
    return row["name"], row["rule"], limits, f"{row['gain']:.2f}", row["how"], note


def is_within(row: dict[str, Any]) -> bool:
    low, high = row["limits"]
    return low <= row["gain"] <= high and "is_wrong" not in row


def judge_scripts(bench: Bench) -> None:
    """Diagnose slow scripts, and compare their speeds with those of the scripts fixed by the doctor's advice."""
    rows, right = [], []
    for script in SCRIPTS:
        if bench.options.script not in script.name:
            continue
        runs: dict[str, list[dict[str, Any]]] = {"slow": [], "fixed": []}
        for _ in range(1 if bench.options.quick else SCRIPT_ROUNDS):
            for variant, found in runs.items():
                found.append(in_process(run_script, script.name, variant, bench.folder))
        bench.figures[script.name] = runs
        missing = [found["missing"] for found in (*runs["slow"], *runs["fixed"]) if "missing" in found]
        if missing:
            bench.failed.append(f"{script.name}: {missing[0]}")
            continue
        slow = runs["slow"][0]
        right.append(is_diagnosed(script, slow))
        ratios = [new["speed"] / old["speed"] for old, new in zip(runs["slow"], runs["fixed"], strict=True)]
        rules = ", ".join(one["rule"] for one in slow["advice"]) or "none"
        note = "" if right[-1] else "WRONG"
        rows.append((script.name, slow["verdict"], rules, f"{statistics.median(ratios):.2f}", note))
        print("  " + "; ".join(rows[-1]), file=sys.stderr, flush=True)
    table("Slow scripts", ("", "verdict", "advice", "fixed, times as fast", ""), rows)
    if right:
        needed = 0.8 * len(right)
        bench.need(f"of {len(right)} scripts with the right cause and fix", sum(right), needed, "{:.0f}")


def measure_cost(bench: Bench) -> None:
    """Measure the CPU time of watching: in the loop between two steps, in the sampler's thread, and at the start."""
    started = child([sys.executable, "-c", START], DEADLINE_S)
    bench.figures["CPU seconds of the sampler's start"] = started
    print(f"\n(Start of the sampler: {1e3 * started['cpu_s']:.0f} ms of CPU time, once.)")
    factor = torch.rand(SIDE, SIDE)
    products = round(STEP_S / usual_s(lambda: torch.mm(factor, factor)))
    thousands = round(STEP_S / usual_s(lambda: in_python(1000)))
    works: dict[str, tuple[Callable[[], object], int, float]] = {
        "a small step": (lambda: in_python(100), 30_000, 20.0),
        "a step of 10 ms in Python": (lambda: in_python(1000 * thousands), 300, 50.0),
        "a step of 10 ms in torch": (lambda: [torch.mm(factor, factor) for _ in range(products)], 300, 50.0),
    }
    rows = []
    for name, (work, steps, most_us) in works.items():
        steps = 20 if bench.options.quick else steps  # noqa: PLW2901
        batches = [(torch.zeros(4, 2), torch.zeros(4))] * steps
        rounds = 1 if bench.options.quick else COST_ROUNDS
        plain = [between_steps_s(batches, work) for _ in range(rounds)]
        with sampled():
            if not bench.options.quick:
                use_up_the_allowance(work)
            watched = [watched_costs(batches, work) for _ in range(rounds)]
        # The speed of the machine may change meanwhile.
        plain_s = statistics.median(plain + [between_steps_s(batches, work) for _ in range(rounds)]) / steps
        costs = [(loop_s - plain_s, sampler_s, step_s) for loop_s, sampler_s, step_s in watched]
        bench.figures[f"cost of {name}, in us"] = costs
        loop_us, sampler_us, step_us = (1e6 * statistics.mean(values) for values in zip(*costs, strict=True))
        rows.append((name, *(f"{value:,.1f}" for value in (step_us, loop_us, sampler_us, loop_us + sampler_us))))
        bench.need(f"cost of watching {name}, in us", loop_us + sampler_us, most_us, "{:.1f}", at_most=True)
    headings = ("", "step, us of wall time", "watching, in the loop", "in the sampler's thread", "together")
    table("Cost of watching a step, in us of CPU time", headings, rows)


def use_up_the_allowance(work: Callable[[], object]) -> None:
    """Work until the sampler is limited to its share of a CPU, which the first CPU seconds do not count towards."""
    began_s = time.monotonic()
    while sampler_cpu_s() < FREE_S and time.monotonic() < began_s + ALLOWANCE_S:
        work()


def watched_costs(batches: Sequence[Any], work: Callable[[], object]) -> tuple[float, float, float]:
    """Return the CPU seconds per step of the watched loop between steps and of the sampler's thread, and the step's."""
    began_s, cpu_s = time.perf_counter(), sampler_cpu_s()
    watched_s = between_steps_s(colabkit.watch(batches), work)
    passed_s, sampler_s = time.perf_counter() - began_s, sampler_cpu_s() - cpu_s
    return watched_s / len(batches), sampler_s / len(batches), passed_s / len(batches)


def between_steps_s(loader: Iterable[Any], work: Callable[[], object]) -> float:
    """Return the CPU seconds that the thread of the loop spends between steps, where the cost of watching arises."""
    total_s, left_s = 0.0, None
    for _ in loader:
        given_s = time.thread_time()
        total_s += 0.0 if left_s is None else given_s - left_s
        work()
        left_s = time.thread_time()
    return total_s


def sampler_cpu_s() -> float:
    """Return the CPU seconds that the kernel has counted for the sampler's thread."""
    thread = next(thread for thread in threading.enumerate() if thread.name == "colabkit-telemetry")
    return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9


def usual_s(work: Callable[[], object]) -> float:
    """Return the median duration of some work over about a second, in seconds."""
    return statistics.median(timed(work) for _ in range(max(20, round(1 / timed(work)))))


def trace_row(trace: Any) -> tuple[str, str, str, str, str, bool]:
    """Return the table row of a trace, and whether the verdict is right."""
    found = trace.judge()
    rules = [advice.rule for advice in found.advice]
    is_right = found.verdict == trace.verdict
    is_advised = trace.rule in rules if trace.rule else not rules
    note = "" if is_right and is_advised else "WRONG" if not is_right else "other advice"
    return trace.name, trace.verdict, found.verdict, ", ".join(rules) or "none", note, is_right


def run_of(name: str, folder: Path) -> dict[str, Any]:
    found = {"name": name, **in_process(results_of, name, folder)}
    print("  " + ("; ".join(run_row(found)) if "verdict" in found else name), file=sys.stderr, flush=True)
    return found


def in_process(work: Callable[..., dict[str, Any]], *arguments: object) -> dict[str, Any]:
    """Return the results of a function called in a new process, or, under `missing`, the reason why there are none."""
    # Importing torch, which takes longer than some runs, is done once, by a process that all others are forked from.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["doctor_runs"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send_results, args=(sender, multiprocessing.get_start_method(), work, arguments))
    process.start()
    sender.close()
    try:
        found: dict[str, Any] = receiver.recv() if receiver.poll(DEADLINE_S) else {"missing": "not finished in time"}
    except EOFError:
        found = {"missing": "its process ended without results"}
    process.join(JOIN_S)
    process.kill()
    return found


def send_results(
    sender: Connection, start_method: str, work: Callable[..., dict[str, Any]], arguments: Sequence[object]
) -> None:
    # Otherwise DataLoader's workers, too, would come from a fork server, and each would import torch.
    multiprocessing.set_start_method(start_method, force=True)
    try:
        sender.send(work(*arguments))
    except Exception as error:
        sender.send({"missing": f"{type(error).__name__}: {error}"})


def run_row(found: dict[str, Any]) -> tuple[str, ...]:
    shares = "/".join(f"{100 * share:.0f}" for share in found["shares"][0].values())
    return (
        found["name"] + ("" if is_right(found) else "  WRONG"),
        found["right"],
        found["verdict"],
        shares,
        (", ".join(found["advice"]) or "none") + ("" if found["is_advised"] else "  (another was expected)"),
        f"{found['speed']:,.0f}",
        *(f"{found[speed]:,.0f}" if found[speed] else "" for speed in ("predicted", "expected", "mended")),
        *("" if (off := off_by(found, speed)) is None else f"{100 * off:+.0f}%" for speed in ("predicted", "expected")),
    )


def is_right(found: dict[str, Any]) -> bool:
    return bool(found["verdict"] == found["right"])


def is_missed(found: dict[str, Any]) -> bool:
    """Return whether the doctor blames the step and gives no advice, although the fix makes the run twice as fast."""
    is_slow = bool(found["mended"]) and found["mended"] >= 2 * found["speed"]
    return is_slow and found["verdict"] == "compute" and not found["advice"]


def off_by(found: dict[str, Any], speed: str = "expected") -> float | None:
    """Return the relative error of a predicted speed; None if there is no prediction.

    Args:
        found: results of a run.
        speed: `"expected"`, with `headspace()`, or `"predicted"`, without.
    """
    if not found[speed] or not found["mended"]:
        return None
    return float(found[speed] / found["mended"] - 1)


def agreement(speeds: list[float]) -> float:
    """Return the share of pairs of rounds whose median is within 15% of the other rounds' median."""
    pairs = list(itertools.combinations(range(len(speeds)), 2))
    close = 0
    for pair in pairs:
        others = statistics.median(speed for number, speed in enumerate(speeds) if number not in pair)
        close += abs(statistics.median(speeds[number] for number in pair) / others - 1) <= CLOSE
    return close / len(pairs)


def needed(traces: list[Any], runs: list[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    right = sum(row[5] for row in traces) + sum(map(is_right, runs))
    clean = [found for found in runs if found["right"] == "compute"]
    offs = [abs(off) for found in runs if (off := off_by(found)) is not None]
    inside = [low <= found["mended"] <= high for found in runs if found["mended"] for low, high in found["limits"]]
    sums = [abs(sum(shares.values()) - 1) for found in runs for shares in found["shares"]]
    counted = [abs(share - 1) for found in runs for share in found["counted"]]
    rounds = [output == found["right"] for found in runs for output in found["verdicts"]]
    return [
        verdict("scenarios", float(len(traces) + len(runs)), 90, "{:.0f}", at_most=False),
        verdict("share of right verdicts", right / (len(traces) + len(runs)), 0.95, "{:.3f}", at_most=False),
        verdict(
            "share of right verdicts in all rounds of real runs",
            sum(rounds) / len(rounds),
            0.95,
            "{:.3f}",
            at_most=False,
        ),
        verdict("clean runs not called clean", float(sum(not is_right(f) for f in clean)), 0, "{:.0f}", True),
        verdict("slow runs called clean", float(sum(is_missed(f) for f in runs)), 0, "{:.0f}", True),
        verdict(
            f"share of {len(offs)} predictions within 15%, with headspace()",
            sum(o <= CLOSE for o in offs) / len(offs),
            0.9,
            "{:.2f}",
            False,
        ),
        verdict(
            f"or share of {len(inside)} true speeds within the printed limits",
            sum(inside) / len(inside),
            0.9,
            "{:.2f}",
            False,
        ),
        verdict("shares of a step: deviation of their sum from 1", max(sums), 0.01, "{:.4f}", at_most=True),
        verdict("all steps: deviation of their sum from the clock's time", max(counted), 0.01, "{:.4f}", at_most=True),
    ]


if __name__ == "__main__":
    main()
