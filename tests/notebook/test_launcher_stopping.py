"""Interrupts of the launcher's work: when they arrive, and when they are raised."""

from __future__ import annotations

import signal

import pytest

from colabkit.foundation import interrupted_later
from colabkit.notebook.launcher.stopping import can_receive, interrupt_main_thread, stoppable


def test_an_interrupt_in_a_block_that_must_not_be_interrupted_is_raised_at_its_end() -> None:
    handler, passed = signal.getsignal(signal.SIGINT), []

    def block() -> None:
        with interrupted_later():
            interrupt_main_thread()
            passed.append("interrupted")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert passed == ["interrupted"]
    with interrupted_later():
        pass
    assert signal.getsignal(signal.SIGINT) == handler


def test_without_a_kernel_that_passes_clicks_on_nothing_is_offered_and_nothing_breaks() -> None:
    assert not can_receive(None)
    with stoppable(None, "button", interrupt_main_thread):
        pass
