"""Make tables and pictures from the results of `run.py`: `python tests/benchmarks/tables.py [--write]`.

Without `--write`, the script prints one table for each comparison in `tests/benchmarks/results/`. With `--write`, it
replaces the tables of the pages in `docs/` that stand between comments, and draws the pictures that comments name:

    <!-- table: loader/cifar -->
    <!-- end -->
    <!-- plot: click_to_trained/click docs/images/click-to-trained -->
    <!-- rows: click_to_trained/click 2,3,5 -->
    <!-- end -->

`rows` keeps a table and its names, and replaces the median and the range of each row by those of the systems with these
numbers, counted from 1. `loader/cifar` is the part `cifar` of `bench_loader.py`; `loader/cifar/2` is the second
comparison of this part. If a benchmark has no results, its tables and pictures stay unchanged. The names of pictures
end with `-light.svg` and `-dark.svg`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
PAGES = (ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").rglob("*.md")))
TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
ROWS = re.compile(r"<!-- rows: (\S+) ([\d,]+) -->\n.*?<!-- end -->", re.DOTALL)
PLOT = re.compile(r"<!-- plot: (\S+) (\S+) -->")

_MOST_REASON = 60
"""Maximum number of characters of the reason why a system has no values."""

FEWEST_PAIRS = 5
"""Number of rounds from which on a ratio has a confidence interval."""

Comparison: TypeAlias = Mapping[str, Any]
"""The values of several systems, one for each round: `part`, `title`, `unit`, `values` by name, the names in `base`
that the others are compared with, and `missing`, the reasons why systems have no values, by name."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder with the results")
    parser.add_argument("--write", action="store_true", help="write tables and pictures of the documentation")
    options = parser.parse_args()
    found = comparisons_in(options.results)
    if not found:
        sys.exit(f"Cannot make tables: no results in {str(options.results)!r}. Run tests/benchmarks/run.py first.")
    if not options.write:
        for key, comparison in found.items():
            print(f"\n{key}: {comparison['title']}; {comparison['conditions']}\n\n{markdown_of(comparison)}")
        return
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(with_tables(text, found), encoding="utf-8")
        for key, name in PLOT.findall(text):
            if key in found:
                draw(found[key], ROOT / name)


def comparisons_in(folder: Path) -> dict[str, Comparison]:
    """Return the comparisons of all results in a folder by `benchmark/part`, and `benchmark/part/number` from 2 on."""
    found: dict[str, Comparison] = {}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        numbers: dict[str, int] = {}
        for comparison in result["comparisons"]:
            part = comparison["part"]
            numbers[part] = number = numbers.get(part, 0) + 1
            key = f"{path.stem}/{part}" + (f"/{number}" if number > 1 else "")
            found[key] = comparison | {"conditions": result["machine"]}
    return found


def with_tables(text: str, found: Mapping[str, Comparison]) -> str:
    """Return the text of a page with the current table of each comparison that it names and that has results.

    The conditions stand below a table only if they differ from those of the table before.
    """
    last = ""

    def fresh(match: re.Match[str]) -> str:
        nonlocal last
        begin, key, end = match.groups()
        if key not in found:
            return match.group()
        before, last = last, found[key]["conditions"]
        conditions = "" if last == before else f"\n\nMeasured with {last}."
        return f"{begin}\n{markdown_of(found[key])}{conditions}\n\n{end}"

    def refilled(match: re.Match[str]) -> str:
        key, numbers = match.groups()
        if key not in found:
            return match.group()
        before, rule, rows = re.split(r"(\n\|[-|]+\|\n)", match.group())
        lines, systems = rows.split("\n"), [*found[key]["values"].values()]
        for line, number in enumerate(map(int, numbers.split(","))):
            name, _, some = lines[line].split(" | ")
            middle, least, most = spread(systems[number - 1])
            # The words for a single run depend on the language of the page.
            lines[line] = f"{name} | {middle} | {some if least == most else f'{least}–{most} |'}"
        return before + rule + "\n".join(lines)

    return ROWS.sub(refilled, TABLE.sub(fresh, text))


def markdown_of(comparison: Comparison) -> str:
    return "\n".join(lines_of(*cells_of(comparison)))


