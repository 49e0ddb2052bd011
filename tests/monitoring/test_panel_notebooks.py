"""The panel in real kernels: with the packages of this environment, and with Colab's if they are installed."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import nbformat
import pytest
from kernels import KINDS, kernel_of
from nbclient import NotebookClient
from nbformat import NotebookNode
from sampling import sampled

pytestmark = pytest.mark.full

SETUP = """
import os, signal, threading, time
import numpy as np
import colabkit

loader = colabkit.Loader((np.zeros((64, 2), np.float32), np.zeros(64, np.int64)), 1)

def step(batch):
    time.sleep(0.05)  # a step that takes its time
    return 0.5
"""
TRAIN = """
with colabkit.dashboard():
    colabkit.train(step, loader, state={})
"""
INTERRUPTED = """
with colabkit.dashboard():
    for batch in loader:
        signal.raise_signal(signal.SIGINT)
"""
BROKEN = """
from IPython.core.displaypub import DisplayPublisher
publish = type(get_ipython().display_pub).publish
type(get_ipython().display_pub).publish = lambda *bundle, **options: 1 / 0
try:
    with colabkit.dashboard():
        report = colabkit.train(step, loader, state={})
finally:
    type(get_ipython().display_pub).publish = publish
print("trained", report.epochs[0].samples)
"""
LEFT = """
from ipywidgets.widgets import widget
widgets = getattr(widget, "_instances", None)
if widgets is None:
    widgets = widget.Widget.widgets
threads = [thread.name for thread in threading.enumerate() if "colabkit" in thread.name]
print("widgets", len(widgets), "threads", threads)
"""
SHOWN = ("display_data", "update_display_data", "comm_open")


@dataclass
class CellMessages:
    """The messages from a cell to the front end: the type, the size in bytes and the time of each."""

    messages: list[tuple[str, int, float]] = field(default_factory=list)

    @property
    def frames(self) -> int:
        return sum(kind in ("display_data", "update_display_data") for kind, _, _ in self.messages)

    @property
    def seconds(self) -> float:
        return self.messages[-1][2] - self.messages[0][2]

    @property
    def bytes_per_s(self) -> float:
        """Return the bytes per second of all frames except the first one, which opens the output, and the last one."""
        sizes = [size for kind, size, _ in self.messages if kind == "update_display_data"]
        return sum(sizes[:-1]) / self.seconds


class Client(NotebookClient):
    sent: dict[int, CellMessages]

    def process_message(self, msg: dict[str, Any], cell: NotebookNode, cell_index: int) -> Any:
        if msg["msg_type"] in SHOWN:
            parts = ("header", "parent_header", "metadata", "content")
            size = sum(len(json.dumps(msg[part], default=str).encode()) for part in parts)
            self.sent.setdefault(cell_index, CellMessages()).messages.append((msg["msg_type"], size, time.monotonic()))
        return super().process_message(msg, cell, cell_index)


@pytest.fixture(scope="module", params=sampled(KINDS, 1))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("kernel")
    sources = [SETUP, TRAIN, INTERRUPTED, BROKEN, LEFT]
    cells = [nbformat.v4.new_code_cell(source.strip()) for source in sources]
    with kernel_of(request.param, folder, is_warm=True) as kernel:
        client = Client(
            nbformat.v4.new_notebook(cells=cells),
            timeout=120,
            kernel_name=kernel,
            allow_errors=True,
            resources={"metadata": {"path": str(folder)}},
        )
        client.sent = {}
        client.execute()
        yield client


def outputs(client: Client, cell: int) -> list[NotebookNode]:
    return client.nb.cells[cell].outputs


def printed(client: Client, cell: int) -> str:
    return "".join(output.text for output in outputs(client, cell) if output.output_type == "stream")


def test_the_last_frame_stays_in_the_saved_notebook_as_html_and_text(run: Client) -> None:
    panel, *rest = [output for output in outputs(run, 1) if output.output_type == "display_data"]
    assert rest == []
    assert set(panel.data) == {"text/html", "text/plain"}
    assert "epoch 1/1 · step 64/64" in panel.data["text/plain"]
    assert "Training panel" in panel.data["text/html"]
    assert len(panel.data["text/html"].encode()) <= 20_000
    assert "in total" in panel.data["text/html"]


def test_the_panel_is_painted_while_the_cell_is_busy_within_its_budget_of_messages_and_bytes(
    run: Client,
) -> None:
    sent = run.sent[1]
    assert sent.seconds > 3
    assert sent.frames >= sent.seconds
    assert sent.frames <= 2 * sent.seconds + 4, "twice a second, and the first and last ones"
    assert sent.bytes_per_s < 20_000
    times = [when for kind, _, when in sent.messages]
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) < 1.5


def test_ctrl_c_leaves_a_final_frame(run: Client) -> None:
    (panel,) = [output for output in outputs(run, 2) if output.output_type == "display_data"]
    assert "interrupted · epoch 2 · step 1/64" in panel.data["text/plain"]
    assert [output.ename for output in outputs(run, 2) if output.output_type == "error"] == ["KeyboardInterrupt"]


def test_a_failing_front_end_gets_text_and_training_continues(run: Client) -> None:
    text = printed(run, 3)
    assert "trained 64" in text
    assert re.search(r"epoch 1/1 · step 64/64", text)
    assert not [output for output in outputs(run, 3) if output.output_type == "error"]


def test_no_widget_and_no_thread_is_left(run: Client) -> None:
    assert printed(run, 4).strip().endswith("widgets 0 threads []")
    assert not [output for output in run.nb.cells[1].outputs if "widget-view" in str(output)]
