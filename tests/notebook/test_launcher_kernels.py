"""The launcher, driven by a browser's click messages, in this environment's kernel and in Colab's."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty
from typing import Any

import pytest
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager
from kernels import KINDS, kernel_of
from trees import make_tree

pytestmark = pytest.mark.full

OPEN = """
%load_ext colabkit
import threading, colabkit
from ipywidgets.widgets import widget

def widgets():
    found = getattr(widget, "_instances", None)
    return len(widget.Widget.widgets if found is None else found)

stage, staged, threads = colabkit.stage, [], []

def counted(source, **options):
    staged.append(source)
    threads.append(threading.current_thread() is threading.main_thread())
    if source == "endless":
        threading.Event().wait()
    return stage(source, **options)

colabkit.stage = counted
panel = colabkit.launch()
view = panel.view
view.fields["source"].value, view.near.value = "tree", "disk"
view.fields["epochs"].value = "2"
"""
# Clicks that arrive right after the work are ignored.
STATE = """
import asyncio, json
while panel.is_busy:
    await asyncio.sleep(0.02)
print(json.dumps([view.said, staged, threads, list(panel.results)]))
"""
LIMIT_S = 120


@dataclass
class Kernel:
    """A kernel, its client, and all messages that the kernel published."""

    manager: KernelManager
    client: BlockingKernelClient
    published: list[dict[str, Any]] = field(default_factory=list)
    models: dict[str, str] = field(default_factory=dict)

    def run(self, code: str) -> str:
        """Run a cell and return its printed output; raise an error if the cell fails."""
        return self.read(self.client.execute(code))

    def read(self, parent: str) -> str:
        """Return the printed output of the request with the given ID."""
        deadline, printed = time.monotonic() + LIMIT_S, ""
        while time.monotonic() < deadline:
            message = self.next()
            is_mine = message["parent_header"].get("msg_id") == parent
            assert not (is_mine and message["msg_type"] == "error"), message["content"]
            if is_mine and message["msg_type"] == "stream":
                printed += message["content"]["text"]
            if is_mine and message["content"].get("execution_state") == "idle":
                return printed
        raise TimeoutError("the kernel did not answer")

    def next(self) -> dict[str, Any]:
        message = self.client.get_iopub_msg(timeout=LIMIT_S)
        self.published.append(message)
        return message

    def state(self) -> tuple[str, list[str], list[bool], list[str]]:
        """Return the message, the staged sources, whether the main thread staged each, and the results' names."""
        return tuple(json.loads(self.run(STATE)))

    def clicks(self, button: str, times: int = 1) -> list[str]:
        """Send a button's click message `times` times, as a browser does, and return the message IDs."""
        if button not in self.models:
            found = "view.stop" if button == "stop" else f"view.buttons[{button!r}]"
            self.models[button] = self.run(f"print({found}.model_id)").strip()
        model = self.models[button]
        data = {"method": "custom", "content": {"event": "click"}}
        sent = [self.client.session.msg("comm_msg", {"comm_id": model, "data": data}) for _ in range(times)]
        for message in sent:
            self.client.shell_channel.send(message)
        return [message["header"]["msg_id"] for message in sent]

    def click(self, action: str) -> tuple[str, list[str], list[bool], list[str]]:
        """Click a button, wait until its work is done, and return the state."""
        for parent in self.clicks(action):
            self.read(parent)
        return self.state()

    def wait_for(self, holds: Callable[[dict[str, Any]], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not holds(self.next()):
            assert time.monotonic() < deadline

    def interrupt_until(self, holds: Callable[[dict[str, Any]], bool]) -> None:
        """Interrupt the kernel until a message meets a condition.

        An interrupt can be lost, because Python ignores exceptions in destructors and callbacks. Such code often runs
        right after a message was sent, which is when this method interrupts.
        """
        for _ in range(5):
            self.manager.interrupt_kernel()
            deadline = time.monotonic() + 10
            with suppress(Empty):
                while time.monotonic() < deadline:
                    message = self.client.get_iopub_msg(timeout=10)
                    self.published.append(message)
                    if holds(message):
                        return
        raise TimeoutError("the kernel was not interrupted")


@pytest.fixture(scope="module", params=KINDS)
def kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    folder = tmp_path_factory.mktemp("kernel")
    make_tree(folder / "tree", 8)
    with kernel_of(request.param, folder) as name:
        manager = KernelManager(kernel_name=name)
        manager.start_kernel(cwd=str(folder))
    client = manager.blocking_client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=LIMIT_S)
        kernel = Kernel(manager, client)
        kernel.run(OPEN)
        yield kernel
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_two_clicks_in_a_row_do_the_work_once_and_in_the_main_thread(kernel: Kernel) -> None:
    before = kernel.state()
    for parent in kernel.clicks("stage", 3):
        kernel.read(parent)
    said, staged, threads, results = kernel.state()
    assert said.startswith("Done in ")
    assert staged == [*before[1], "tree"]
    assert all(threads)
    assert results == ["stage"]


def test_a_click_on_stop_ends_work_that_keeps_the_main_thread_busy(kernel: Kernel) -> None:
    kernel.run("view.fields['source'].value = 'endless'; print(view.stop.model_id)")
    kernel.clicks("stop")
    kernel.clicks("stage")
    kernel.wait_for(lambda message: "Copying the source … 1 s" in str(message["content"]))
    code = kernel.client.execute("print('waited')")
    kernel.clicks("stop")
    kernel.wait_for(lambda message: "Stopped." in str(message["content"]))
    assert kernel.read(code).strip() == "waited"
    assert kernel.state()[0] == "Stopped."
    kernel.run("view.fields['source'].value = 'tree'")
    assert kernel.click("stage")[0].startswith("Done in ")


def test_an_interrupt_is_shown_in_the_panel_and_the_next_click_works(kernel: Kernel) -> None:
    kernel.run("view.fields['source'].value = 'endless'")
    kernel.clicks("stage")
    kernel.wait_for(lambda message: "Copying the source … 1 s" in str(message["content"]))
    kernel.interrupt_until(lambda message: "Stopped" in str(message["content"]))
    assert kernel.state()[0] == "Stopped."
    kernel.run("view.fields['source'].value = 'tree'")
    assert kernel.click("stage")[0].startswith("Done in ")


def test_train_paints_the_live_panel_while_it_works_and_the_kernel_is_busy(kernel: Kernel) -> None:
    published = len(kernel.published)
    said, _, _, results = kernel.click("train")
    assert said.startswith("Done in ")
    assert results == ["train_on"]
    updates = [str(message["content"]) for message in kernel.published[published:]]
    assert sum("Training panel" in update for update in updates) >= 2
    begun = next(number for number, update in enumerate(updates) if "Loading PyTorch … " in update)
    ended = next(number for number, update in enumerate(updates) if "Done in " in update)
    assert "idle" not in [
        message["content"].get("execution_state") for message in kernel.published[published:][begun:ended]
    ]


def test_training_stops_at_a_click_and_continues_at_the_next(kernel: Kernel) -> None:
    kernel.run("view.fields['epochs'].value = '10000'")
    kernel.clicks("train")
    kernel.wait_for(lambda message: "Training … " in str(message["content"]))
    # Do not expect a particular epoch, since several epochs may end between two frames.
    kernel.wait_for(lambda message: re.search(r"epoch [0-9]{2,}/10,?000", str(message["content"])) is not None)
    kernel.clicks("stop")
    kernel.wait_for(lambda message: "Stopped. Click Continue to resume." in str(message["content"]))
    said, _, _, results = kernel.state()
    assert said == "Stopped. Click Continue to resume."
    assert results == ["train"]
    done = kernel.run("print(len(panel.results['train'].epochs))").strip()
    kernel.run(f"view.fields['epochs'].value = '{int(done) + 1}'")
    said, _, _, results = kernel.click("train")
    assert said.startswith("Done in ")
    trained = kernel.run("print(panel.results['train_on'].training.trained)").strip()
    assert trained == "1"


def test_an_error_is_shown_in_the_panel(kernel: Kernel) -> None:
    kernel.run("view.fields['source'].value = 'nowhere'")
    assert kernel.click("prepare")[0].startswith("Cannot read 'nowhere': no such file or folder")
    kernel.run("view.fields['source'].value = 'tree'")


def test_only_the_panel_is_shown(kernel: Kernel) -> None:
    kinds = {message["msg_type"] for message in kernel.published}
    assert "error" not in kinds
    texts = [message["content"] for message in kernel.published if message["msg_type"] == "stream"]
    assert all(text["name"] == "stdout" for text in texts), texts
    shown = [message["content"]["data"] for message in kernel.published if message["msg_type"] == "display_data"]
    view = "application/vnd.jupyter.widget-view+json"
    assert [sorted(data) for data in shown] == [[view, "text/plain"], ["text/html", "text/plain"]]


def test_unloading_leaves_the_last_result_but_no_widget_and_no_thread(kernel: Kernel) -> None:
    kernel.run("view.fields['epochs'].value = '1'")
    assert kernel.click("restart")[0].startswith("Done in ")
    code = "%unload_ext colabkit\nprint(widgets(), [t.name for t in threading.enumerate() if 'colabkit' in t.name])"
    assert kernel.run(code).strip() == "0 []"
    *kept, closed = [one["content"]["data"] for one in kernel.published if one["msg_type"] == "update_display_data"]
    assert "Training result" in "".join(data["text/html"] for data in kept)
    assert closed == {"text/html": "", "text/plain": ""}
