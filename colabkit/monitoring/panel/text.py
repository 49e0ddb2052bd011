"""The panel as text of at most twelve lines, for terminals and for notebooks that do not show HTML."""

from __future__ import annotations

from collections.abc import Sequence

from colabkit.monitoring.panel import content
from colabkit.monitoring.panel.content import PanelState, thinned

_HEIGHTS = "▁▂▃▄▅▆▇█"
# Fill characters for the segments of the step time.
_FILLS = ("▒", "▓", "█", "░")
_BAR = 24
_CURVE = 24


def as_text(state: PanelState) -> str:
    """Return the panel as up to eleven lines of text, or twelve if the advice has a gain or a call.

    Curves without a known value are left out.
    """
    parts = content.segments(state)
    done = round(_BAR * (content.done_share(state) or 0.0))
    load, speed, data, queue, loss = content.curves(state)
    gpu, ram, disk, tmpfs = content.gauges(state)
    action, found, gain, call = content.advice_text(state)
    legend = (f"{fill} {part.name} {part.text}" for fill, part in zip(_FILLS, parts, strict=True))
    lines = [
        " ".join(filter(None, content.verdict(state))),
        f"{'█' * done}{'░' * (_BAR - done)}  {content.position(state)}",
        "  ".join([_stacked([part.share for part in parts]), *legend]),
        *(_curve(curve) for curve in (load, speed, data, queue) if curve.text != content.UNKNOWN),
        " · ".join(filter(None, [_curve(loss) if loss.text != content.UNKNOWN else "", content.values(state)])),
        f"{_gauge(gpu)} · {_gauge(ram)}",
        f"{_gauge(disk)} · {_gauge(tmpfs)} · {content.cost(state)}",
        f"{action}{f': {found}' if found else ''}",
        "  ".join(filter(None, [gain and f"→ {gain}", call])),
    ]
    first, *rest = (line.rstrip() for line in lines)
    return "\n".join([first, *(f"  {line}" for line in rest if line)])


def _stacked(shares: Sequence[float | None]) -> str:
    drawn, passed = "", 0.0
    for fill, share in zip(_FILLS, shares, strict=True):
        passed += share or 0.0
        drawn += fill * (round(_BAR * min(1.0, passed)) - len(drawn))
    return drawn.ljust(_BAR, "·")


def _curve(curve: content.Curve) -> str:
    drawn = ""
    points = thinned(curve.points, _CURVE)
    if len(points) > 1:
        low = min(points) if curve.low is None else curve.low
        room = ((max(points) if curve.high is None else curve.high) - low) or 1.0
        tops = (min(1.0, max(0.0, (point - low) / room)) for point in points)
        drawn = "".join(_HEIGHTS[round(top * (len(_HEIGHTS) - 1))] for top in tops)
    return f"{curve.name:12}{curve.text:14}{drawn}"


def _gauge(gauge: content.Gauge) -> str:
    return f"{gauge.name} {gauge.text}{f' ({gauge.apart_text})' if gauge.apart_text else ''}"
