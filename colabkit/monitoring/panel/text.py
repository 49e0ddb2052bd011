"""The panel as text of at most twelve lines, for terminals and for notebooks that do not show HTML; and as one line.

`PanelFrame` contains all forms of the panel.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property

from colabkit.foundation import format_rate
from colabkit.monitoring.panel import charts, content
from colabkit.monitoring.panel.charts import Chart, averaged
from colabkit.monitoring.panel.content import PanelState
from colabkit.monitoring.panel.html import as_html

_HEIGHTS = "▁▂▃▄▅▆▇█"
# Fill characters for the segments of the step time.
_FILLS = ("▒", "▓", "█", "░")
_BAR = 24
_CURVE = 12
_PER_LINE = 3
# Lengths of a line during and after the run, in characters.
_LINE, _LAST_LINE = 72, 760


class PanelFrame:
    """The panel in each form, which is created when a screen needs it.

    Args:
        state: the state that the panel shows.
    """

    def __init__(self, state: PanelState) -> None:
        self._state = state

    @cached_property
    def html(self) -> str:
        """The panel as HTML."""
        return as_html(self._state)

    @cached_property
    def text(self) -> str:
        """The panel as up to twelve lines of text."""
        return as_text(self._state)

    @cached_property
    def line(self) -> str:
        """The panel as one line of text."""
        return as_line(self._state)


def as_line(state: PanelState) -> str:
    """Return the panel as one line: at most 72 characters during the run, and with verdict and advice afterwards."""
    said = " ".join(filter(None, content.verdict(state)))
    values = {**state.values, **state.validation}.items()
    parts = [
        *content.position(state),
        *([] if state.samples_per_s is None else [format_rate(state.samples_per_s, "images")]),
        *(f"{content.clipped(name, 20)} {value:.4g}" for name, value in values),
    ]
    if state.work is not None or state.phase in ("starting", "waiting"):
        parts.insert(0, said)
        said = ""
    if state.is_over:
        action, found, gain, call = content.advice_text(state)
        call = call.replace("\n", "; ")
        advice = (": ".join(filter(None, pair)) for pair in ((action, found), (gain, call)))
        return content.clipped(". ".join(filter(None, [said, ", ".join(parts), *advice])), _LAST_LINE)
    fitting = [line for line in itertools.accumulate(parts, "{}, {}".format) if len(line) <= _LINE]
    return fitting[-1] if fitting else content.clipped(parts[0], _LINE)


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
        f"{done}{' · '.join(content.position(state))}",
        _chart(speed) if speed else "",
        "  ".join([_stacked([part.share for part in parts]), *legend]) if parts else "",
        *map(_chart, learned),
        *(" · ".join(machine[first : first + _PER_LINE]) for first in range(0, len(machine), _PER_LINE)),
        " · ".join(text for text, _ in charts.details(state, learned) if text),
        f"{action}{f': {found}' if found else ''}",
        "  ".join(filter(None, [gain and f"→ {gain}", call.replace("\n", "; ")])),
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
        points = averaged(line.points, _CURVE) if len(line.points) > 1 and is_drawn else ()
        tops = (min(1.0, max(0.0, (point - low) / room)) for point in points)
        drawn = "".join(_HEIGHTS[round(top * (len(_HEIGHTS) - 1))] for top in tops)
        lines.append(" ".join(filter(None, (line.name, line.text, drawn))))
    return " ".join(filter(None, [chart.name, ", ".join(lines), f"({chart.note})" if chart.note else ""]))
