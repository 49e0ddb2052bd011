"""The launcher's texts as HTML: all variable text is escaped, and colors follow the front end's theme.

One style sheet, which applies only to launchers, styles the widgets; the form also works without it.
"""

from __future__ import annotations

from colabkit.foundation import (
    Progress,
    Report,
    escape,
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
    format_share,
    plotting,
)

ROOT, POINTED = "colabkit-launcher", "colabkit-pointed"
_TEXT = "var(--jp-ui-font-color1,var(--colab-primary-text-color,var(--vscode-foreground,inherit)))"
LINE = "var(--jp-border-color2,var(--colab-border-color,var(--vscode-panel-border,#8886)))"
_SURFACE = "var(--jp-layout-color2,var(--colab-secondary-surface-color,var(--vscode-textCodeBlock-background,#8882)))"
_FONT = "font:13px/20px system-ui,sans-serif"
ACCENT, _ALARM = plotting.BLUE, plotting.VERMILLION
_FAINT = "opacity:.72"
# Below this width, labels are placed above their fields.
_NARROW_PX = 460


def sheet(kept: str) -> str:
    """Return the style sheet, which applies only to launchers, and also hides elements of the class named by `kept`."""
    rules = {
        "&": f"container-type:inline-size;box-sizing:border-box;border-radius:8px;color:{_TEXT};accent-color:{ACCENT}",
        "& .widget-html,& .widget-html-content": "overflow:visible;height:auto;margin:0;line-height:20px;min-width:0",
        "& .widget-html-content": "flex:1 1 auto;width:100%",
        "& .colabkit-field": "display:flex;flex-direction:row;align-items:flex-start;height:auto;min-height:28px",
        "& .widget-label": f"text-align:left;color:{_TEXT};{_FONT};line-height:28px;height:28px;margin:0 8px 0 0",
        f"& .{POINTED}>.widget-label": f"color:{_ALARM};font-weight:600",
        "& input,& select,& button": _FONT,
        "& select": "height:28px;line-height:20px;padding:0 6px",
        "& .widget-radio-box": "width:auto;height:auto;padding:2px 0;margin:0!important",
        "& .widget-radio-box label": f"{_FONT};display:flex;align-items:flex-start;gap:8px;width:auto;height:auto;"
        "margin:0;padding:2px 0;white-space:normal",
        "& .widget-radio-box input": "order:-1;flex:none;width:14px;height:14px;margin:3px 0",
        "& button": "margin:0;border-radius:4px;width:auto;padding:0 14px",
        "& button.colabkit-main": f"background:{ACCENT};color:#fff;font-weight:600",
        "& button.colabkit-switch": f"background:none;box-shadow:none;border:0;padding:0;color:{_TEXT}",
        "& button:focus-visible": f"outline:2px solid {ACCENT};outline-offset:2px",
        "& .progress": "margin:4px 0;height:8px;border-radius:4px;overflow:hidden",
        "& summary": "list-style-type:'▸ ';padding-left:12px;text-indent:-12px",
        "& details[open]>summary": "list-style-type:'▾ '",
        "& summary>div": "display:inline;font-weight:400!important",
        "& details[open]>summary>div": "font-weight:600!important",
        "& table": "font-size:13px;margin:4px 0 0 12px",
        "& td:last-child": "overflow-wrap:anywhere;min-width:140px",
        "& td:not(:last-child)": "white-space:nowrap",
        "& [aria-label='Training panel']": f"border:0!important;border-top:1px solid {LINE}!important;"
        "border-radius:0!important;padding:14px 0 0!important",
    }
    # Repeating the class raises the specificity above that of the theme's rules.
    root = f".{ROOT}.{ROOT}"
    text = "".join(f"{where.replace('&', root)}{{{rule}}}" for where, rule in rules.items())
    narrow = {
        "& .colabkit-field": "flex-wrap:wrap",
        "& .colabkit-field>.widget-label": "width:100%!important;line-height:22px;height:22px",
        "& .colabkit-hint": "padding-left:0!important",
        "& table,& tbody": "display:block;margin-left:0",
        "& tr": "display:flex;flex-wrap:wrap;gap:0 4px",
        "& th": "flex:0 0 68px",
        "& td:last-child": "flex:1 1 150px",
    }
    stacked = "".join(f"{where.replace('&', root)}{{{rule}}}" for where, rule in narrow.items())
    return f"<style>.{kept}{{display:none}}{text}@container (max-width:{_NARROW_PX}px){{{stacked}}}</style>"


