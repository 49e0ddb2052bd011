"""Run the fault scoreboard: `python -m tests.faults`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

# Limit numerical libraries to one thread, because cases run in forks, which lack other threads.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
_DOUBLES = str(Path(__file__).parents[1] / "doubles")
sys.path.insert(0, _DOUBLES)
# Pass on the search path, because the processes that run the rows need the same one.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_DOUBLES, os.environ.get("PYTHONPATH"))))

from tests.faults import board  # noqa: E402 - the path must be set first

SHORT_SEQUENCES, SEQUENCES = 5, 100
SHORT_LIMIT, LIMIT, PLAIN_LIMIT = 4, 200, 12

PAGE = """# The fault scoreboard

`python -m tests.faults` provokes each of these faults in many cases, as root on Linux, and prints this table. The
outcome of a case is one of:

- SURVIVED: the result is correct without any action of the user.
- DEGRADED: the work finished, and the report lists everything that it left out.
- REFUSED: a typed error; earlier results are unchanged, and no unfinished files are left.
- WRONG: a wrong result without an error, an untyped error, a crash, a hang, a leak, or unfinished files.

The last column shows the worst outcome of plain tools that meet the same fault in fewer cases.

{table}

{summary}
"""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description="Provoke faults, and print how colabkit and plain tools come through them.",
    )
    parser.add_argument("--short", action="store_true", help=f"only {SHORT_LIMIT} cases of each fault, no plain tools")
    parser.add_argument("--rows", type=int, nargs="+", metavar="N", help="only these rows")
    parser.add_argument("--limit", type=int, help=f"maximum number of cases of a row; by default {LIMIT}")
    parser.add_argument("--no-plain", action="store_true", help="leave out the plain tools")
    parser.add_argument("--sequences", type=int, help="number of random sequences of calls and faults after all rows")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="number of concurrent processes")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the page of the table to this file")
    parser.add_argument("--verbose", action="store_true", help="print every case")
    return parser.parse_args()


def _note(score: board.Score, is_verbose: bool) -> None:
    took = f"{len(score.results):4} cases {score.seconds:6.1f} s"
    title = board.ROWS[score.number].title
    print(f"{score.number:2} {score.tool:15} {score.shown:12} {took}  {title}", flush=True)
    if score.not_run:
        print(f"     {score.not_run}", flush=True)
    for result in score.results:
        is_wrong = result.outcome == board.Outcome.WRONG
        if is_verbose or (is_wrong and score.tool == board.COLABKIT):
            print(f"     {result.outcome.name}: {result.case}: {result.detail}", flush=True)


def main() -> int:
    """Run the rows, print the scoreboard, and return 1 if colabkit has a wrong outcome."""
    arguments = _arguments()
    board.load_rows()
    started = time.monotonic()
    scores = board.run_rows(
        arguments.rows or sorted(board.ROWS),
        arguments.limit or (SHORT_LIMIT if arguments.short else LIMIT),
        0 if arguments.short or arguments.no_plain else PLAIN_LIMIT,
        arguments.jobs,
        lambda score: _note(score, arguments.verbose),
    )
    table, summary = board.table(scores), board.summary(scores)
    print(f"\n{table}\n\n{summary} ({time.monotonic() - started:.0f} s)")
    if arguments.table:
        arguments.table.write_text(PAGE.format(table=table, summary=summary))
    if not arguments.rows or arguments.sequences:
        # Import here, because the processes of the rows import this module but do not need hypothesis.
        from tests.faults import machine

        machine.run(arguments.sequences or (SHORT_SEQUENCES if arguments.short else SEQUENCES))
    own = [score for score in scores if score.tool == board.COLABKIT]
    return int(any(result.outcome == board.Outcome.WRONG for score in own for result in score.results))


if __name__ == "__main__":
    sys.exit(main())
