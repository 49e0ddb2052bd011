"""Stop the work of a click while the kernel's main thread does it.

The kernel handles clicks in order, so a click on Stop would wait for the end of the work. Its message is therefore
intercepted in the kernel's shell channel: in ipykernel 7 by the thread that receives all messages, in ipykernel 6 by a
thread that receives them while the main thread is busy, and passes them on at the end.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_POLLED_MS = 100


def can_receive(kernel: Any) -> bool:
    """Return whether the messages of this kernel can be received while its main thread is busy."""
    return hasattr(kernel, "shell_stream") and (
        hasattr(kernel, "shell_channel_thread_main") or hasattr(kernel, "schedule_dispatch")
    )


@contextlib.contextmanager
def stoppable(kernel: Any, button: str, stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` from another thread when a button is clicked, while the block keeps the main thread busy.

    Args:
        kernel: the kernel of the notebook; nothing happens unless `can_receive` returns true for it.
        button: model ID of the button's widget.
        stop: called for each click.
    """
    if not can_receive(kernel):
        yield
        return

    def is_for_stop(frames: Sequence[Any]) -> bool:
        if _clicked(kernel.session, frames) != button:
            return False
        stop()
        return True

    receiving = _by_its_channel_thread if getattr(kernel, "shell_channel_thread", None) else _by_a_thread
    with receiving(kernel, is_for_stop):
        yield


@contextlib.contextmanager
def _by_its_channel_thread(kernel: Any, takes: Callable[[Sequence[Any]], bool]) -> Iterator[None]:
    """Intercept messages in ipykernel 7's receiving thread, which passes on only those that are not handled here."""
    loop, stream, pass_on = kernel.shell_channel_thread.io_loop, kernel.shell_stream, kernel.shell_channel_thread_main

    def receive(frames: Sequence[Any]) -> Any:
        return None if takes(frames) else pass_on(frames)

    loop.add_callback(stream.on_recv, receive, copy=False)
    try:
        yield
    finally:
        loop.add_callback(stream.on_recv, pass_on, copy=False)


@contextlib.contextmanager
def _by_a_thread(kernel: Any, takes: Callable[[Sequence[Any]], bool]) -> Iterator[None]:
    """Receive messages in another thread during the block, since ipykernel 6 uses the busy main thread."""
    over = threading.Event()
    waiting: list[Sequence[Any]] = []
    socket = kernel.shell_stream.socket

    def receive() -> None:
        while not over.is_set():
            if socket.poll(_POLLED_MS):
                frames = socket.recv_multipart(copy=False)
                if not takes(frames):
                    waiting.append(frames)

    thread = threading.Thread(target=receive, name="colabkit-clicks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for frames in waiting:
            kernel.schedule_dispatch(kernel.dispatch_shell, frames)
        # The event loop was not notified of messages that arrived in the meantime, so make it look for them.
        kernel.shell_stream.flush()


def _clicked(session: Any, frames: Sequence[Any]) -> str:
    """Return the model ID of the widget that a message reports a click on; empty for other messages."""
    try:
        _, (_, header, _, _, content, *_) = session.feed_identities(frames, copy=False)
        if session.unpack(header.bytes)["msg_type"] != "comm_msg":
            return ""
        found = session.unpack(content.bytes)
        return str(found["comm_id"]) if found["data"]["content"]["event"] == "click" else ""
    except (KeyError, TypeError, ValueError):
        return ""


def interrupt_main_thread() -> None:
    """Interrupt the main thread as the kernel's interrupt does, even if it waits in a system call."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def publish_state(kernel: Any, state: str, parent: Any) -> None:
    """Make the front end show the kernel as `"busy"` or `"idle"`, in response to the message `parent`."""
    if can_receive(kernel):
        content = {"execution_state": state}
        kernel.session.send(kernel.iopub_socket, "status", content, parent=parent, ident=b"kernel.status")
