"""The panel as HTML: inline style only, pictures as data URLs, no scripts.

So it looks the same live, in a saved notebook, and where scripts and style sheets are taken out; without any style it
still reads from top to bottom. Its colours are the theme's own, its height depends on its width alone.
"""

from __future__ import annotations

from colabkit.foundation import escape
from colabkit.monitoring.panel import words
from colabkit.monitoring.panel.charts import BLUE, GREY, PALE, PURPLE, VERMILLION, line_chart, stacked_bar, thinned
from colabkit.monitoring.panel.state import PanelState

_TEXT = "var(--jp-ui-font-color1,var(--colab-primary-text-color,var(--vscode-foreground,inherit)))"
_LINE = "var(--jp-border-color2,var(--colab-border-color,var(--vscode-panel-border,#8886)))"
_TRACK = "#8884"
_FAINT = "opacity:.72"
_CUT = "overflow:hidden;text-overflow:ellipsis"
_COLORS = (VERMILLION, PURPLE, BLUE, GREY)
_SIGNS = ("▨", "▥", "■", "⊟")  # of the parts of a step, as they are drawn in the bar
_LIVE_POINTS, _FINAL_POINTS = 32, 120
_NARROW_PX = 600  # below this width texts have two lines
_ALMOST_FULL = 0.9
_SHOWN_OF_A_CALL = 140  # characters that two lines hold at most


def as_html(state: PanelState) -> str:
    """Return the panel as HTML, at most 8 kB while the run goes on, and 20 kB afterwards."""
    return (
        "<div role='group' aria-label='Training panel' style='container-type:inline-size;box-sizing:border-box;"
        f"max-width:760px;padding:14px 18px;border:1px solid {_LINE};border-radius:8px;color:{_TEXT};"
        "font:13px/20px system-ui,sans-serif;font-variant-numeric:tabular-nums'>"
        f"{_verdict(state)}{_progress(state)}{_time(state)}{_cells(state)}{_advice(state)}</div>"
    )


def _verdict(state: PanelState) -> str:
    sentence, ticking = words.verdict(state)
    # What changes all the time is shown, but not read out each time.
    rest = f" <span aria-hidden='true'>{escape(ticking)}</span>" if ticking else ""
    return f"<div role='status' style='font-weight:600;font-size:16px;{_lines(22)}'>{escape(sentence)}{rest}</div>"


def _progress(state: PanelState) -> str:
    done = words.done_share(state)
    said = "n/a" if done is None else f"{100 * done:.0f}%"
    return (
        f"<div style='{_FAINT};{_CUT};white-space:nowrap'>{escape(words.position(state))}</div>"
        f"{_bar(4, f'done: {said}', done or 0.0, GREY, ';margin:6px 0 12px')}"
    )


def _time(state: PanelState) -> str:
    parts = words.segments(state)
    said = "time of a typical step: " + ", ".join(f"{part.name} {part.text}" for part in parts)
    bar = stacked_bar(said, [(part.share or 0.0, color) for part, color in zip(parts, _COLORS, strict=True)], 14)
    legend = " ".join(
        f"<span><span aria-hidden='true' style='color:{color}'>{sign}</span> {part.name} <b>{part.text}</b></span>"
        for part, color, sign in zip(parts, _COLORS, _SIGNS, strict=True)
    )
    cost = f"<span style='margin-left:auto;{_FAINT}'>{escape(words.cost(state))}</span>"
    shape = f"display:flex;flex-wrap:wrap;gap:0 20px;margin:4px 0 12px;white-space:nowrap;{_lines(20)}"
    return f"{bar}<div style='{shape}'>{legend} {cost}</div>"


def _cells(state: PanelState) -> str:
    """Return curves and gauges in six columns, or three where it is narrow, so that their edges are in line."""
    width = f"clamp((100cqw - 72px)/6,({_NARROW_PX}px - 100cqw)*999,(100cqw - 30px)/3)"
    style = f"display:grid;grid-template-columns:repeat(auto-fit,minmax({width},1fr));gap:10px 14px"
    curves = "".join(_curve(state, curve) for curve in words.curves(state))
    gauges = "".join(_gauge(gauge) for gauge in words.gauges(state))
    return f"<div style='{style};font-size:14px;white-space:nowrap'>{curves}{gauges}</div>"


def _curve(state: PanelState, curve: words.Curve) -> str:
    points = thinned(curve.points, _FINAL_POINTS if state.is_over else _LIVE_POINTS)
    is_loss = curve.name == "Loss"
    when = "the whole run" if state.is_over or is_loss else "the last minute"
    ends = f"{curve.unit(points[0])} to {curve.unit(points[-1])}" if len(points) > 1 else "n/a"
    picture = line_chart(f"{curve.name}, {when}: {ends}", points, curve.low, curve.high, 32)
    beside = f" &#8194;{escape(words.values(state))}" if is_loss else ""
    return _cell(curve.name, f"<b>{escape(curve.text)}</b>{beside}", picture, is_loss)


def _gauge(gauge: words.Gauge) -> str:
    share = gauge.share or 0.0
    color = VERMILLION if share > _ALMOST_FULL else GREY
    name, said = gauge.name, f"{gauge.name} n/a" if gauge.share is None else f"{gauge.name} {100 * share:.0f}% full"
    hatched = ""
    if gauge.apart:
        name += f", ▨ {gauge.apart_text}"
        said += f", {100 * gauge.apart:.0f}% by tmpfs"
        place = f"margin-left:{100 * (share - gauge.apart):.1f}%;width:{100 * gauge.apart:.1f}%;height:6px"
        hatch = f"repeating-linear-gradient(135deg,{PALE} 0 1px,#0000 1px 4px)"
        hatched = f"<div style='{place};background:{hatch}'></div>"
    bar = _bar(6, said, share, color, ";margin-top:3px", hatched)
    return _cell(name, escape(gauge.text), bar, gauge.name in ("RAM", "tmpfs"))


def _advice(state: PanelState) -> str:
    action, found, gain, call = words.advised(state)
    reason, call = f"Advice: {found}" if found else "Advice", words.clipped(call, _SHOWN_OF_A_CALL)
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


def _bar(height_px: int, said: str, share: float, color: str, style: str, inside: str = "") -> str:
    filled = f"linear-gradient(90deg,{color} {100 * share:.1f}%,{_TRACK} 0)"
    shape = f"height:{height_px}px;border-radius:3px;background:{filled}{style}"
    return f"<div role='img' aria-label='{escape(said)}' style='{shape}'>{inside}</div>"


def _lines(height_px: int) -> str:
    """Return a height that depends on the panel's width alone: one line, or two where it is narrow."""
    height = f"clamp({height_px}px,({_NARROW_PX}px - 100cqw)*999,{2 * height_px}px)"
    return f"line-height:{height_px}px;overflow:hidden;height:{height}"
