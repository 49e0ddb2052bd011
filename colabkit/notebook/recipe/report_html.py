"""The report of `train_on()` as HTML: inline styles only, pictures as data URLs, no scripts, in the theme's colors.

No information is shown by color alone: wrong predictions have a cross and a dashed frame, and cells of the confusion
matrix have numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from colabkit.foundation import escape, plotting, shortened
from colabkit.notebook.recipe.predictions import SamplePrediction, confused_pairs, percent

# Maximum number of classes in a confusion matrix; with more, only the most frequent mistakes are listed.
_LARGEST_MATRIX = 20
_BESIDE_MATRIX, _WITHOUT_MATRIX = 6, 15
_NAME_CHARS = 18
_SHORT_CHARS = 3
_TEXT = "var(--jp-ui-font-color1,var(--colab-primary-text-color,var(--vscode-foreground,inherit)))"
_LINE = "var(--jp-border-color2,var(--colab-border-color,var(--vscode-panel-border,#8886)))"
_FAINT = "opacity:.72"
_MONO = "font:12px/18px ui-monospace,monospace;background:none;padding:0;color:inherit"
# Red, green and blue of `plotting.BLUE` and `plotting.VERMILLION`.
_RIGHT, _WRONG = "0,114,178", "213,94,0"
_CELL = (
    "border:0;padding:0;text-align:center;height:24px;min-width:26px;background:none;font-weight:normal;"
    "white-space:nowrap"
)


def framed(headline: str, circumstances: str, *sections: str) -> str:
    """Return the report from two lines of text and its sections of HTML."""
    return (
        "<div role='group' aria-label='Training result' style='box-sizing:border-box;max-width:760px;padding:14px 18px;"
        f"border:1px solid {_LINE};border-radius:8px;color:{_TEXT};font:13px/18px system-ui,sans-serif;"
        "font-variant-numeric:tabular-nums;overflow-wrap:anywhere'>"
        f"<div style='font-weight:600;font-size:16px;line-height:22px'>{escape(headline)}</div>"
        f"<div style='{_FAINT}'>{escape(circumstances)}</div>{''.join(sections)}</div>"
    )


def _section(title: str, inside: str, note: str = "") -> str:
    note = f" <span style='font-weight:normal;{_FAINT}'>{escape(note)}</span>" if note else ""
    return f"<div style='font-weight:600;margin:18px 0 6px'>{escape(title)}{note}</div>{inside}"


def _folded(title: str, inside: str) -> str:
    summary = f"<summary style='display:list-item;cursor:pointer'>{escape(title)}</summary>"
    return f"<details style='margin-top:4px'>{summary}{inside}</details>"


def _list(lines: Iterable[str]) -> str:
    items = "".join(f"<li style='margin:0'>{line}</li>" for line in lines)
    return f"<ul style='margin:4px 0 0;padding-left:18px'>{items}</ul>"


def draw_notes(notes: Sequence[str]) -> str:
    """Return notes, each with a mark."""
    style = f"border-left:3px solid {plotting.VERMILLION};padding-left:8px;margin-top:8px"
    return "".join(f"<div style='{style}'>{escape(note[:1].upper() + note[1:])}</div>" for note in notes)


def draw_predictions(title: str, shown: Sequence[SamplePrediction], note: str = "") -> str:
    """Return images with their predictions; empty if there are none."""
    tiles = "".join(map(_tile, shown))
    tiles = f"<div style='display:flex;flex-wrap:wrap;gap:10px 8px'>{tiles}</div>" if tiles else ""
    return _section(title, tiles, note) if tiles else ""


def _tile(one: SamplePrediction) -> str:
    sign, line, color = ("✓", "solid", plotting.BLUE) if one.is_right else ("✗", "dashed", plotting.VERMILLION)
    is_small = one.picture.startswith("data:image/png")
    shape = (
        "display:block;width:100%;aspect-ratio:1;object-fit:cover;box-sizing:border-box;border-radius:4px;"
        f"border:2px {line} {color};image-rendering:{'pixelated' if is_small else 'auto'}"
    )
    alt = escape(f"{one.label}, predicted {one.predicted}")
    lines = [f"<b>{sign}</b> {escape(shortened(one.predicted, _NAME_CHARS))}"]
    lines += [] if one.is_right else [f"is {escape(shortened(one.label, _NAME_CHARS))}"]
    lines += [f"{percent(one.probability, 0)} sure"]
    below = "".join(
        f"<div{f' style={chr(39)}{_FAINT}{chr(39)}' if place else ''}>{line}</div>" for place, line in enumerate(lines)
    )
    picture = f"<img alt='{alt}' title='{alt}' src='{escape(one.picture)}' style='{shape}'/>"
    return f"<div style='width:82px;font-size:12px;line-height:16px'>{picture}{below}</div>"


def draw_confusion(confusion: Sequence[Sequence[int]], classes: Sequence[str]) -> str:
    """Return the confusion matrix for up to 20 classes, and the most frequent mistakes; empty without either."""
    has_matrix = len(classes) <= _LARGEST_MATRIX
    pairs = confused_pairs(confusion, classes, _BESIDE_MATRIX if has_matrix else _WITHOUT_MATRIX)
    mistakes = _list(
        f"{escape(label)} taken for {escape(one)}: <b>{count}</b> of {whole}" for label, one, count, whole in pairs
    )
    listed = f"<div style='flex:1 1 200px'><b>Most frequent mistakes</b>{mistakes}</div>" if pairs else ""
    if not has_matrix:
        return f"<div style='margin-top:18px'>{listed}</div>" if listed else ""
    matrix = _matrix(confusion, [shortened(name, _NAME_CHARS) for name in classes])
    both = f"<div style='display:flex;flex-wrap:wrap;gap:12px 28px'>{matrix}{listed}</div>"
    return _section("Confusion matrix", both, "rows: true class, columns: predicted class")


def _matrix(confusion: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    is_long = max(map(len, names)) > _SHORT_CHARS
    turned = "writing-mode:vertical-rl;transform:rotate(180deg);white-space:nowrap" if is_long else ""
    head = "".join(
        f"<th scope='col' style='{_CELL};vertical-align:bottom'><span style='{turned}'>{escape(name)}</span></th>"
        for name in names
    )
    rows = ""
    for place, (name, counts) in enumerate(zip(names, confusion, strict=True)):
        whole = sum(counts)
        cells = "".join(_count(count, whole, is_right=place == at) for at, count in enumerate(counts))
        share = percent(counts[place] / whole, 0) if whole else "–"
        rows += (
            f"<tr style='background:none'><th scope='row' style='{_CELL};text-align:right;padding-right:8px'>"
            f"{escape(name)}</th>{cells}"
            f"<td style='{_CELL};text-align:right;padding-left:8px;{_FAINT}'>{share}</td></tr>"
        )
    last = f"<th scope='col' style='{_CELL};padding-left:8px;vertical-align:bottom;{_FAINT}'>right</th>"
    style = "border-collapse:separate;border-spacing:2px;margin:0;font:inherit;color:inherit"
    first = f"<tr style='background:none'><td style='{_CELL}'></td>{head}{last}</tr>"
    return f"<div style='overflow-x:auto;max-width:100%'><table style='{style}'>{first}{rows}</table></div>"


def _count(count: int, whole: int, *, is_right: bool) -> str:
    color = f"rgba({_RIGHT if is_right else _WRONG},{0.15 + 0.45 * count / whole:.2f})" if count else "#8881"
    return f"<td style='{_CELL};background:{color};border-radius:3px'>{count or ''}</td>"


def draw_next(model_path: Path, steps: Iterable[tuple[str, str]], code: str) -> str:
    """Return the path of the model file, the lines to run next by purpose, and the code that loads the model."""
    lines = "".join(
        f"<div>{escape(purpose)}: <code style='{_MONO}'>{escape(line)}</code></div>" for purpose, line in steps
    )
    block = f"<pre style='{_MONO};white-space:pre-wrap;margin:6px 0 0'>{escape(code)}</pre>"
    model = f"<div>Model file: <code style='{_MONO}'>{escape(model_path)}</code></div>"
    return _section("Next", model + lines + _folded("Predict the classes of new images", block))


def draw_choices(found: str, choices: Iterable[tuple[str, str]]) -> str:
    """Return the description of the source, and each choice with the option that overrides it, as a collapsed list."""
    chosen = [
        escape(text[:1].upper() + text[1:]) + (f" <span style='{_FAINT}'>({escape(name)})</span>" if name else "")
        for text, name in choices
    ]
    return _folded("What was found and chosen", _list([escape(found), *chosen]))
