"""The launcher's texts as HTML: all variable text is escaped, and colors follow the front end's theme.

One style sheet, which applies only to launchers, styles the widgets; the form also works without it.
"""

from __future__ import annotations

from urllib.parse import quote

from colabkit.foundation import Report, escape, plotting

ROOT, POINTED = "colabkit-launcher", "colabkit-pointed"
_TEXT = "var(--jp-ui-font-color1,var(--colab-primary-text-color,var(--vscode-foreground,inherit)))"
LINE = "var(--jp-border-color2,var(--colab-border-color,var(--vscode-panel-border,#8886)))"
_FONT = "font:13px/20px system-ui,sans-serif"
_SMALL = "font:12px/16px system-ui,sans-serif"
_MONO = "font:12px/18px ui-monospace,monospace"
_ACCENT, _ALARM = plotting.BLUE, plotting.VERMILLION
_FAINT = "opacity:.72"
# An arrow that follows the theme, because that of ipywidgets is black even in dark themes.
_ARROW_SVG = (
    f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 18 18'><path d='M5 7l4 4 4-4' fill='none' "
    f"stroke='{plotting.GREY}' stroke-width='2'/></svg>"
)
_ARROW = f'url("data:image/svg+xml,{quote(_ARROW_SVG)}")'
# Width in pixels below which labels are placed above their fields.
_NARROW_PX = 460
# Width in pixels below which tables become lists, and a button is above the code that it copies.
_LIST_PX = 300
LABEL_PX = 112
# In the HTML of a widget, only inline event handlers can run scripts. If they are blocked, a click selects the code.
_COPY = (
    "getSelection().selectAllChildren(this.nextElementSibling);"
    "this.textContent=document.execCommand('copy')?'Copied':'Press Ctrl+C'"
)


def sheet(kept: str) -> str:
    """Return the style sheet, which applies only to launchers, and also hides elements of the CSS class `kept`."""
    rules = {
        "&": f"container-type:inline-size;box-sizing:border-box;border-radius:8px;color:{_TEXT};accent-color:{_ACCENT}",
        "& .widget-html,& .widget-html-content": "overflow:visible;height:auto;margin:0;line-height:20px;min-width:0",
        "& .widget-html-content": "flex:1 1 auto;width:100%",
        "& .colabkit-field": "display:flex;flex-direction:row;align-items:flex-start;height:auto;min-height:28px",
        "& .widget-label": f"text-align:left;color:{_TEXT};{_FONT};line-height:28px;height:28px;margin:0 8px 0 0",
        # Mixed with the color of text, the color of the alarm can be read at this size in both themes.
        f"& .{POINTED}>.widget-label": f"color:color-mix(in srgb,{_ALARM} 75%,currentColor);font-weight:600",
        f"& .{POINTED} input,& .{POINTED} select": f"border-color:{_ALARM}!important",
        "& input,& select,& button": _FONT,
        "& select": "padding:0 6px",
        "& .widget-dropdown select": f"height:28px;line-height:20px;background-image:{_ARROW}!important",
        # Otherwise, boxes cut off the outline of a focused button.
        "& .widget-box": "overflow:visible",
        "& .widget-select": "width:auto;height:auto",
        "& .widget-select select": "padding:4px;border-radius:4px",
        "& .widget-select option": "padding:3px 6px",
        "& button": "margin:0;border-radius:4px;width:auto;height:auto;min-height:28px;padding:3px 14px;"
        "line-height:20px;white-space:normal",
        "& button.colabkit-main": f"background:{_ACCENT};color:#fff;font-weight:600;padding:3px 24px",
        "& button.colabkit-switch": f"background:none;box-shadow:none!important;border:0;padding:3px 6px;"
        f"margin-left:-6px;color:{_TEXT};text-align:left",
        "& button:focus-visible,& input:focus-visible,& select:focus-visible": f"outline:2px solid {_ACCENT};"
        "outline-offset:1px",
        "& .colabkit-only": "display:grid;grid-template-columns:150px 1fr;gap:10px 12px;align-items:start",
        # The first line of the code is short, so the button does not cover it.
        "& .colabkit-copy": f"position:absolute;top:6px;right:6px;{_SMALL};min-height:24px;padding:2px 8px;"
        f"border:1px solid #8888;background:none;color:{_TEXT};cursor:pointer",
        "& summary": "display:list-item;list-style-type:'▸ ';padding-left:12px;text-indent:-12px",
        "& details[open]>summary": "list-style-type:'▾ '",
        "& summary>div": "display:inline;font-weight:400!important",
        "& details[open]>summary>div": "font-weight:600!important",
        "& table": "font-size:13px;margin:4px 0 0 12px",
        "& [aria-label='Training result'] table": "margin:0",
        "& [aria-label='Training panel'],& [aria-label='Training result']": "border:0!important;"
        f"border-top:1px solid {LINE}!important;border-radius:0!important;padding:14px 0 0!important",
    }
    # Repeating the class raises the specificity above that of the theme's rules.
    root = f".{ROOT}.{ROOT}"
    text = "".join(f"{where.replace('&', root)}{{{rule}}}" for where, rule in rules.items())
    stacking = {
        "& .colabkit-field": "flex-wrap:wrap;width:auto!important",
        "& .colabkit-field>.widget-label": "width:100%!important;line-height:22px;height:22px",
        "& .colabkit-source": "flex-wrap:wrap;row-gap:0!important",
        "& .colabkit-source>button": "align-self:flex-end!important",
        "& .colabkit-hint": "padding-left:0!important",
        "& .colabkit-only": "grid-template-columns:minmax(0,1fr);gap:4px",
    }
    stacked = "".join(f"{where.replace('&', root)}{{{rule}}}" for where, rule in stacking.items())
    # Rows of a name and a value become two lines.
    cells = f"{root} details table:not(:has([scope=col])) :is(tbody,tr,th,td)"
    listed = f"{cells}{{display:block;min-width:0!important;white-space:normal!important}}"
    # Keep the button above the code, which it would otherwise cover.
    listed += f"{root} .colabkit-code{{padding-top:36px!important}}"
    narrow = f"@container (max-width:{_NARROW_PX}px){{{stacked}}}@container (max-width:{_LIST_PX}px){{{listed}}}"
    return f"<style>.{kept}{{display:none}}{text}{narrow}</style>"


