"""The panel as HTML: inline styles only, pictures as data URLs, no scripts.

The panel therefore looks the same live, in a saved notebook, and in front ends that remove scripts and style sheets.
Without any styles, it still reads from top to bottom. It uses the colors of the theme, and its height depends only on
its width.

The pictures are small SVG images, to which the colors of the page do not apply. Their colors have a contrast of at
least 3:1 on white and on #131314 (blue, vermillion, green and purple of Okabe and Ito, and a gray). No information is
shown by color alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from urllib.parse import quote

from colabkit.foundation import escape, plotting
from colabkit.monitoring.panel import content
from colabkit.monitoring.panel.content import PanelState, thinned

# Characters that need not be percent-encoded in a data URL.
_PLAIN = ' "=/:;,()'
# Vertical resolution of a curve.
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
_CUT = "overflow:hidden;text-overflow:ellipsis"
_COLORS = (plotting.VERMILLION, plotting.PURPLE, plotting.BLUE, plotting.GREY)
# Legend symbols of the segments, in the style of the bar.
_SIGNS = ("▨", "▥", "■", "⊟")
_LIVE_POINTS, _FINAL_POINTS = 32, 120
# Below this panel width, texts may take two lines.
_NARROW_PX = 600
_ALMOST_FULL = 0.9
# Longest call that is shown, in characters; two lines hold this many.
_SHOWN_OF_A_CALL = 140


def as_html(state: PanelState) -> str:
    """Return the panel as HTML, at most 8 kB during the run and 20 kB afterwards."""
    return (
        "<div role='group' aria-label='Training panel' style='container-type:inline-size;box-sizing:border-box;"
        f"max-width:760px;padding:14px 18px;border:1px solid {_LINE};border-radius:8px;color:{_TEXT};"
        "font:13px/20px system-ui,sans-serif;font-variant-numeric:tabular-nums'>"
        f"{_verdict(state)}{_progress(state)}{_time(state)}{_cells(state)}{_advice(state)}</div>"
    )


def _verdict(state: PanelState) -> str:
    sentence, ticking = content.verdict(state)
    # Screen readers skip the part that changes with every frame.
    rest = f" <span aria-hidden='true'>{escape(ticking)}</span>" if ticking else ""
    return f"<div role='status' style='font-weight:600;font-size:16px;{_lines(22)}'>{escape(sentence)}{rest}</div>"


def _progress(state: PanelState) -> str:
    done = content.done_share(state)
    share = "n/a" if done is None else f"{100 * done:.0f}%"
    return (
        f"<div style='{_FAINT};{_CUT};white-space:nowrap'>{escape(content.position(state))}</div>"
        f"{_bar(4, f'done: {share}', done or 0.0, plotting.GREY, ';margin:6px 0 12px')}"
    )


def _time(state: PanelState) -> str:
    parts = content.segments(state)
    alt = "time of a typical step: " + ", ".join(f"{part.name} {part.text}" for part in parts)
    bar = stacked_bar(alt, [(part.share or 0.0, color) for part, color in zip(parts, _COLORS, strict=True)], 14)
    legend = " ".join(
        f"<span><span aria-hidden='true' style='color:{color}'>{sign}</span> {part.name} <b>{part.text}</b></span>"
        for part, color, sign in zip(parts, _COLORS, _SIGNS, strict=True)
    )
    cost = f"<span style='margin-left:auto;{_FAINT}'>{escape(content.cost(state))}</span>"
    shape = f"display:flex;flex-wrap:wrap;gap:0 20px;margin:4px 0 12px;white-space:nowrap;{_lines(20)}"
    return f"{bar}<div style='{shape}'>{legend} {cost}</div>"


def _cells(state: PanelState) -> str:
    width = f"clamp((100cqw - 72px)/6,({_NARROW_PX}px - 100cqw)*999,(100cqw - 30px)/3)"
    style = f"display:grid;grid-template-columns:repeat(auto-fit,minmax({width},1fr));gap:10px 14px"
    curves = "".join(_curve(state, curve) for curve in content.curves(state))
    gauges = "".join(_gauge(gauge) for gauge in content.gauges(state))
    return f"<div style='{style};font-size:14px;white-space:nowrap'>{curves}{gauges}</div>"


def _curve(state: PanelState, curve: content.Curve) -> str:
    points = thinned(curve.points, _FINAL_POINTS if state.is_over else _LIVE_POINTS)
    is_loss = curve.name == "Loss"
    when = "the whole run" if state.is_over or is_loss else "the last minute"
    ends = f"{curve.unit(points[0])} to {curve.unit(points[-1])}" if len(points) > 1 else "n/a"
    picture = line_chart(f"{curve.name}, {when}: {ends}", points, curve.low, curve.high, 32)
    beside = f" &#8194;{escape(content.values(state))}" if is_loss else ""
    return _cell(curve.name, f"<b>{escape(curve.text)}</b>{beside}", picture, is_loss)


def _gauge(gauge: content.Gauge) -> str:
    share = gauge.share or 0.0
    color = plotting.VERMILLION if share > _ALMOST_FULL else plotting.GREY
    name, label = gauge.name, f"{gauge.name} n/a" if gauge.share is None else f"{gauge.name} {100 * share:.0f}% full"
    hatched = ""
    if gauge.apart:
        name += f", ▨ {gauge.apart_text}"
        label += f", {100 * gauge.apart:.0f}% by tmpfs"
        place = f"margin-left:{100 * (share - gauge.apart):.1f}%;width:{100 * gauge.apart:.1f}%;height:6px"
        hatch = f"repeating-linear-gradient(135deg,{PALE} 0 1px,#0000 1px 4px)"
        hatched = f"<div style='{place};background:{hatch}'></div>"
    bar = _bar(6, label, share, color, ";margin-top:3px", hatched)
    return _cell(name, escape(gauge.text), bar, gauge.name in ("RAM", "tmpfs"))


def _advice(state: PanelState) -> str:
    action, found, gain, call = content.advice_text(state)
    reason, call = f"Advice: {found}" if found else "Advice", content.clipped(call, _SHOWN_OF_A_CALL)
    return (
        f"<div style='border-top:1px solid {_TRACK};margin-top:14px;padding-top:8px;display:flex;gap:14px;"
        "justify-content:space-between;white-space:nowrap;font-size:14px'>"
        f"<small style='{_FAINT};{_CUT}'>{escape(reason)}</small> <b>{escape(gain)}</b></div>"
        f"<div style='{_lines(20)}'><b>{escape(action)}</b></div>"
        f"<div style='font:12px ui-monospace,monospace;overflow-wrap:anywhere;{_lines(20)}'>{escape(call)}</div>"
    )


def _cell(name: str, text: str, picture: str, is_wide: bool) -> str:
    place = f" style='grid-column:span 2;{_CUT}'" if is_wide else ""
    return f"<div{place}><small style='{_FAINT}'>{escape(name)}</small><br/>{text}{picture}</div>"


def _bar(height_px: int, label: str, share: float, color: str, style: str, inside: str = "") -> str:
    filled = f"linear-gradient(90deg,{color} {100 * share:.1f}%,{_TRACK} 0)"
    shape = f"height:{height_px}px;border-radius:3px;background:{filled}{style}"
    return f"<div role='img' aria-label='{escape(label)}' style='{shape}'>{inside}</div>"


def _lines(height_px: int) -> str:
    height = f"clamp({height_px}px,({_NARROW_PX}px - 100cqw)*999,{2 * height_px}px)"
    return f"line-height:{height_px}px;overflow:hidden;height:{height}"


def line_chart(alt: str, points: Sequence[float], low: float | None, high: float | None, height: int) -> str:
    """Return a curve with a shaded area below it; with fewer than two points, a dashed placeholder.

    Args:
        alt: alternative text for the picture.
        points: values from left to right.
        low: value at the bottom; None for the smallest point.
        high: value at the top; None for the largest point.
        height: height of the picture in pixels; the picture fills the available width.
    """
    if len(points) < 2:
        dashes = (
            f'<path d="M0,1H2" stroke="{plotting.GREY}" stroke-dasharray="2 6" vector-effect="non-scaling-stroke"/>'
        )
        return _image(alt, "0 0 2 2", dashes, height)
    bottom = min(points) if low is None else low
    room = ((max(points) if high is None else high) - bottom) or 1.0
    tops = [_STEPS - round(min(1.0, max(0.0, (value - bottom) / room)) * _STEPS) for value in points]
    steps = " ".join(f"1 {after - before}" for before, after in itertools.pairwise(tops)).replace(" -", "-")
    # The other edges of the area are outside the picture, so that only the curve is drawn as a line.
    path = f"M-9,99V{tops[0]}H0l{steps}h9V99"
    line = f'fill="{plotting.GREEN}26" stroke="{plotting.GREEN}" stroke-width="1.5" vector-effect="non-scaling-stroke"'
    return _image(alt, f"0 -3 {len(points) - 1} {_STEPS + 6}", f'<path d="{path}" {line}/>', height)


def stacked_bar(alt: str, parts: Iterable[tuple[float, str]], height: int) -> str:
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
    return _image(alt, None, drawn, height, ";border-radius:3px")


def _image(alt: str, view: str | None, drawn: str, height: int, style: str = "") -> str:
    box = f' viewBox="{view}" preserveAspectRatio="none"' if view else ""
    svg = f'<svg xmlns="http://www.w3.org/2000/svg"{box}>{drawn}</svg>'
    # The height is set twice: style sheets of the page may override one, and some front ends remove styles.
    shape = f"width='100%' height='{height}' style='display:block;height:{height}px{style}'"
    return f"<img alt='{escape(alt)}' {shape} src='data:image/svg+xml,{quote(svg, _PLAIN)}'/>"
