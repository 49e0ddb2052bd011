"""Measure how often the doctor is right: on traces with known answers, and on real runs with a planted bottleneck.

    python tests/benchmarks/bench_doctor.py [--only traces,runs,advice,cost] [--json out.json]

The verdict of a run must be the planted bottleneck. The predicted speed after the fix is compared with the measured
speed; each is the median of three to nine rounds in which the slow and the fixed run alternate. The requirements apply
to the prediction of `doctor(loader, headspace=headspace(step, loader))`. The benchmark also reports the prediction
without `headspace()`, and how well the fixed runs agree with each other. Each scenario runs in a new process and takes
one to three minutes; scenarios with a slow drive need FUSE.

The part `advice` follows each piece of advice that predicts a gain, with `apply()` or, where only the user can follow
it, by the fixed run, and compares the measured gain with the printed limits. The part `cost` measures the CPU time that
watching adds to a step.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from typing import Any

import torch
from doctor_host_work import in_python
from doctor_runs import RUNS
from doctor_traces import TRACES
from rounds import HERE, Bench, child, table, verdict

import colabkit
from colabkit.foundation import sampled

DEADLINE_S = 300
COST_ROUNDS = 7
CLOSE = 0.15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", default="", help="only runs whose name contains this text")
    quick = {"run": "decoding, a light step"}
    Bench.main(
        parser,
        {"traces": judge_traces, "runs": judge_runs, "advice": follow_advice, "cost": measure_cost},
        rounds=1,
        quick=quick,
    )


def judge_traces(bench: Bench) -> None:
    traces = [trace_row(trace) for trace in TRACES]
    table("Traces", ("", "right", "found", "advice", ""), [row[:5] for row in traces])
    bench.figures["traces"] = traces


def judge_runs(bench: Bench) -> None:
    """Diagnose real runs; if traces were diagnosed before, check the requirements for both."""
    runs = [run_of(run.name) for run in RUNS if bench.options.run in run.name]
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
    rows = []
    for run in RUNS:
        if run.rules and bench.options.run in run.name:
            command = [sys.executable, HERE / "doctor_runs.py", run.name, "--advice"]
            found = child(command, DEADLINE_S)
            rows += [{"name": run.name, **row} for row in found.get("advice", [])]
            print(f"  {run.name}: {found.get('missing', len(found.get('advice', [])))}", file=sys.stderr, flush=True)
    bench.figures["advice"] = rows
    shown = [
        (
            row["name"],
            row["rule"],
            f"{row['low']:.2f}-{row['high']:.2f}",
            f"{row['gain']:.2f}",
            row["how"],
            "" if row["low"] <= row["gain"] <= row["high"] else "OUTSIDE",
        )
        for row in rows
    ]
    table("Advice", ("", "advice", "predicted gain", "measured", "by", ""), shown)
    if rows:
        share = statistics.mean(row["low"] <= row["gain"] <= row["high"] for row in rows)
        bench.need(f"share of {len(rows)} gains within the printed limits", share, 0.85, "{:.2f}")


def measure_cost(bench: Bench) -> None:
    """Measure the CPU time of steps with and without watching in interleaved rounds."""
    for name, work, steps, most_us in (("a small step", 100, 30_000, 20.0), ("a step of 10 ms", 200_000, 150, 50.0)):
        batches = [torch.zeros(4, 2)] * steps
        costs = []
        for _ in range(COST_ROUNDS):
            with sampled():
                watched_s = cpu_seconds_of(colabkit.watch(batches), work)
            costs.append(1e6 * (watched_s - cpu_seconds_of(batches, work)) / steps)
        bench.figures[f"cost of {name}, in us"] = costs
        bench.need(f"cost of watching {name}, in us", statistics.median(costs), most_us, "{:.1f}", at_most=True)


def cpu_seconds_of(loader: Any, work: int) -> float:
    """Return the CPU seconds of this process for one pass, including the thread that watches the machine."""
    began_s = time.process_time()
    for _ in loader:
        in_python(work)
    return time.process_time() - began_s


def trace_row(trace: Any) -> tuple[str, str, str, str, str, bool]:
    """Return the table row of a trace, and whether the verdict is right."""
    found = trace.judge()
    rules = [advice.rule for advice in found.advice]
    is_right = found.verdict == trace.verdict
    is_advised = trace.rule in rules if trace.rule else not rules
    note = "" if is_right and is_advised else "WRONG" if not is_right else "other advice"
    return trace.name, trace.verdict, found.verdict, ", ".join(rules) or "none", note, is_right


def run_of(name: str) -> dict[str, Any]:
    found = {"name": name, **child([sys.executable, HERE / "doctor_runs.py", name], DEADLINE_S)}
    print("  " + ("; ".join(run_row(found)) if "verdict" in found else name), file=sys.stderr, flush=True)
    return found


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
