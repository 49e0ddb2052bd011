"""The panel's picture: one pure function from a state to HTML and plain text.

The HTML has inline style only and pictures as data URLs, so it looks the same live, in a saved notebook and where
scripts and style sheets are stripped. Colours of text and frame are the theme's own. Colours of curves pass 3:1
contrast on white and on #131314 (Okabe and Ito's blue, vermilion and green); nothing is said by colour alone.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence

from colabkit._reports import escape
from colabkit._units import format_bytes, format_count, format_fill, format_seconds, format_share
from colabkit.panel.state import PanelState
from colabkit.telemetry import HostSnapshot

__all__ = ["render"]

BLUE, VERMILION, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#767676"
_TEXT = "var(--jp-ui-font-color1, var(--colab-primary-text-color, var(--vscode-foreground, inherit)))"
_FAINT = "var(--jp-ui-font-color2, var(--colab-primary-text-color, var(--vscode-foreground, inherit)))"
_LINE = "var(--jp-border-color2, var(--colab-border-color, var(--vscode-panel-border, #8884)))"
_TRACK = "var(--jp-layout-color3, var(--colab-border-color, #8883))"
_ONE_LINE = "white-space:nowrap;overflow:hidden;text-overflow:ellipsis"
_BARS = "▁▂▃▄▅▆▇█"
_MODERATE, _HIGH = 0.05, 0.20  # shares of input time that TensorFlow's profiler calls moderate and high
_TEXT_BAR = 24


def render(state: PanelState) -> tuple[str, str]:
    """Return the panel as HTML and as plain text."""
    return _html(state), _text(state)


def verdict(state: PanelState) -> str:
    """Return the one sentence that matters: does training wait for its data?"""
    if state.phase == "waiting" and state.waiting_s >= 1:
        return f"Waiting for data since {format_seconds(state.waiting_s)}"
    if state.wait_share is None:
        early = {"finished": "Finished", "stopped": f"Stopped by {state.stopped_by}"}
        return early.get(state.phase, "Warming up")
    share = format_share(state.wait_share)
    past = state.phase in ("finished", "stopped")
    if state.wait_share < _MODERATE:
        sentence = f"Data {'kept' if past else 'keeps'} up: {share} of the time waiting"
    elif state.wait_share < _HIGH:
        sentence = f"Data {'slowed' if past else 'slows'} training: {share} of the time waiting"
    else:
        sentence = f"Training {'waited' if past else 'waits'} for data: {share} of the time"
    return f"Stopped by {state.stopped_by}. {sentence}" if state.phase == "stopped" else sentence


def _position(state: PanelState) -> str:
    if state.epoch is None:
        return format_seconds(state.elapsed_s)
    epochs = f"/{state.epochs}" if state.epochs else ""
    steps = f" · step {format_count(state.step)}/{format_count(state.steps_per_epoch)}" if state.steps_per_epoch else ""
    if state.phase in ("finished", "stopped"):
        end = f"{format_seconds(state.elapsed_s)} in all"
    else:
        end = f"{format_seconds(state.remaining_s)} left" if state.remaining_s is not None else ""
    return " · ".join(filter(None, [f"epoch {state.epoch}{epochs}{steps}", end]))


def _done_share(state: PanelState) -> float:
    if state.phase == "finished":
        return 1.0
    if not state.steps_per_epoch or state.epoch is None:
        return 0.0
    epochs = state.epochs or 1
    epoch = state.epoch - 1 if state.epochs else 0
    return min(1.0, (epoch + state.step / state.steps_per_epoch) / epochs)


def _speed(state: PanelState) -> str:
    return "n/a" if state.images_per_s is None else f"{format_count(state.images_per_s)} images/s"


def _delivery(state: PanelState) -> str:
    if state.gathered_bytes_per_s is None or state.occupancy_rate is None:
        return "n/a"
    return f"{format_bytes(state.gathered_bytes_per_s)}/s, {format_share(state.occupancy_rate)} of batches ready"


def _values(state: PanelState) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in state.values.items()) or "n/a"


def _machine(host: HostSnapshot | None) -> list[tuple[str, float | None, str]]:
    """Return name, share of the limit and text of each of the machine's parts."""
    if host is None:
        return []
    parts: list[tuple[str, float | None, str]] = [
        ("CPU", host.cpu_rate, _percent(host.cpu_rate)),
        (
            "RAM",
            host.ram_used_bytes / max(1, host.ram_total_bytes),
            format_fill(host.ram_used_bytes, host.ram_total_bytes),
        ),
    ]
    for number, gpu in enumerate(host.gpus):
        name = "GPU" if len(host.gpus) == 1 else f"GPU {number}"
        parts.append((name, gpu.utilization_rate, _percent(gpu.utilization_rate)))
        if gpu.used_bytes is not None and gpu.total_bytes:
            text = format_fill(gpu.used_bytes, gpu.total_bytes)
            parts.append((f"{name} memory", gpu.used_bytes / gpu.total_bytes, text))
    if not host.gpus:
        parts.append(("GPU", None, "none"))
    return parts


