"""Rates against concurrency as bars: a small picture for notebooks, lines of blocks for terminals.

Text has the colour of the theme, so it reads in light and dark; colours of bars are the training panel's, which pass
3:1 contrast on both. The best bar is solid and its value bold: nothing is said by colour alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from colabkit.foundation import escape

BLUE, GREEN = "#0072B2", "#009E73"
_PANEL, _GAP, _BAR, _STEP = 232, 32, 40, 58
_TOP, _TALL = 46, 64
_HEIGHT = _TOP + _TALL + 34
_EIGHTHS = " ▏▎▍▌▋▊▉"
_TEXT_BAR = 24


class Bar(NamedTuple):
    """One bar: the label below it, its value or None where there is none, the value as text, whether it is best."""

    label: str
    value: float | None
    text: str
    is_best: bool


class Panel(NamedTuple):
    """Some bars, their colour, what they show, in what unit, and what their labels count."""

    color: str
    title: str
    unit: str
    axis: str
    bars: Sequence[Bar]


def svg(panels: Sequence[Panel]) -> str:
    """Return the panels side by side as an inline SVG picture, with title and description for those who hear it."""
    if not panels:
        return ""
    width = len(panels) * (_PANEL + _GAP) - _GAP
    told = "; ".join(
        f"{panel.title}, {panel.unit}: "
        + ", ".join(f"{bar.text} with {bar.label} {_counted(panel, bar)}" for bar in panel.bars)
        for panel in panels
    )
    drawn = "".join(
        f'<g transform="translate({number * (_PANEL + _GAP)} 0)">{_drawn(panel)}</g>'
        for number, panel in enumerate(panels)
    )
    return (
        f'<svg role="img" viewBox="0 0 {width} {_HEIGHT}" width="{width}" height="{_HEIGHT}" '
        f'xmlns="http://www.w3.org/2000/svg" fill="currentColor" '
        f'style="display:block;max-width:100%;height:auto;margin:8px 0 2px;font:12px system-ui,sans-serif;'
        f'font-variant-numeric:tabular-nums"><title>Rates against concurrency</title>'
        f"<desc>{escape(told)}</desc>{drawn}</svg>"
    )


def _counted(panel: Panel, bar: Bar) -> str:
    return panel.axis.removesuffix("s") if bar.label == "1" else panel.axis


def _drawn(panel: Panel) -> str:
    top = max((bar.value or 0.0 for bar in panel.bars), default=0.0) or 1.0
    floor = _TOP + _TALL
    parts = [
        f'<text x="0" y="12"><tspan font-weight="600">{escape(panel.title)}</tspan>'
        f'<tspan dx="6" opacity="0.7">{escape(panel.unit)}</tspan></text>',
        f'<line x1="0" x2="{_PANEL}" y1="{floor + 0.5}" y2="{floor + 0.5}" stroke="currentColor" opacity="0.35"/>',
    ]
    for number, bar in enumerate(panel.bars):
        left = number * _STEP + (_STEP - _BAR) / 2
        middle = left + _BAR / 2
        tall = max(1.0, _TALL * bar.value / top) if bar.value else 0.0
        weight = ' font-weight="600"' if bar.is_best else ' opacity="0.8"'
        if bar.value:
            parts.append(
                f'<rect x="{left:g}" y="{floor - tall:.1f}" width="{_BAR}" height="{tall:.1f}" fill="{panel.color}"'
                f' fill-opacity="{1 if bar.is_best else 0.25}" stroke="{panel.color}"/>'
            )
        parts.append(
            f'<text x="{middle:g}" y="{floor - tall - 5:.1f}" text-anchor="middle"{weight}>{escape(bar.text)}</text>'
            f'<text x="{middle:g}" y="{floor + 15}" text-anchor="middle">{escape(bar.label)}</text>'
        )
    parts.append(
        f'<text x="{_PANEL / 2:g}" y="{floor + 30}" text-anchor="middle" opacity="0.7">{escape(panel.axis)}</text>'
    )
    return "".join(parts)


def text_bars(panels: Sequence[Panel]) -> str:
    """Return the panels as lines of text, one a bar."""
    lines = []
    for panel in panels:
        top = max((bar.value or 0.0 for bar in panel.bars), default=0.0) or 1.0
        wide = max(len(bar.text) for bar in panel.bars)
        for number, bar in enumerate(panel.bars):
            eighths = round(8 * _TEXT_BAR * (bar.value or 0.0) / top)
            drawn = "█" * (eighths // 8) + _EIGHTHS[eighths % 8]
            name = f"{panel.title}, {panel.unit}" if number == 0 else ""
            axis = _counted(panel, bar)
            mark = " best" if bar.is_best else ""
            lines.append(f"  {name:<26}  {bar.label:>2} {axis:<9}{bar.text:>{wide}}  {drawn}{mark}")
    return "\n".join(line.rstrip() for line in lines)