def heading() -> str:
    """Return the panel's title."""
    return (
        f"<div style='{_FONT};color:{_TEXT}'><b style='font-size:16px'>colabkit</b>"
        f"<div style='{_FAINT}'>Copies data to local storage, packs it into one file, and trains on it.</div></div>"
    )


def hint(text: str, indent_px: int) -> str:
    """Return a line of help below a field."""
    style = f"font:12px/16px system-ui,sans-serif;color:{_TEXT};{_FAINT};padding-left:{indent_px}px"
    return f"<div class='colabkit-hint' style='{style}'>{escape(text)}</div>"


def message(text: str, *, is_error: bool = False) -> str:
    """Return a status or error message; empty if there is no text."""
    if not text:
        return ""
    color = _ALARM if is_error else ACCENT
    role = "alert" if is_error else "status"
    return (
        f"<div role='{role}' style='{_FONT};color:{_TEXT};border-left:3px solid {color};padding:2px 0 2px 10px;"
        f"overflow-wrap:anywhere;white-space:pre-wrap'>{escape(text)}</div>"
    )


def numbers(progress: Progress) -> str:
    """Return the progress figures that are shown below the bar."""
    style = f"{_FONT};color:{_TEXT};{_FAINT};font-variant-numeric:tabular-nums"
    return f"<div style='{style}'>{escape(_as_text(progress))}</div>"


def _as_text(progress: Progress) -> str:
    unit = progress.unit.strip()
    count = format_bytes if unit == "B" else format_count
    of = "" if progress.total is None else f" of {count(progress.total)}"
    parts = [f"{progress.action}: {count(progress.done)}{of}" + ("" if unit == "B" else f" {unit}")]
    if progress.total:
        parts.append(format_share(min(1.0, progress.done / progress.total)))
    if unit != "s" and progress.done and progress.seconds >= 0.5:
        per_s = progress.done / progress.seconds
        parts.append(f"{format_bytes(per_s)}/s" if unit == "B" else format_rate(per_s, unit))
        left_s = (progress.total - progress.done) / per_s if progress.total else 0.0
        if left_s >= 1:
            parts.append(f"{format_seconds(left_s)} left")
    if progress.note:
        parts.append(progress.note)
    return " · ".join(parts)


def report(found: Report, *, is_open: bool) -> str:
    """Return a report as its summary line and a collapsible table, which is expanded if `is_open`."""
    line, _, table = found._repr_html_().partition("</div>")
    return (
        f"<details{' open' if is_open else ''} style='{_FONT};color:{_TEXT};border-top:1px solid {LINE};padding:8px 0;"
        f"overflow-x:auto'><summary style='cursor:pointer;overflow-wrap:anywhere'>{line}</div></summary>{table}"
        "</details>"
    )


def keep(html: str, kept: str) -> str:
    """Wrap HTML for the saved notebook in an element of the class `kept`; the open launcher hides this class."""
    return f"<div class='{kept}'>{html}</div>"


def code(text: str) -> str:
    """Return the code of a cell, formatted so that one click selects it."""
    style = (
        f"font:12px/18px ui-monospace,monospace;color:{_TEXT};background:{_SURFACE};margin:0;padding:10px 12px;"
        "border-radius:4px;overflow-x:auto;white-space:pre;user-select:all"
    )
    return f"<pre style='{style}'>{escape(text)}</pre>"