def _percent(share: float | None) -> str:
    return "n/a" if share is None else f"{100 * share:.0f}%"


def _text(state: PanelState) -> str:
    done = round(_TEXT_BAR * _done_share(state))
    machine = " · ".join(f"{name} {text}" for name, _, text in _machine(state.host))
    waiting, working = _time_shares(state)
    lines = [
        verdict(state),
        f"  {'█' * done}{'░' * (_TEXT_BAR - done)}  {_position(state)}",
        f"  time     waiting for data {waiting} · the step itself {working}",
        f"  speed    {_speed(state):<24}{_text_curve(state.speed_curve, 0.0)}",
        f"  data     {_delivery(state)}",
        f"  step     {_values(state):<24}  {_text_curve(state.loss_curve)}",
        f"  machine  {machine or 'n/a'}",
    ]
    return "\n".join(line.rstrip() for line in lines)


def _time_shares(state: PanelState) -> tuple[str, str]:
    if state.wait_share is None:
        return "n/a", "n/a"
    return format_share(state.wait_share), format_share(1 - state.wait_share)


def _text_curve(curve: Sequence[float], floor: float = math.inf, width: int = 24) -> str:
    if len(curve) < 2:
        return ""
    width = min(width, len(curve))
    points = [curve[round(index * (len(curve) - 1) / (width - 1))] for index in range(width)]
    low, high = min(floor, *points), max(points)
    return "".join(_BARS[round((value - low) / (high - low or 1) * (len(_BARS) - 1))] for value in points)


