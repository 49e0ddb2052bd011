"""`TrainReport.plot()`: a figure of every value, and of speed and waiting."""

from __future__ import annotations

import sys

import pytest
import torch

from colabkit.errors import InvalidOption, MissingPackage
from colabkit.loader import Loader
from colabkit.training import train


def test_every_value_has_its_axes_with_training_and_validation(tmp_path, data):
    report = train(
        lambda batch: {"loss": torch.tensor(0.5), "rate": 3},
        Loader(data, 4),
        epochs=3,
        validate=lambda: {"loss": 0.4, "score": 0.9},
    )
    figure = report.plot()
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "rate", "score", "images/s"]
    assert [axes.get_xlabel() for axes in figure.axes] == ["step", "step", "step", "epoch"]
    loss = figure.axes[0]
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["training", "validation"]
    assert list(loss.lines[-1].get_xdata()) == [6, 12, 18]
    assert list(loss.lines[-1].get_ydata()) == [0.4, 0.4, 0.4]
    assert len(figure.axes[-1].patches) >= 3
    figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_what_cannot_be_drawn_is_left_out(tmp_path, data, value):
    report = train(lambda batch: value, Loader(data, 4))
    report.plot().savefig(tmp_path / "figure.png")


def test_nothing_trained_or_nothing_to_draw_with_is_one_line(data, monkeypatch):
    with pytest.raises(InvalidOption, match="no steps yet"):
        train(lambda batch: None, Loader(data, 4), epochs=0).plot()
    report = train(lambda batch: 1.0, Loader(data, 4))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackage, match="pip install matplotlib"):
        report.plot()
