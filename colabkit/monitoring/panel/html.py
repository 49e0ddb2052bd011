"""The panel as HTML: inline styles only, pictures as data URLs, no scripts.

The panel therefore looks the same live, in a saved notebook, and in front ends that remove scripts and style sheets.
Without any styles, it still reads from top to bottom. It uses the colors of the theme. Its parts wrap, so that it
can be read from a width of 200 px. It grows when data arrives, and reserves no space for data that may never arrive.

The pictures are small SVG images, to which the colors of the page do not apply. Their colors have a contrast of at
least 3:1 on white and on #131314 (blue, vermillion, green and purple of Okabe and Ito, and a gray). No information is
shown by color alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import quote

from colabkit.foundation import escape, plotting
from colabkit.monitoring.panel import charts, content
from colabkit.monitoring.panel.charts import Chart, Line, averaged
from colabkit.monitoring.panel.content import PanelState

# Characters that need not be percent-encoded in a data URL.
_PLAIN = ' "=/:;,()'
# Maximum number of heights that a chart distinguishes.
_STEPS = 64
# Color of the pattern lines.
PALE = "#fff8"
_HATCH = (
    '<pattern id="h" width="6" height="6" patternUnits="userSpaceOnUse">'
    f'<path d="M0,0H6V6H0" fill="{plotting.VERMILLION}"/>'
    f'<path d="M0,6L6,0M-1,1L1,-1M5,7L7,5" stroke="{PALE}"/></pattern>'
)
_TEXT = "var(--jp-ui-font-color1,var(--colab-primary-text-color,var(--vscode-foreground,inherit)))"
_LINE = "var(--jp-border-color2,var(--colab-border-color,var(--vscode-panel-border,#8886)))"
_TRACK = "#8884"
_FAINT = "opacity:.72"
# The text beside it keeps its color, since the color of the mark would be hard to read at small sizes.
_ALARM = f"<span style='color:{plotting.VERMILLION}'>⚠</span>"
_ROW = "display:flex;flex-wrap:wrap"
_UNBROKEN = "white-space:nowrap"
_PART = "display:inline-block"
_ENDS = "display:flex;justify-content:space-between"
_COLORS = (plotting.VERMILLION, plotting.PURPLE, plotting.BLUE, plotting.GREY)
# Legend symbols of the segments, in the style of the bar.
_SIGNS = ("▨", "▥", "■", "⊟")
# Colors and styles of the first and the second line of a chart.
_LINES = ((plotting.GREEN, f"solid {plotting.GREEN}"), (plotting.BLUE, f"dashed {plotting.BLUE}"))
_LIVE_POINTS, _FINAL_POINTS = 24, 60
# Heights of small and large charts, in pixels.
_LOW, _HIGH = 28, 72
# A frame shows that it is old after this many seconds; the panel of a run on Drive is updated every 30 s.
_STALE_S = 60
# Text that is added to the mark of an old frame if the frame is wide enough.
_LIVE_HINT, _HINT_PX = "; in another notebook, %status FOLDER shows a run that saves checkpoints", 560
_THIN = 'vector-effect="non-scaling-stroke"'


def as_html(state: PanelState) -> str:
    """Return the panel as HTML, at most 13 kB during the run and 14 kB afterwards."""
    points = _FINAL_POINTS if state.is_over else _LIVE_POINTS
    learned = charts.learning(state)
    return (
        "<div role='group' aria-label='Training panel' style='box-sizing:border-box;max-width:760px;padding:14px 18px;"
        f"border:1px solid {_LINE};border-radius:8px;color:{_TEXT};font:13px/18px system-ui,sans-serif;"
        "font-variant-numeric:tabular-nums;overflow-wrap:anywhere'>"
        f"{_staleness(state)}{_verdict(state)}{_progress(state)}{_time(state, points)}{_learning(learned)}"
        f"{_machine(state, points)}{_details(state, learned)}{_advice(state)}</div>"
    )


def draw_curves(epochs: Sequence[tuple[int, Mapping[str, float]]]) -> str:
    """Return the charts of the loss and of one more value over epochs as HTML; empty for fewer than two epochs.

    Args:
        epochs: number of each epoch, from 1, and its values by label.
    """
    return _learning(charts.over_epochs(epochs)) if len(epochs) > 1 else ""


def _verdict(state: PanelState) -> str:
    sentence, ticking = content.verdict(state)
    # Screen readers skip the part that changes with every frame.
    rest = f" <span aria-hidden='true'>{escape(ticking)}</span>" if ticking else ""
    return f"<div role='status' style='font-weight:600;font-size:16px;line-height:22px'>{escape(sentence)}{rest}</div>"


def _staleness(state: PanelState) -> str:
    """Return a picture in the upper margin that appears if no other frame follows, as after a reload of the page."""
    if state.is_over or state.headline:
        return ""
    # Pictures with equal URLs share an animation clock, so each frame needs a unique URL.
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg"><text id="t{state.at_s or 0:.1f}" x="100%" y="10" text-anchor="end" '
        f'fill="{plotting.VERMILLION}" opacity="0" style="font:600 11px system-ui,sans-serif">'
        f'not updated for {_STALE_S} s<tspan class="w">{_LIVE_HINT}</tspan>'
        f'<set attributeName="opacity" to="1" begin="{_STALE_S}s"/></text>'
        f"<style>@media(max-width:{_HINT_PX}px){{.w{{display:none}}}}</style></svg>"
    )
    style = "display:block;height:12px;margin:-12px 0 0"
    source = f"data:image/svg+xml,{quote(svg, _PLAIN)}"
    picture = f"<img alt='mark of an old frame' width='100%' height='12' style='{style}' src='{source}'/>"
    # Without flow-root, the negative margin would move the rest of the panel upward.
    return f"<div aria-hidden='true' style='display:flow-root;height:0'>{picture}</div>"


def _progress(state: PanelState) -> str:
    done = content.done_share(state)
    *parts, last = content.position(state)
    # Break lines between parts, if possible, and never before a dot.
    texts = [*(f"{part}\N{NO-BREAK SPACE}·" for part in parts), last]
    spans = " ".join(f"<span style='{_PART}'>{escape(text)}</span>" for text in texts)
    position = f"<div style='{_FAINT}'>{spans}</div>"
    if done is None:
        return position
    filled = f"linear-gradient(90deg,{plotting.GREY} {100 * done:.1f}%,{_TRACK} 0)"
    shape = f"height:4px;border-radius:2px;margin-top:6px;background:{filled}"
    return f"{position}<div role='img' aria-label='done: {100 * done:.0f}%' style='{shape}'></div>"


def _time(state: PanelState, points: int) -> str:
    """Return the speed, and the shares of the step time, with the share of waiting for data in large type."""
    parts, speed = content.segments(state), charts.speed(state)
    cells = ""
    if speed is not None:
        number = f"<span>{_large(speed.lines[0].text)} {escape(speed.name)}</span>"
        limits = f"<small style='{_FAINT}'>{_limits(speed)}</small>"
        head = f"<div style='{_ENDS};align-items:baseline;flex-wrap:wrap'>{number}{limits}</div>"
        cells += _cell(180, f"{head}{_picture(speed, points, _LOW)}")
    if parts:
        alt = "time of a typical step: " + ", ".join(f"{part.name} {part.text}" for part in parts)
        bar = stacked_bar(alt, [(part.share, color) for part, color in zip(parts, _COLORS, strict=True)])
        named = [
            f"<span style='{_UNBROKEN}'><span aria-hidden='true' style='color:{color}'>{sign}</span> {part.name}"
            for part, color, sign in zip(parts, _COLORS, _SIGNS, strict=True)
        ]
        rest = " ".join(f"{name} <b>{part.text}</b></span>" for name, part in zip(named[1:], parts[1:], strict=True))
        legend = f"<div style='{_ROW};gap:0 14px;margin-top:3px'>{rest}</div>"
        cells += _cell(240, f"{_large(parts[0].text)} {named[0]}</span>{bar}{legend}", 2)
    return _row(cells)


def _learning(found: Sequence[Chart]) -> str:
    return _row("".join(_cell(240, _chart(chart)) for chart in found))


def _chart(chart: Chart) -> str:
    """Return a chart with the limits of both axes, and its best point."""
    low, high = map(chart.unit, chart.limits)
    lines = "".join(_named(line, style) for line, (_, style) in zip(chart.lines, _LINES, strict=False))
    # The note is placed below the limits if it does not fit between them.
    note = f"<span style='{_PART}'>│ {escape(chart.note)}</span>" if chart.note else ""
    ends = f"<span style='float:left'>{escape(chart.first)}</span><span style='float:right'>{escape(chart.last)}</span>"
    return (
        f"<div style='{_ROW};gap:0 12px'><b>{escape(chart.name)}</b>{lines}</div>"
        "<div style='display:flex;gap:6px;margin-top:4px'>"
        f"<small style='{_FAINT};{_ENDS};flex-direction:column;text-align:right;height:{_HIGH}px;line-height:1'>"
        f"<span>{escape(high)}</span><span>{escape(low)}</span></small><div style='flex:1;min-width:0'>"
        f"{_picture(chart, _FINAL_POINTS, _HIGH)}<small style='{_FAINT};display:flow-root;text-align:center'>"
        f"{ends}{note}</small></div></div>"
    )


def _machine(state: PanelState, points: int) -> str:
    shown = charts.machine(state)
    # At full width, up to five charts share one row, and more are in two rows.
    least_px = 128 if len(shown) <= 5 else 170 if len(shown) <= 6 else 141
    return _row("".join(_cell(least_px, _small_chart(chart, points)) for chart in shown))


def _small_chart(chart: Chart, points: int) -> str:
    lines = [_named(line, style) for line, (_, style) in zip(chart.lines, _LINES, strict=False)]
    texts = "<br/>".join([*lines, escape(chart.note)] if chart.note else lines)
    style = f"{_FAINT};{_ENDS};flex-wrap:wrap;overflow-wrap:normal"
    title = f"<small style='{style}'>{escape(chart.name)}{_limits(chart)}</small>"
    return f"{title}{texts}{_picture(chart, points, _LOW)}"


def _named(line: Line, style: str) -> str:
    """Return the name of a line, underlined in the style of the line, and its newest value."""
    if not line.name:
        return f"<b>{escape(line.text)}</b>"
    name = f"<span style='border-bottom:2px {style}'>{escape(line.name)}</span>"
    return f"<span style='{_UNBROKEN}'>{name} <b>{escape(line.text)}</b></span>"


def _limits(chart: Chart) -> str:
    """Return the limits of the axis of a small chart; empty if the chart has no line of several points."""
    if not any(len(line.points) > 1 for line in chart.lines):
        return ""
    low, high = chart.limits
    text = f"{chart.unit(low) if low else 0}–{chart.unit(high)}"
    return f"<span style='{_UNBROKEN}'>{escape(text)}</span>"


def _details(state: PanelState, learned: Sequence[Chart]) -> str:
    texts = "".join(
        f"<b>{_ALARM} {escape(text)}</b>" if is_urgent else f"<span style='{_FAINT}'>{escape(text)}</span>"
        for text, is_urgent in charts.details(state, learned)
        if text
    )
    return f"<small style='{_ROW};gap:0 16px;margin-top:10px'>{texts}</small>" if texts else ""


def _advice(state: PanelState) -> str:
    action, found, gain, call = content.advice_text(state)
    if not action:
        return ""
    gain = f" <span style='{_FAINT};{_PART}'>→ {escape(gain)}</span>" if gain else ""
    reason = f"<div style='{_FAINT}'>{escape(found[:1].upper() + found[1:])}</div>" if found else ""
    code = (
        f"<div style='font:12px/18px ui-monospace,monospace;white-space:pre-wrap'>{escape(call)}</div>" if call else ""
    )
    style = f"border-top:1px solid {_TRACK};margin-top:12px;padding-top:8px"
    return f"<div style='{style}'><b>{escape(action)}</b>{gain}{reason}{code}</div>"


def _row(cells: str) -> str:
    return f"<div style='{_ROW};gap:10px 16px;margin-top:12px'>{cells}</div>" if cells else ""


def _cell(least_px: int, inside: str, share: int = 1) -> str:
    return f"<div style='flex:{share} 1 {least_px}px;min-width:0'>{inside}</div>"


def _large(text: str) -> str:
    return f"<span style='font-size:24px;line-height:30px;font-weight:600;{_UNBROKEN}'>{escape(text)}</span>"


def _picture(chart: Chart, points: int, height: int) -> str:
    low, high = chart.limits
    shown = [
        line._replace(points=line.points if line.places else averaged(line.points, points)) for line in chart.lines
    ]
    said = ", ".join(
        f"{line.name} from {chart.unit(line.points[0])} to {chart.unit(line.points[-1])}".strip()
        for line in shown
        if len(line.points) > 1
    )
    return line_chart(f"{chart.name}: {said}", shown, low, high, height, chart.marked, chart.end) if said else ""


def line_chart(
    alt: str,
    lines: Sequence[Line],
    low: float,
    high: float,
    height: int,
    marked: int | None = None,
    end: int | None = None,
) -> str:
    """Return lines as a picture; a single one has a shaded area below it, and the second of two is dashed.

    Args:
        alt: alternative text for the picture.
        lines: the lines. Those with places share a horizontal scale; each of the others fills the width.
        low: value at the bottom.
        high: value at the top.
        height: height of the picture in pixels; the picture fills the available width.
        marked: place of a vertical marker line; None for none.
        end: place at the right edge of the picture; None for the last point.
    """
    # More steps than pixels would only increase the size of the picture in bytes.
    room, scale = (high - low) or 1.0, min(_STEPS, height)
    width = max(max(line.places, default=len(line.points) - 1) for line in lines) if end is None else end
    drawn = "" if marked is None else f'<path d="M{marked},-3V99" stroke="{plotting.GREY}" {_THIN}/>'
    for line, (color, style) in zip(lines, _LINES, strict=False):
        if len(line.points) < 2:
            continue
        tops = [scale - round(min(1.0, max(0.0, (value - low) / room)) * scale) for value in line.points]
        places = line.places or range(len(tops))
        # No area is shaded below a curve that ends early because later values are not finite.
        is_whole = not places[0] and width - places[-1] < places[-1] - places[-2]
        path, is_alone = _path(places, tops), len(lines) == 1 and is_whole
        # The other edges of the area are outside the picture, so that only the curve is drawn as a line.
        path = f"M-9,99V{tops[0]}H0l{path}h9V99" if is_alone else f"M{places[0]},{tops[0]}l{path}"
        dash = "" if style.startswith("solid") else ' stroke-dasharray="4 2" stroke-width="2"'
        drawn += f'<path d="{path}" fill="{f"{color}26" if is_alone else "none"}" stroke="{color}"{dash} {_THIN}/>'
    box = f'viewBox="0 -2 {width or 1} {scale + 4}" preserveAspectRatio="none" stroke-width="1.5"'
    return _image(alt, box, drawn, height)


def _path(places: Sequence[int], tops: Sequence[int]) -> str:
    """Return a line as relative SVG coordinates, with consecutive horizontal segments joined."""
    steps: list[tuple[int, int]] = []
    for (x1, y1), (x2, y2) in itertools.pairwise(zip(places, tops, strict=True)):
        if steps and not steps[-1][1] and y1 == y2:
            steps[-1] = steps[-1][0] + x2 - x1, 0
        else:
            steps.append((x2 - x1, y2 - y1))
    return " ".join(f"{x} {y}" for x, y in steps).replace(" -", "-")


def stacked_bar(alt: str, parts: Iterable[tuple[float, str]]) -> str:
    """Return a stacked bar of shares in [0, 1], each with its own color and pattern."""
    drawn, left = f'{_HATCH}<rect width="100%" height="100%" fill="{plotting.GREY}30"/>', 0.0
    for share, color in parts:
        x, width, left = f"{100 * left:.1f}%", f"{100 * share:.1f}%", left + share
        if share <= 0:
            continue
        fill = "url(#h)" if color == plotting.VERMILLION else color
        drawn += f'<rect x="{x}" width="{width}" height="100%" fill="{fill}"/>'
        if color == plotting.PURPLE:
            line = f'stroke="{PALE}" stroke-width="100%" stroke-dasharray="1 3"'
            drawn += f'<line x1="{x}" y1="50%" x2="{100 * left:.1f}%" y2="50%" {line}/>'
        elif color == plotting.GREY:
            drawn += f'<rect x="{x}" y="40%" width="{width}" height="20%" fill="{PALE}"/>'
    return _image(alt, "", drawn, height=14)


def _image(alt: str, attributes: str, drawn: str, height: int) -> str:
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {attributes}>{drawn}</svg>'
    # The height is set twice: style sheets of the page may override one, and some front ends remove styles.
    shape = f"width='100%' height='{height}' style='display:block;height:{height}px'"
    return f"<img alt='{escape(alt)}' {shape} src='data:image/svg+xml,{quote(svg, _PLAIN)}'/>"
