"""The panel's pictures: small SVG images as data URLs, which survive where inline SVG and style sheets do not.

Inside such an image no colour of the page applies, so all of them pass 3:1 contrast on white and on #131314 (blue,
vermillion, green and purple of Okabe and Ito, and a grey); nothing is said by colour alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from urllib.parse import quote

from colabkit.foundation import escape

BLUE, VERMILLION, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#767676"
_PLAIN = ' "=/:;,()'  # what a data URL may hold as it is
_STEPS = 64  # vertical resolution of a curve
PALE = "#fff8"  # of the patterns
_HATCH = (
    '<pattern id="h" width="6" height="6" patternUnits="userSpaceOnUse">'
    f'<path d="M0,0H6V6H0" fill="{VERMILLION}"/><path d="M0,6L6,0M-1,1L1,-1M5,7L7,5" stroke="{PALE}"/></pattern>'
)


def line_chart(alt: str, points: Sequence[float], low: float | None, high: float | None, height: int) -> str:
    """Return a curve above its shaded area; without two points a dashed line that is no value.

    Args:
        alt: the picture in words.
        points: from left to right.
        low: value at the bottom; by default the least.
        high: value at the top; by default the greatest.
        height: of the picture in pixels; it is as wide as its place.
    """
    if len(points) < 2:
        dashes = f'<path d="M0,1H2" stroke="{GREY}" stroke-dasharray="2 6" vector-effect="non-scaling-stroke"/>'
        return _image(alt, "0 0 2 2", dashes, height)
    bottom = min(points) if low is None else low
    room = ((max(points) if high is None else high) - bottom) or 1.0
    tops = [_STEPS - round(min(1.0, max(0.0, (value - bottom) / room)) * _STEPS) for value in points]
    steps = " ".join(f"1 {after - before}" for before, after in itertools.pairwise(tops)).replace(" -", "-")
    # The area's other edges lie outside of the picture, so that no line is drawn but the curve.
    path = f"M-9,99V{tops[0]}H0l{steps}h9V99"
    line = f'fill="{GREEN}26" stroke="{GREEN}" stroke-width="1.5" vector-effect="non-scaling-stroke"'
    return _image(alt, f"0 -3 {len(points) - 1} {_STEPS + 6}", f'<path d="{path}" {line}/>', height)


def stacked_bar(alt: str, parts: Iterable[tuple[float, str]], height: int) -> str:
    """Return a bar of shares in [0, 1] side by side, each with its colour and a pattern of its own."""
    drawn, left = f'{_HATCH}<rect width="100%" height="100%" fill="{GREY}30"/>', 0.0
    for share, color in parts:
        x, width, left = f"{100 * left:.1f}%", f"{100 * share:.1f}%", left + share
        if share <= 0:
            continue
        fill = "url(#h)" if color == VERMILLION else color
        drawn += f'<rect x="{x}" width="{width}" height="100%" fill="{fill}"/>'
        if color == PURPLE:
            line = f'stroke="{PALE}" stroke-width="100%" stroke-dasharray="1 3"'
            drawn += f'<line x1="{x}" y1="50%" x2="{100 * left:.1f}%" y2="50%" {line}/>'
        elif color == GREY:
            drawn += f'<rect x="{x}" y="40%" width="{width}" height="20%" fill="{PALE}"/>'
    return _image(alt, None, drawn, height, ";border-radius:3px")


def thinned(points: Sequence[float], most: int) -> tuple[float, ...]:
    """Return at most so many points: means of neighbours, from the oldest to the newest."""
    if len(points) <= most:
        return tuple(points)
    edges = [round(number * len(points) / most) for number in range(most + 1)]
    return tuple(sum(points[a:b]) / (b - a) for a, b in itertools.pairwise(edges))


def _image(alt: str, view: str | None, drawn: str, height: int, style: str = "") -> str:
    box = f' viewBox="{view}" preserveAspectRatio="none"' if view else ""
    svg = f'<svg xmlns="http://www.w3.org/2000/svg"{box}>{drawn}</svg>'
    # The height is said twice: pages have style sheets of their own, and some take styles out.
    shape = f"width='100%' height='{height}' style='display:block;height:{height}px{style}'"
    return f"<img alt='{escape(alt)}' {shape} src='data:image/svg+xml,{quote(svg, _PLAIN)}'/>"