def cells_of(comparison: Comparison) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the header and the rows of a comparison: median, minimum, maximum, and the ratio to each base.

    A ratio is that of the medians of the same rounds.
    """
    values, missing = comparison["values"], comparison["missing"]
    bases = [name for name in comparison["base"] if values.get(name)]
    rows = []
    for name, some in values.items():
        if name in missing:
            rows.append((name, textwrap.shorten(missing[name], _MOST_REASON, placeholder=" ...")))
        elif some:
            rows.append((name, *spread(some), *(ratio_of(some, values[base]) for base in bases)))
    head = ("", f"{comparison['unit']}, median", "min", "max", *(f"times {base}" for base in bases))
    return head, rows


def ratio_of(values: Sequence[float], base: Sequence[float]) -> str:
    """Return the ratio of two medians as text, with a confidence interval if there are enough pairs of rounds."""
    return "1" if values is base else text_of_ratio(*measured_ratio(values, base))


def measured_ratio(values: Sequence[float], base: Sequence[float]) -> tuple[float, ...]:
    """Return the ratio of two medians, followed by its 95% interval if there are enough pairs of rounds."""
    if len(values) != len(base) or len(base) < FEWEST_PAIRS:
        return (statistics.median(values) / statistics.median(base),)
    return compared(values, base)


def text_of_ratio(ratio: float, *interval: float, form: str = "{:.3g}") -> str:
    """Return a ratio as text, followed by its confidence interval if there is one."""
    return form.format(ratio) + (" ({} to {})".format(*map(form.format, interval)) if interval else "")


def compared(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    """Return the ratio of medians and its 95% interval from 2,000 resamples of the rounds."""
    chance = random.Random(0)
    pairs = list(zip(before, after, strict=True))

    def ratio(rounds: list[tuple[float, float]]) -> float:
        return statistics.median(first for first, _ in rounds) / statistics.median(second for _, second in rounds)

    drawn = sorted(ratio(chance.choices(pairs, k=len(pairs))) for _ in range(2000))
    return ratio(pairs), drawn[50], drawn[-50]


def spread(values: Sequence[float], form: str = "") -> tuple[str, str, str]:
    """Return the median, minimum and maximum as text, by default with at least three digits."""
    three = statistics.median(values), min(values), max(values)
    return tuple(form.format(value) if form else text_of(value) for value in three)  # type: ignore[return-value]


def text_of(value: float) -> str:
    """Return a number as text: in full from 100 on, else with three digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def lines_of(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; rows may have fewer cells than the header."""
    lines = [[*row, *[""] * (len(head) - len(row))] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]
    return [shown[0], "|-" + "-|-".join("-" * width for width in widths) + "-|", *shown[1:]]


def draw(comparison: Comparison, path: Path) -> None:
    """Draw the medians as bars, with a line from the minimum to the maximum, for light and for dark pages."""
    from matplotlib import rc_context

    from colabkit.foundation import plotting

    values = {name: some for name, some in comparison["values"].items() if some and name not in comparison["missing"]}
    # Omit the conditions, for which a picture has no room; the page describes them.
    title = re.split("[:,;] ", comparison["title"])[0]
    for theme, color in {"light": "#1f2328", "dark": "#e6edf3"}.items():
        colors = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), color)
        with rc_context({**colors, "svg.fonttype": "none", "svg.hashsalt": "colabkit", "font.family": "sans-serif"}):
            figure = plotting.new_figure("plot the figures", 7.8, 0.6 + 0.36 * len(values))
            axes = figure.add_subplot()
            for row, (name, some) in enumerate(values.items()):
                middle, least, most = statistics.median(some), min(some), max(some)
                bar = plotting.BLUE if "colabkit" in name else plotting.GREY
                axes.barh(row, middle, color=bar, height=0.62)
                axes.plot([least, most], [row, row], color=color, linewidth=1.2)
                axes.annotate(text_of(middle), (most, row), (6, 0), textcoords="offset points", va="center")
            plotting.style_axes(axes, f"{title}, {comparison['unit']}", "")
            axes.set_yticks(range(len(values)), values, fontsize=9)
            axes.invert_yaxis()
            axes.grid(visible=False, axis="y")
            axes.margins(x=0.12)
            axes.tick_params(axis="y", length=0)
            data = plotting.encode_figure(figure, "svg", transparent=True, metadata={"Date": None})
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(f"{path.name}-{theme}.svg").write_bytes(data)


if __name__ == "__main__":
    main()
