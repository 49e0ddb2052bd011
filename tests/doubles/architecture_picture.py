"""Draw the diagram of the architecture, for light and dark pages.

`python tests/doubles/architecture_picture.py` writes `docs/images/architecture-light.svg` and `-dark.svg`.
"""

from __future__ import annotations

from pathlib import Path

IMAGES = Path(__file__).parents[2] / "docs" / "images"
WIDTH, HEIGHT = 980, 330
# Colors of text, lines, boxes, the accent, and text on the accent.
THEMES = {
    "light": ("#1f2328", "#767676", "#f3f6f9", "#0072B2", "#ffffff"),
    "dark": ("#e6edf3", "#9aa4ae", "#1c232b", "#3a9ad9", "#0d1117"),
}
# For each box: title, further lines, left edge and width.
BOXES = (
    ("Remote source", ("Drive, archive, table,", "bucket, address"), 8, 176),
    ("Local files", ("disk or tmpfs",), 256, 116),
    ("Pack", ("one sealed HDF5 file,", "memory-mapped"), 444, 172),
    ("Batches", ("on the device",), 692, 112),
    ("Training", ("steps",), 876, 96),
)
VERBS = ("stage", "pack", "Loader", "train")
ROOMS = ("storage", "packs", "loading", "training")
NOTES = (("concurrent,", "every byte counted"), ("each image", "decoded once"), ("gathered ahead,", "random crops"), ())
TOP, BOX = 92, 84


def picture(theme: str) -> str:
    text, line, box, accent, on_accent = THEMES[theme]
    middle = TOP + BOX / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="15" fill="{text}">',
        "<title>The way of the data through colabkit</title>",
        f'<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 8 4 0 8z" fill="{line}"/></marker></defs>',
    ]

    def write(x: float, y: float, words: str, style: str = "") -> None:
        parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="middle" {style}>{words}</text>')

    def arrow(path: str, style: str = "") -> None:
        parts.append(
            f'<path d="{path}" fill="none" stroke="{line}" stroke-width="1.6" marker-end="url(#head)" {style}/>'
        )

    for title, lines, left, width in BOXES:
        parts.append(f'<rect x="{left}" y="{TOP}" width="{width}" height="{BOX}" rx="8" fill="{box}" stroke="{line}"/>')
        first = middle - 9 * len(lines) + 4
        write(left + width / 2, first, title, 'font-weight="600" font-size="17"')
        for number, words in enumerate(lines, 1):
            write(left + width / 2, first + 18 * number, words)
    for verb, room, notes, one, other in zip(VERBS, ROOMS, NOTES, BOXES[:-1], BOXES[1:], strict=True):
        start, end = one[2] + one[3], other[2]
        center = (start + end) / 2
        arrow(f"M{start + 3} {middle}H{end - 3}")
        write(center, middle - 10, verb, f'font-weight="600" fill="{accent}"')
        write(center, TOP - 14, room, f'font-size="14" fill="{line}" font-style="italic"')
        for number, words in enumerate(notes):
            write(center, TOP + BOX + 20 + 16 * number, words, f'font-size="13" fill="{line}"')
    # Arrow for the pack, which is saved to the remote source.
    arrow(f"M530 {TOP - 4}V38H94V{TOP - 5}", 'stroke-dasharray="5 4"')
    write(317, 54, "saved by prepare: the next session copies one file")
    # Arrow for checkpoints, which are also saved to the remote source.
    arrow(f"M924 {TOP - 4}V14H54V{TOP - 5}", 'stroke-dasharray="5 4"')
    write(740, 29, "checkpoints, written in the background")
    # Arrows for the meters of all stages.
    low = 252
    for center in (220, 408, 654, 924):
        arrow(f"M{center} {TOP + BOX + (48 if center != 924 else 6)}V{low - 4}", 'stroke-opacity="0.7"')
    parts.append(f'<rect x="180" y="{low}" width="790" height="64" rx="8" fill="{accent}"/>')
    style = f'fill="{on_accent}"'
    write(575, low + 27, "meters → doctor and panel", f'{style} font-weight="600" font-size="17"')
    write(575, low + 49, "What is training waiting for, what fixes it, and how fast is it then?", style)
    write(90, low + 38, "monitoring", f'font-size="14" fill="{line}" font-style="italic"')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    for theme in THEMES:
        (IMAGES / f"architecture-{theme}.svg").write_text(picture(theme))


if __name__ == "__main__":
    main()
