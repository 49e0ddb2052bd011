"""What a probe shows: its rates against concurrency as bars, as a picture in notebooks and as text in terminals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from colabkit.foundation import MissingPackage, escape, plotting

_EIGHTHS = " ▏▎▍▌▋▊▉"
_TEXT_BAR = 24


class RateBar(NamedTuple):
    """One bar: the label below it, its value or None where there is none, the value as text, whether it is best."""

    label: str
    value: float | None
    text: str
    is_best: bool


class RatePanel(NamedTuple):
    """Some bars, their colour, what they show, in what unit, and what their labels count."""

    color: str
    title: str
    unit: str
    axis: str
    bars: Sequence[RateBar]

    def count_of(self, bar: RateBar) -> str:
        """Return what a bar's label counts, as in `"thread"`."""
        return self.axis.removesuffix("s") if bar.label == "1" else self.axis


def draw_rates(panels: Sequence[RatePanel]) -> str:
    """Return the panels side by side as an inline SVG picture; without matplotlib, their text."""
    if not panels:
        return ""
    try:
        figure = plotting.new_figure("draw the rates", 2.7 * len(panels), 1.8)
    except MissingPackage:
        return f"<pre>{escape(text_bars(panels))}</pre>"
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        places = range(len(panel.bars))
        drawn = axes.bar(places, [bar.value or 0.0 for bar in panel.bars], 0.7, edgecolor=panel.color)
        texts = axes.bar_label(drawn, [bar.text for bar in panel.bars], padding=2, fontsize=8)
        for bar, shape, text in zip(panel.bars, drawn, texts, strict=True):
            # The best bar is solid and its value bold: nothing is said by colour alone.
            shape.set_facecolor(panel.color if bar.is_best else f"{panel.color}40")
            text.set_fontweight("bold" if bar.is_best else "normal")
        plotting.style_axes(axes, f"{panel.title}, {panel.unit}", "")
        axes.set_xticks(places, [bar.label for bar in panel.bars])
        axes.set_xlabel(panel.axis, fontsize=8)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.margins(y=0.15)
    told = "; ".join(
        f"{panel.title}, {panel.unit}: "
        + ", ".join(f"{bar.text} with {bar.label} {panel.count_of(bar)}" for bar in panel.bars)
        for panel in panels
    )
    return plotting.svg_of(figure, "Rates against concurrency", told)


def text_bars(panels: Sequence[RatePanel]) -> str:
    """Return the panels as lines of text, one a bar."""
    lines = []
    for panel in panels:
        top = max((bar.value or 0.0 for bar in panel.bars), default=0.0) or 1.0
        wide = max(len(bar.text) for bar in panel.bars)
        for number, bar in enumerate(panel.bars):
            eighths = round(8 * _TEXT_BAR * (bar.value or 0.0) / top)
            drawn = "█" * (eighths // 8) + _EIGHTHS[eighths % 8]
            name = f"{panel.title}, {panel.unit}" if number == 0 else ""
            mark = " best" if bar.is_best else ""
            lines.append(f"  {name:<26}  {bar.label:>2} {panel.count_of(bar):<9}{bar.text:>{wide}}  {drawn}{mark}")
    return "\n".join(line.rstrip() for line in lines)
