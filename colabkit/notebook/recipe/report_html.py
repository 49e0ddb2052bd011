"""The report of `train_on()` as HTML: inline styles only, pictures as data URLs, no scripts, in the theme's colors.

No information is shown by color alone: wrong predictions have a cross and a dashed frame, and cells of the confusion
matrix have numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from colabkit.foundation import escape, plotting
from colabkit.monitoring import draw_curves
from colabkit.notebook.recipe.predictions import SamplePrediction, percent

if TYPE_CHECKING:
    from colabkit.notebook.recipe.report import TrainOnReport

# With more classes, only the most frequent mistakes are listed.
_LARGEST_MATRIX = 20
_BESIDE_MATRIX, _WITHOUT_MATRIX = 6, 15
_NAME_CHARS = 18
_SHORT_CHARS = 3
_TEXT = "var(--jp-ui-font-color1,var(--colab-primary-text-color,var(--vscode-foreground,inherit)))"
_LINE = "var(--jp-border-color2,var(--colab-border-color,var(--vscode-panel-border,#8886)))"
_FAINT = "opacity:.72"
_ONE_LINE = "white-space:nowrap;overflow:hidden;text-overflow:ellipsis"
_MONO = "font:12px/18px ui-monospace,monospace;background:none;color:inherit"
# Red, green and blue of `plotting.BLUE` and `plotting.VERMILLION`.
_RIGHT, _WRONG = "0,114,178", "213,94,0"
_CELL = (
    "border:0;padding:0;text-align:center;height:24px;min-width:26px;background:none;font-weight:normal;"
    "white-space:nowrap"
)


def as_html(report: TrainOnReport) -> str:
    """Return the report as HTML."""
    epochs = [(record.epoch + 1, record.shown) for record in report.training.epochs]
    mistakes = _samples(report.mistakes)
    return (
        "<div role='group' aria-label='Training result' style='box-sizing:border-box;max-width:760px;padding:14px 18px;"
        f"border:1px solid {_LINE};border-radius:8px;color:{_TEXT};font:13px/18px system-ui,sans-serif;"
        "font-variant-numeric:tabular-nums;overflow-wrap:anywhere'>"
        f"<div style='font-weight:600;font-size:16px;line-height:22px'>{escape(report.headline)}</div>"
        f"<div style='{_FAINT}'>{escape(report.circumstances)}</div>"
        f"{_notes(report.notes)}{draw_curves(epochs)}"
        f"{_section('Held-out images, chosen at random', _samples(report.predictions))}"
        f"{_section('Mistakes with the highest probability', mistakes) if mistakes else ''}"
        f"{_confusion(report)}{_next(report)}{_choices(report)}</div>"
    )


def _section(title: str, inside: str, note: str = "") -> str:
    note = f" <span style='font-weight:normal;{_FAINT}'>{escape(note)}</span>" if note else ""
    return f"<div style='font-weight:600;margin:18px 0 6px'>{escape(title)}{note}</div>{inside}"


def _folded(title: str, inside: str) -> str:
    return (
        f"<details style='margin-top:4px'><summary style='cursor:pointer'>{escape(title)}</summary>{inside}</details>"
    )


def _list(lines: Iterable[str]) -> str:
    items = "".join(f"<li style='margin:0'>{line}</li>" for line in lines)
    return f"<ul style='margin:4px 0 0;padding-left:18px'>{items}</ul>"


def _notes(notes: Sequence[str]) -> str:
    style = f"border-left:3px solid {plotting.VERMILLION};padding-left:8px;margin-top:8px"
    return "".join(f"<div style='{style}'>{escape(note[:1].upper() + note[1:])}</div>" for note in notes)


def _samples(shown: Sequence[SamplePrediction]) -> str:
    tiles = "".join(map(_tile, shown))
    return f"<div style='display:flex;flex-wrap:wrap;gap:10px 8px'>{tiles}</div>" if tiles else ""


def _tile(one: SamplePrediction) -> str:
    sign, line, color = ("✓", "solid", plotting.BLUE) if one.is_right else ("✗", "dashed", plotting.VERMILLION)
    is_small = one.picture.startswith("data:image/png")
    shape = (
        "display:block;width:100%;aspect-ratio:1;object-fit:cover;box-sizing:border-box;border-radius:4px;"
        f"border:2px {line} {color};image-rendering:{'pixelated' if is_small else 'auto'}"
    )
    alt = escape(f"{one.label}, predicted {one.predicted}")
    lines = [f"<b>{sign}</b> {escape(one.predicted)}"]
    lines += [] if one.is_right else [f"is {escape(one.label)}"]
    lines += [f"{percent(one.probability, 0)} sure"]
    below = "".join(
        f"<div style='{_ONE_LINE}{f';{_FAINT}' if place else ''}'>{line}</div>" for place, line in enumerate(lines)
    )
    picture = f"<img alt='{alt}' title='{alt}' src='{one.picture}' style='{shape}'/>"
    return f"<div style='width:82px;font-size:12px;line-height:16px'>{picture}{below}</div>"


def _confusion(report: TrainOnReport) -> str:
    has_matrix = len(report.classes) <= _LARGEST_MATRIX
    pairs = report.confused(_BESIDE_MATRIX if has_matrix else _WITHOUT_MATRIX)
    named = [(escape(_clipped(label)), escape(_clipped(one)), count, whole) for label, one, count, whole in pairs]
    mistakes = _list(f"{label} taken for {one}: <b>{count}</b> of {whole}" for label, one, count, whole in named)
    listed = f"<div style='flex:1 1 200px'><b>Most frequent mistakes</b>{mistakes}</div>" if pairs else ""
    if not has_matrix:
        return f"<div style='margin-top:18px'>{listed}</div>" if listed else ""
    both = f"<div style='display:flex;flex-wrap:wrap;gap:12px 28px'>{_matrix(report)}{listed}</div>"
    return _section("Confusion matrix", both, "rows: true class, columns: predicted class")


def _matrix(report: TrainOnReport) -> str:
    names = [_clipped(name) for name in report.classes]
    turned = (
        ""
        if max(map(len, names)) <= _SHORT_CHARS
        else "writing-mode:vertical-rl;transform:rotate(180deg);white-space:nowrap"
    )
    head = "".join(
        f"<th scope='col' style='{_CELL};vertical-align:bottom'><span style='{turned}'>{escape(name)}</span></th>"
        for name in names
    )
    rows = ""
    for place, (name, counts) in enumerate(zip(names, report.confusion, strict=True)):
        whole = sum(counts)
        cells = "".join(_count(count, whole, is_right=place == at) for at, count in enumerate(counts))
        share = percent(counts[place] / whole, 0) if whole else "–"
        rows += (
            f"<tr style='background:none'><th scope='row' style='{_CELL};text-align:right;padding-right:8px'>"
            f"{escape(name)}</th>{cells}"
            f"<td style='{_CELL};text-align:right;padding-left:8px;{_FAINT}'>{share}</td></tr>"
        )
    last = f"<td style='{_CELL};padding-left:8px;vertical-align:bottom;{_FAINT}'>right</td>"
    style = "border-collapse:separate;border-spacing:2px;margin:0;font:inherit;color:inherit"
    first = f"<tr style='background:none'><td style='{_CELL}'></td>{head}{last}</tr>"
    return f"<div style='overflow-x:auto;max-width:100%'><table style='{style}'>{first}{rows}</table></div>"


def _count(count: int, whole: int, *, is_right: bool) -> str:
    color = f"rgba({_RIGHT if is_right else _WRONG},{0.15 + 0.45 * count / whole:.2f})" if count else "#8881"
    return f"<td style='{_CELL};background:{color};border-radius:3px'>{count or ''}</td>"


def _next(report: TrainOnReport) -> str:
    lines = "".join(
        f"<div>{escape(purpose)}: <code style='{_MONO}'>{escape(line)}</code></div>"
        for purpose, line in report.next_steps
    )
    code = f"<pre style='{_MONO};white-space:pre-wrap;margin:6px 0 0'>{escape(report.code)}</pre>"
    model = f"<div>Model file: <code style='{_MONO}'>{escape(report.model_path)}</code></div>"
    return _section("Next", model + lines + _folded("Predict the classes of new images", code))


def _choices(report: TrainOnReport) -> str:
    chosen = [
        escape(text[:1].upper() + text[1:]) + (f" <span style='{_FAINT}'>({escape(name)})</span>" if name else "")
        for text, name in report.choices
    ]
    return _folded("What was found and chosen", _list([escape(report.found), *chosen]))


def _clipped(name: str) -> str:
    return name if len(name) <= _NAME_CHARS else f"{name[: _NAME_CHARS - 1]}…"
