"""Draw the plot of a real run, for light and dark pages.

`python tests/doubles/run_plot_picture.py` trains on the included digits with checkpoints and validation, and writes
`docs/images/run-plot-light.svg` and `-dark.svg`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from unittest import mock

import torch
from matplotlib import rc_context

import colabkit
from colabkit.foundation import plotting

IMAGES = Path(__file__).parents[2] / "docs" / "images"
COLORS = {"light": "#1f2328", "dark": "#e6edf3"}


def run(folder: Path) -> colabkit.TrainReport:
    torch.manual_seed(0)
    packed = colabkit.pack("samples:digits", folder / "digits.h5", splits={"train": 0.8, "val": 0.2}, progress=False)
    data = colabkit.open_pack(packed.path)
    model = colabkit.small_network(10, (8, 8, 3))
    step = colabkit.supervised_step(model, torch.optim.AdamW(model.parameters(), lr=5e-4))
    loader = colabkit.Loader(data["train"], 32, shuffle=True)
    held_out = colabkit.Loader(data["val"], 256)
    with colabkit.dashboard(screen="none"):
        return colabkit.train(step, loader, epochs=6, validate=held_out, to=folder / "run")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        report = run(Path(name))
    for theme, color in COLORS.items():
        texts = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color", "xtick.labelcolor")
        colors = dict.fromkeys(texts, color)
        settings = {**colors, "ytick.labelcolor": color, "svg.fonttype": "none", "svg.hashsalt": "colabkit"}
        # Plots are made for light backgrounds, with dark lines.
        with rc_context(settings), mock.patch.object(plotting, "DARK", color):
            figure = report.plot()
            drawn = plotting.encode_figure(figure, "svg", transparent=True, metadata={"Date": None})
        (IMAGES / f"run-plot-{theme}.svg").write_bytes(drawn)


if __name__ == "__main__":
    main()