def heading() -> str:
    """Return the form's title."""
    return (
        f"<div style='{_FONT};color:{_TEXT}'><b style='font-size:16px'>colabkit</b>"
        f"<div style='{_FAINT}'>Trains an image classifier on a folder of images, with one folder for each class."
        "</div></div>"
    )


def hint(text: str, *, warning: str = "", is_error: bool = False) -> str:
    """Return the lines of help below a field: a hint and a warning."""
    style = f"{_SMALL};color:{_TEXT};padding-left:{LABEL_PX + 8}px;overflow-wrap:anywhere;white-space:pre-wrap"
    shown = _alert(text) if is_error else f"<div style='{_FAINT}'>{escape(text)}</div>"
    return f"<div class='colabkit-hint' style='{style}'>{shown}{_alert(warning) if warning else ''}</div>"


def _alert(text: str) -> str:
    # The text keeps its color, since the color of the mark would be hard to read at this size.
    return f"<div role='alert'><b style='color:{_ALARM}'>⚠</b> {escape(text[:1].upper() + text[1:])}</div>"


def message(text: str, *, is_error: bool = False, more: str = "") -> str:
    """Return a status or error message, with a smaller second text; empty if there is no text."""
    if not text:
        return ""
    color = _ALARM if is_error else _ACCENT
    role = "alert" if is_error else "status"
    rest = f"<div style='{_SMALL};{_FAINT};margin-top:2px'>{escape(more)}</div>" if more else ""
    return (
        f"<div role='{role}' style='{_FONT};color:{_TEXT};border-left:3px solid {color};padding:2px 0 2px 10px;"
        f"font-variant-numeric:tabular-nums;overflow-wrap:anywhere;white-space:pre-wrap'>{escape(text)}{rest}</div>"
    )


def folded(frame: str) -> str:
    """Return the last frame of the live panel in a section that is collapsed."""
    return (
        f"<details style='{_FONT};color:{_TEXT}'><summary style='display:list-item;cursor:pointer'>"
        f"Training speed</summary>{frame}</details>"
    )


def report(found: Report, *, is_open: bool) -> str:
    """Return the HTML of a report; a table is collapsed to its summary line unless `is_open` is set."""
    shown = found._repr_html_()
    line, end, table = shown.partition("</div><table")
    if not end:
        return f"<div style='{_FONT};color:{_TEXT}'>{shown}</div>"
    return (
        f"<details{' open' if is_open else ''} style='{_FONT};color:{_TEXT};border-top:1px solid {LINE};padding:8px 0;"
        "overflow-x:auto'><summary style='display:list-item;cursor:pointer;overflow-wrap:anywhere'>"
        f"{line}</div></summary><table{table}</details>"
    )


def keep(html: str, kept: str) -> str:
    """Wrap HTML for the saved notebook in an element of the class `kept`; the open launcher hides this class.

    If the widgets are missing, the front end shows an error in the preceding output, which this HTML hides.
    """
    outputs = (".jp-OutputArea-child", ".output_area")
    before = ",".join(f"{one}:not(:has(.{ROOT})):has(+{one} .{kept})" for one in outputs)
    # Style an inner element: the style of the outer one would override the rule that hides it.
    spaced = f"<div style='display:grid;grid-template-columns:minmax(0,1fr);gap:10px'>{html}</div>"
    return f"<style>{before}{{display:none}}</style><div class='{kept}'>{spaced}</div>"


def code(text: str) -> str:
    """Return the code of a cell, with a button that copies it; one click selects it."""
    style = (
        f"{_MONO};color:{_TEXT};background:#8882;margin:0;padding:10px 12px;border-radius:4px;"
        "position:relative;white-space:pre-wrap;overflow-wrap:anywhere"
    )
    button = f'<button type="button" class="colabkit-copy" onclick="{_COPY}">Copy</button>'
    return (
        f"<div class='colabkit-code' style='{style}'>{button}<span style='user-select:all'>{escape(text)}</span></div>"
    )


def line(text: str, what: str) -> str:
    """Return a description of an action, and its line of code."""
    return (
        f"<div style='{_SMALL};color:{_TEXT};padding:4px 0'>{escape(what)}<div style='{_MONO};{_FAINT};"
        f"user-select:all;overflow-wrap:anywhere'>{escape(text)}</div></div>"
    )
