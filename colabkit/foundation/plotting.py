"""Figures: their common style, creation and encoding. Matplotlib, which is optional, is imported with the first figure.

The colors of lines are from Okabe and Ito's palette. Except for orange on white, their contrast is at least 3:1 on
white and on black. No information is shown by color alone.
"""

from __future__ import annotations

import io
import os
import re
import warnings
from typing import TYPE_CHECKING, Any, Literal

from colabkit.foundation.checks import import_optional
from colabkit.foundation.errors import InvalidOption
from colabkit.foundation.file_changes import translated
from colabkit.foundation.messages import cannot
from colabkit.foundation.mount_table import user_path
from colabkit.foundation.partials import write_atomically
from colabkit.foundation.reports import escape

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

BLUE, VERMILLION, GREEN, PURPLE, ORANGE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"
GREY, DARK = "#767676", "#333333"
_FAINT = "#8a8a8a"


def new_figure(act: str, width: float, height: float, title: str = "", *, is_arranged: bool = True) -> Figure:
    """Return an empty figure.

    Args:
        act: verb and object for the message.
        width: width in inches.
        height: height in inches.
        title: title above all axes, aligned left.
        is_arranged: whether to use Matplotlib's constrained layout; otherwise axes keep their positions.

    Raises:
        MissingPackage: if Matplotlib is not installed.
    """
    import_optional("matplotlib.figure", act, "to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    class DisplayedFigure(Figure):
        # Notebooks display other figures only after `%matplotlib inline`.
        def _repr_png_(self) -> bytes:
            return encode_figure(self, "png")

    layout = ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.1) if is_arranged else None
    figure = DisplayedFigure(figsize=(width, height), layout=layout)
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, x=0.012, ha="left", fontsize=12, fontweight="bold")
    return figure


def style_axes(axes: Axes, title: str, unit: str, lines: int = 1) -> None:
    """Style axes with a title on the left and a unit; `lines=2` leaves room for a legend below the title."""
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", pad=6 + 15 * (lines - 1))
    axes.set_ylabel(unit, fontsize=9)
    axes.xaxis.label.set_fontsize(9)
    axes.tick_params(labelsize=8, color=_FAINT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.grid(axis="y", color=_FAINT, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)


def add_legend(axes: Axes, side: Literal["left", "right"] = "right") -> None:
    """Add a legend above the axes: on the right, in line with the title, or on the left, below the title."""
    is_right = side == "right"
    legend = axes.legend(
        loc="lower right" if is_right else "lower left",
        bbox_to_anchor=(int(is_right), 1),
        ncols=5,
        frameon=False,
        fontsize=8,
        borderaxespad=0.1,
        borderpad=0.4 if is_right else 0.2,
        columnspacing=1.0,
        handlelength=1.6,
    )
    # The title reserves the space; a long legend may extend beyond its axes.
    legend.set_in_layout(False)


def shorten_text(text: Text, width_px: float) -> None:
    """Truncate text in a figure to a width in pixels."""
    whole = text.get_text()
    with warnings.catch_warnings(action="ignore"):
        while whole and (wide := text.get_window_extent().width) > width_px:
            whole = whole[: min(len(whole) - 1, int(len(whole) * width_px / wide) + 2)]
            text.set_text(whole.rstrip(" ,.-_") + "…")


def encode_figure(figure: Figure, kind: str, **options: Any) -> bytes:
    """Return a figure as the bytes of an image file; `kind` is a format such as `"png"` or `"pdf"`."""
    written = io.BytesIO()
    with warnings.catch_warnings():
        # Matplotlib draws characters that the font lacks as boxes, and would warn about each.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure.savefig(written, format=kind, **options)
    return written.getvalue()


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure to a file, atomically replacing an existing one; see `TrainReport.plot`."""
    act = f"save the figure as {os.fspath(path)!r}"
    target = user_path(path, act).absolute()
    formats = figure.canvas.get_supported_filetypes()
    if (ending := target.suffix[1:].lower()) not in formats:
        found = f"{target.suffix!r} is not an image format" if ending else "its name has no extension"
        expected = f"one of the extensions {', '.join(formats)}"
        raise InvalidOption(cannot(act, found, expected, "For example, save it as run.png"))
    drawn = encode_figure(figure, ending)
    with translated(act):
        write_atomically(target, drawn, durable=True)


def svg_of(figure: Figure, title: str, description: str) -> str:
    """Return a figure as transparent inline SVG whose text has the text color of the page.

    Args:
        figure: the figure, with black text.
        title: title for screen readers.
        description: description for screen readers.
    """
    from matplotlib import rc_context

    # Write text as text elements in the font of the page, and make the output deterministic.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "colabkit"}):
        drawn = encode_figure(figure, "svg", transparent=True, metadata={"Date": None}).decode()
    body = drawn[drawn.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", body)
    texts = f"<title>{escape(title)}</title><desc>{escape(description)}</desc>"
    # Matplotlib sets no fill color for black text, so the text inherits this one.
    head = '<svg role="img" fill="currentColor" style="display:block;max-width:100%;height:auto;margin:8px 0 2px"'
    return body.replace("<svg", head, 1).replace(">", f">{texts}", 1)