def _html(state: PanelState) -> str:
    waiting, working = _time_shares(state)
    share = state.wait_share or 0.0
    has_gpu_curve = len(state.gpu_curve) > 1
    curves = [
        ("Speed", _speed(state), state.speed_curve, BLUE, 0.0),
        ("Loss", f"{state.values['loss']:.4g}" if "loss" in state.values else "n/a", state.loss_curve, GREEN, math.inf),
        *([("GPU", _percent(state.gpu_curve[-1]), state.gpu_curve, VERMILION, 0.0)] if has_gpu_curve else []),
    ]
    cost = "" if state.cost_share is None else f"panel {format_share(state.cost_share)}"
    rest = {name: value for name, value in state.values.items() if name != "loss"}
    notes = [f"data {_delivery(state)}", *(f"{name} {value:.4g}" for name, value in rest.items()), cost]
    return (
        f'<div role="group" aria-label="Training panel" style="box-sizing:border-box;max-width:760px;height:232px;'
        f"overflow:hidden;padding:12px 16px;border:1px solid {_LINE};border-radius:6px;color:{_TEXT};"
        f'font:13px/1.45 system-ui,sans-serif;font-variant-numeric:tabular-nums">'
        f'<div role="status" style="font-weight:600;{_ONE_LINE}">{escape(verdict(state))}</div>'
        f'<div style="color:{_FAINT};{_ONE_LINE}">{escape(_position(state))}</div>'
        f"{_bar(_done_share(state), GREY, 'height:4px;margin:4px 0 10px')}"
        f'<div style="display:flex;justify-content:space-between;gap:12px;white-space:nowrap">{_label("Time")}'
        f'<span><span style="color:{VERMILION}">■</span> waiting for data {waiting} &nbsp;'
        f'<span style="color:{BLUE}">■</span> step {working}</span></div>'
        f'<div role="img" aria-label="waiting for data {waiting}, the step itself {working}" style="display:flex;'
        f'height:8px;margin:3px 0 10px;border-radius:2px;overflow:hidden;background:{_TRACK}">'
        f'<div style="width:{100 * share:.2f}%;background:{VERMILION}"></div>'
        f'<div style="width:{100 * (1 - share) if waiting != "n/a" else 0:.2f}%;background:{BLUE}"></div></div>'
        f'<div style="display:flex;gap:24px;margin-bottom:8px">{"".join(_curve(*curve) for curve in curves)}</div>'
        f'<div style="display:flex;gap:20px;margin-bottom:6px">'
        f"{''.join(_gauge(*part) for part in _machine(state.host))}</div>"
        f'<div style="color:{_FAINT};font-size:12px;{_ONE_LINE}">{escape(" · ".join(filter(None, notes)))}</div></div>'
    )


def _label(text: str) -> str:
    return f'<span style="color:{_FAINT};white-space:nowrap">{escape(text)}</span>'


def _bar(share: float, color: str, style: str) -> str:
    width = 100 * min(1.0, max(0.0, share))
    return (
        f'<div style="background:{_TRACK};border-radius:2px;overflow:hidden;{style}">'
        f'<div style="width:{width:.1f}%;height:100%;background:{color}"></div></div>'
    )


def _gauge(name: str, share: float | None, text: str) -> str:
    is_memory = name == "RAM" or name.endswith("memory")  # a full CPU or GPU is no danger
    color = VERMILION if is_memory and (share or 0.0) > 0.9 else GREY
    return (
        f'<div style="flex:{12 + len(name) + len(text)};min-width:0">'
        f'<div style="{_ONE_LINE}">{_label(name)} {escape(text)}</div>'
        f"{_bar(share or 0.0, color, 'height:4px;margin-top:3px')}</div>"
    )


def _curve(name: str, text: str, curve: Sequence[float], color: str, floor: float) -> str:
    return (
        f'<div style="flex:1;min-width:0"><div style="display:flex;justify-content:space-between;white-space:nowrap">'
        f"{_label(name)}<span>{escape(text)}</span></div>{_curve_image(name, curve, color, floor)}</div>"
    )


def _curve_image(name: str, curve: Sequence[float], color: str, floor: float) -> str:
    """Return a line chart, from `floor` or its own minimum to its maximum, as a picture of 36 pixels height."""
    width, height = 240, 36
    if len(curve) > 1:
        low, high = min(floor, *curve), max(curve)
        points = [
            (index * width / (len(curve) - 1), height - 2 - (value - low) / (high - low or 1) * (height - 4))
            for index, value in enumerate(curve)
        ]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        drawn = (
            f'<polygon points="0,{height} {line} {width},{height}" fill="{color}" fill-opacity="0.12"/>'
            f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5" '
            f'vector-effect="non-scaling-stroke"/>'
        )
        alt = f"{name} from {curve[0]:.3g} to {curve[-1]:.3g}, between {min(curve):.3g} and {high:.3g}"
    else:
        drawn, alt = "", f"{name}: no curve yet"
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'preserveAspectRatio="none">{drawn}</svg>'
    )
    data = base64.b64encode(svg.encode()).decode()
    return (
        f'<img alt="{escape(alt)}" src="data:image/svg+xml;base64,{data}" '
        f'style="display:block;width:100%;height:{height}px;max-width:none">'
    )
