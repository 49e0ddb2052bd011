"""The panel as text of at most twelve lines, for terminals and for notebooks that do not show HTML."""

from __future__ import annotations

from collections.abc import Sequence

from colabkit.monitoring.panel import charts, content
from colabkit.monitoring.panel.charts import Chart, thinned
from colabkit.monitoring.panel.content import PanelState

_HEIGHTS = "▁▂▃▄▅▆▇█"
# Fill characters for the segments of the step time.
_FILLS = ("▒", "▓", "█", "░")
_BAR = 24
_CURVE = 12
_PER_LINE = 3


def as_text(state: PanelState) -> str:
    """Return the panel as up to twelve lines of text; lines without data are left out."""
    parts, speed, learned = content.segments(state), charts.speed(state), charts.learning(state)
    share = content.done_share(state)
    done = "" if share is None else f"{'█' * round(_BAR * share)}{'░' * (_BAR - round(_BAR * share))}  "
    action, found, gain, call = content.advice_text(state)
    legend = (f"{fill} {part.name} {part.text}" for fill, part in zip(_FILLS, parts, strict=False))
    machine = [_chart(chart, is_drawn=False) for chart in charts.machine(state)]
    lines = [
        " ".join(filter(None, content.verdict(state))),
        f"{done}{content.position(state)}",
        _chart(speed) if speed else "",
        "  ".join([_stacked([part.share for part in parts]), *legend]) if parts else "",
        *map(_chart, learned),
        *(" · ".join(machine[first : first + _PER_LINE]) for first in range(0, len(machine), _PER_LINE)),
        " · ".join(text for text, _ in charts.details(state, learned) if text),
        f"{action}{f': {found}' if found else ''}",
        "  ".join(filter(None, [gain and f"→ {gain}", call])),
    ]
    first, *rest = (line.rstrip() for line in lines)
    return "\n".join([first, *(f"  {line}" for line in rest if line)])


def _stacked(shares: Sequence[float]) -> str:
    drawn, passed = "", 0.0
    for fill, share in zip(_FILLS, shares, strict=True):
        passed += share
        drawn += fill * (round(_BAR * min(1.0, passed)) - len(drawn))
    return drawn.ljust(_BAR, "·")


def _chart(chart: Chart, is_drawn: bool = True) -> str:
    low, high = chart.limits
    room = (high - low) or 1.0
    lines = []
    for line in chart.lines:
        points = thinned(line.points, _CURVE) if len(line.points) > 1 and is_drawn else ()
        tops = (min(1.0, max(0.0, (point - low) / room)) for point in points)
        drawn = "".join(_HEIGHTS[round(top * (len(_HEIGHTS) - 1))] for top in tops)
        lines.append(" ".join(filter(None, (line.name, line.text, drawn))))
    return " ".join(filter(None, [chart.name, ", ".join(lines), f"({chart.note})" if chart.note else ""]))
